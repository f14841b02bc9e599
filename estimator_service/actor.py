"""The fleet's one estimator as a Ray actor, and the link by which everybody else calls it.

The actor has a name. Whoever needs it looks the name up and, if it is free, takes it: Ray lets one
of many succeed, and gives that one to the others. It is detached, so it outlives who made it, and
Ray restarts it for ever: where its process died, on the same node, and where the node died, on
another. It then begins from its store; what was not stored is sent again by those who hold it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import ray

from estimator_service.messages import Frame, PairKey, Reply, Snapshot, decode, encode
from estimator_service.service import (
    EstimatorAway,
    EstimatorService,
    ExchangeRefused,
    ServiceConfig,
    ServiceStatus,
)

NAMESPACE = "specfleet"
ESTIMATOR = "estimator"
"""Its name in the namespace."""
MAX_UNANSWERED = 32
"""Calls of one process that may wait for an answer; more fail at once. While the actor hangs, calls
that nobody waits for any more are still on their way to it."""


class ActorStatus(ServiceStatus):
    """How the actor is, and where."""

    pid: int
    node: str
    """Ray's id of it."""


class EstimatorActor:
    """`EstimatorService` in a Ray actor. It lives whatever its store does."""

    # Ray awaits it; a type checker believes that it cannot.
    async def __init__(self, config: dict[str, Any]) -> None:  # type: ignore[misc]
        self._service = EstimatorService(ServiceConfig.model_validate(config))
        self._service.start()

    async def exchange(self, key: PairKey, frames: list[bytes]) -> list[bytes]:
        """`EstimatorService.exchange`."""
        return self._service.exchange(key, frames)

    async def snapshot(self) -> bytes:
        """An encoded `Snapshot`. Raises EstimatorAway."""
        return encode(self._service.snapshot())

    async def status(self) -> ActorStatus:
        """How it is, whatever its state."""
        node = ray.get_runtime_context().get_node_id()
        return ActorStatus(**self._service.status(), pid=os.getpid(), node=node)

    async def stop(self) -> None:
        """`EstimatorService.stop`: store what there is, and answer nothing any more."""
        await self._service.stop()


_ACTOR: Any = ray.remote(EstimatorActor)


class EstimatorLink:
    """A client of the fleet's estimator; the first one there is creates it.

    For one event loop, which it never blocks: everything of Ray that may wait is called in a
    thread. Whatever goes wrong becomes EstimatorAway, and the actor is looked up again.

    Args:
        config: for the estimator, if it has to be created. One that runs keeps its own.
        timeout: seconds that a call may take, finding the actor included.
    """

    def __init__(self, config: ServiceConfig, *, timeout: float = 5.0) -> None:
        self._config = config
        self._timeout = timeout
        self._actor: Any = None
        # One thread: where it hangs, calls that gave up meanwhile are not made any more.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specfleet-link")

    async def exchange(self, key: PairKey, frames: Sequence[Frame]) -> list[Reply]:
        """A reply to each frame. Raises EstimatorAway within the timeout.

        What was sent may have been taken even so: send it again, and it is not counted again.
        """
        replies = await self._call("exchange", key, [encode(frame) for frame in frames])
        return [decode(reply, Reply) for reply in replies]

    async def snapshot(self) -> Snapshot:
        """What the estimator knows. Raises EstimatorAway within the timeout."""
        return decode(await self._call("snapshot"), Snapshot)

    async def status(self) -> ActorStatus:
        """How the estimator is, even if it does not serve. Raises EstimatorAway likewise."""
        found: ActorStatus = await self._call("status")
        return found

    async def end(self) -> bool:
        """Have it store what it knows, if it can, and end it for good; False if there is none.

        The next call of any link creates it again, from its store.
        """
        loop = asyncio.get_running_loop()
        actor = await loop.run_in_executor(self._thread, _find)
        if actor is None:
            return False
        self._actor = actor
        with suppress(EstimatorAway):
            await self._call("stop")
        self._actor = None
        await loop.run_in_executor(self._thread, lambda: ray.kill(actor, no_restart=True))
        return True

    def close(self) -> None:
        """End the thread; no call can be made any more. The estimator lives on."""
        self._thread.shutdown(wait=False)

    async def _call(self, method: str, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout):
                call = await loop.run_in_executor(self._thread, self._send, method, args)
                try:
                    return await call
                except (asyncio.CancelledError, TimeoutError):
                    self._thread.submit(ray.cancel, call)
                    raise
        except Exception as error:
            self._actor = None
            raise EstimatorAway(_reason(error, self._timeout)) from error

    def _send(self, method: str, args: tuple[Any, ...]) -> Any:
        """Runs in the thread; returns a reference to the answer."""
        if self._actor is None:
            self._actor = find_or_create(self._config)
        return getattr(self._actor, method).remote(*args)


def _find() -> Any:
    """The actor; None if there is none."""
    if not ray.is_initialized():  # or Ray would start a cluster here
        raise EstimatorAway("this process is in no Ray cluster")
    try:
        return ray.get_actor(ESTIMATOR, namespace=NAMESPACE)
    except ValueError:
        return None


def find_or_create(config: ServiceConfig) -> Any:
    """A handle of the actor, which is made if it is not there. May wait for Ray.

    Raises EstimatorAway: this process is in no Ray cluster.
    """
    found = _find()
    if found is not None:
        return found
    created: Any = _ACTOR.options(
        name=ESTIMATOR,
        namespace=NAMESPACE,
        get_if_exists=True,  # somebody may be quicker
        lifetime="detached",
        max_restarts=-1,
        max_pending_calls=MAX_UNANSWERED,
        num_cpus=0,
        # Or it would belong to the placement group of the replica that makes it, and end with it.
        scheduling_strategy="DEFAULT",
    )
    return created.remote(config.model_dump())


def _reason(error: Exception, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:g} s"
    cause = getattr(error, "cause", None) or error  # Ray's own text is a whole traceback
    text = str(cause).strip().splitlines() or [""]
    return (
        text[0]
        if isinstance(cause, (EstimatorAway, ExchangeRefused))
        else f"{type(cause).__name__}: {text[0]}"
    )
