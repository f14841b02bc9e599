"""Calls to every replica of a running fleet, through Serve's handles."""

from __future__ import annotations

import time
from typing import Any

from control_plane.deployment import DeploymentError, connect, join
from control_plane.fleet_state import read_state

DEPLOYMENT = "SpecFleetServer:"
"""How Ray Serve LLM begins the name of a deployment of `workers.server.SpecFleetServer`."""
CALL_SECONDS = 30.0
"""That replicas may take for an answer: a call into an engine waits for the step in flight."""
POPULATED_WITHIN = 10.0
"""Seconds that a new handle may take to learn which replicas there are."""


class ReplicasError(Exception):
    """There is no fleet to talk to, or none of its replicas answers: a sentence for people."""


class Replicas:
    """The replicas of all models of the fleet on this machine's Ray, or on RAY_ADDRESS."""

    def __init__(self, handles: dict[str, Any]) -> None:
        """Handles by the name of their deployment; see `connect`."""
        self._handles = handles
        self.failures: list[str] = []
        """What replicas that did not answer the latest call said."""

    @classmethod
    def connect(cls) -> Replicas:
        """Join the Ray of the fleet that is up, as a client. Raises ReplicasError."""
        state = read_state()
        try:
            # Before Ray is imported: it reads then how the cluster wants to be talked to.
            if state is not None:
                join(state)
            else:
                connect("auto")
        except DeploymentError as error:
            raise ReplicasError(f"no Ray that runs a fleet: {error}") from error
        import ray
        from ray import serve

        try:
            applications = serve.status().applications
        except (RuntimeError, ray.exceptions.RayError) as error:
            raise ReplicasError(f"no Ray that runs a fleet: {_first_line(error)}") from error
        handles = {
            name: serve.get_deployment_handle(name, app)
            for app, status in applications.items()
            for name in status.deployments
            if name.startswith(DEPLOYMENT)
        }
        if not handles:
            raise ReplicasError("Ray runs, but no fleet on it; `specfleet up` starts one")
        return cls(handles)

    def call(self, method: str, *arguments: Any, timeout: float = CALL_SECONDS) -> list[Any]:
        """The answers of all replicas that gave one within `timeout` seconds. Blocks.

        Raises:
            ReplicasError: none did.
        """
        answers: list[Any] = []
        self.failures = []
        for handle in self._handles.values():
            try:
                found = _broadcast(handle, method, arguments, timeout)
            except Exception as error:
                found = [error]
            for answer in found:
                if isinstance(answer, BaseException):
                    self.failures.append(_first_line(answer))
                else:
                    answers.append(answer)
        if not answers:
            raise ReplicasError(f"no replica answered {method}: {'; '.join(self.failures)}")
        return answers


def _broadcast(handle: Any, method: str, arguments: tuple[Any, ...], timeout: float) -> list[Any]:
    """Answers and exceptions, one of each replica."""
    from ray.serve.exceptions import DeploymentUnavailableError

    start = time.monotonic()
    while True:
        try:
            response = handle.broadcast(method, *arguments)
            return list(response.results(timeout_s=timeout, return_exceptions=True))
        except DeploymentUnavailableError:
            # A new handle does not know its replicas yet.
            if time.monotonic() - start > POPULATED_WITHIN:
                raise
            time.sleep(0.1)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Ray puts the remote traceback first, and what was raised last.
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
