"""The fleet on Ray Serve: put there, watched while it comes up, and taken away.

The part of `specfleet up` and `down` that knows Ray. For a process that does nothing else: Ray and
Serve know one cluster in a process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.app import (
    MODELS_APP,
    OPERATOR_APP,
    OPERATOR_PREFIX,
    SERVER,
    build_models,
    build_operator_api,
)
from control_plane.config import FleetConfig, ModelConfig
from control_plane.fleet_state import HOST, FleetState
from estimator_service.service import ServiceConfig


class DeploymentError(Exception):
    """Ray or Serve refused; the text says why."""


@dataclass(frozen=True)
class ModelProgress:
    """How far one model is."""

    name: str
    running: int
    wanted: int
    trouble: str
    """Why a replica did not start, if one did not; Serve tries again."""


@dataclass(frozen=True)
class FleetProgress:
    """How far the fleet is."""

    models: tuple[ModelProgress, ...]
    deployed: bool
    """Serve has both applications."""
    ready: bool
    failed: str
    """Why it will not come up; empty while it may."""


def connect(address: str, environment: Mapping[str, str] | None = None) -> None:
    """Join a Ray cluster, quietly, unless one was joined before. Raises DeploymentError."""
    os.environ.update(environment or {})
    # Set before the imports, which read them.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import ray

    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise DeploymentError(
            f"Ray at {address} does not let us in: {_first_line(error)}"
        ) from error


def join(state: FleetState) -> None:
    """Join the cluster of a fleet that is up: Serve has its handles. Raises DeploymentError."""
    connect(state.address, state.ray.environment if state.ray else None)


def disconnect() -> None:
    """Leave it; what was deployed stays."""
    import ray

    ray.shutdown()


def running_ray() -> str | None:
    """The address of the Ray that `ray start` left on this machine, or of RAY_ADDRESS.

    Not of one that a program started for itself, which ends with it.
    """
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return named
    file = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    try:
        address = file.read_text().strip()
    except OSError:
        return None
    return address if _answers(address) else None


def serve_is_running() -> bool:
    """Whether Serve has an HTTP server in the cluster that was joined."""
    from ray import serve

    return bool(serve.status().proxies)


def deploy(config: FleetConfig) -> None:
    """Hand both applications to Serve, and start Serve if it is not running; do not wait.

    Imports vLLM. Raises ConfigError and DeploymentError.
    """
    from ray import serve

    models, operator = build_models(config), build_operator_api(config)
    try:
        serve.start(http_options={"host": HOST, "port": config.port})
        serve.run_many(
            [
                serve.RunTarget(models, name=MODELS_APP, route_prefix="/"),
                serve.RunTarget(operator, name=OPERATOR_APP, route_prefix=OPERATOR_PREFIX),
            ],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
    except Exception as error:
        raise DeploymentError(f"Serve refused the fleet: {_first_line(error)}") from error


def progress(config: FleetConfig) -> FleetProgress:
    """How far it is."""
    from ray import serve

    applications = serve.status().applications
    mine = [applications.get(name) for name in (MODELS_APP, OPERATOR_APP)]
    failed = next(
        (
            _cause([d.message for d in app.deployments.values()] + [app.message])
            for app in mine
            if app and app.status in ("DEPLOY_FAILED", "UNHEALTHY")
        ),
        "",
    )
    return FleetProgress(
        models=tuple(_model_progress(model, mine[0]) for model in config.models),
        deployed=all(app is not None for app in mine),
        ready=all(app is not None and app.status == "RUNNING" for app in mine),
        failed=failed,
    )


def remove(*, stop_serve: bool) -> list[str]:
    """Take the fleet away: replicas say their last, then the estimator stores all and ends.

    Args:
        stop_serve: end Serve too, if nothing of others runs in it.

    Returns:
        What was there.
    """
    from ray import serve

    there = [name for name in (MODELS_APP, OPERATOR_APP) if name in serve.status().applications]
    for name in there:
        serve.delete(name)
    if end_estimator():
        there.append("estimator")
    if stop_serve and not serve.status().applications:
        serve.shutdown()
    return there


def end_estimator() -> bool:
    """End the estimator after it has stored everything; False if there was none."""
    from estimator_service.actor import EstimatorLink

    # Its configuration is for a new one only, which this does not make.
    return asyncio.run(EstimatorLink(ServiceConfig(), timeout=15.0).end())


def _model_progress(model: ModelConfig, app: Any) -> ModelProgress:
    name = f"{SERVER.rpartition(':')[2]}:{model.name.replace('/', '--').replace('.', '_')}"
    deployment = app.deployments.get(name) if app else None
    if deployment is None:
        return ModelProgress(model.name, 0, model.fewest, "")
    running = sum(n for state, n in deployment.replica_states.items() if state == "RUNNING")
    trouble = _cause([deployment.message]) if "failed" in deployment.message else ""
    return ModelProgress(model.name, running, model.fewest, trouble)


def _cause(messages: list[str]) -> str:
    """The last line of the first message that says anything: where a traceback has its error."""
    for message in messages:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        if lines:
            return lines[-1]
    return "Serve does not say why"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2.0):
            return True
    except (OSError, ValueError):
        return False
