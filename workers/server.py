"""A replica of Ray Serve LLM that belongs to a fleet.

    LLMConfig(server_cls="workers.server:SpecFleetServer", ...)

Everything else of the application, its ingress included, stays what `ray.serve.llm` makes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.llm import LLMServer

from estimator_service.actor import EstimatorLink
from estimator_service.messages import Policy, PolicyOrder
from workers.exchange import Exchange
from workers.replica_config import KEY, ReplicaConfig

_log = logging.getLogger(__name__)
HOST_WORKER = "workers.vllm.host_worker.HostWorker"
DEVICE_WORKER = "workers.vllm.device_worker.DeviceWorker"
FIRST_EXCHANGE_SECONDS = 20.0
"""How long a new replica waits for the fleet's coefficients before it serves without them."""
FLUSH_SECONDS = 10.0
"""How long a replica that ends tries to hand over its last labels."""
CALL_SECONDS = 30.0
"""That a call into the engine may take: it waits for the step in flight."""


def equip(config: Any) -> None:
    """Name SpecFleet's worker in the engine's arguments of an `LLMConfig`, unless they name one.

    Raises ValueError if there is no drafter: nothing would be verified.
    """
    arguments = config.engine_kwargs
    speculative = arguments.get("speculative_config")
    if not speculative:
        raise ValueError(f"{config.model_id}: engine_kwargs lack a speculative_config")
    ReplicaConfig.model_validate(config.experimental_configs.get(KEY, {}))
    if "worker_cls" in arguments:
        return
    if speculative.get("enable_adaptive_verification"):
        config.update_engine_kwargs(worker_cls=DEVICE_WORKER)
    else:
        config.update_engine_kwargs(worker_cls=HOST_WORKER, async_scheduling=False)


class SpecFleetServer(LLMServer):
    """`LLMServer` whose workers share their labels with the fleet, and verify as it says."""

    _exchange: Exchange | None = None
    _running: asyncio.Task[None] | None = None

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:  # type: ignore[override]
        """Called when the application is built, before its engine's arguments are read."""
        equip(llm_config)
        options: dict[str, Any] = super().get_deployment_options(llm_config)
        return options

    async def start(self) -> None:
        """Start the engine, and have the fleet's coefficients before the first request."""
        await super().start()  # type: ignore[no-untyped-call]
        config = self._llm_config
        mine = ReplicaConfig.model_validate(config.experimental_configs.get(KEY, {}))
        self._exchange = Exchange(
            self._exchange_workers,
            EstimatorLink(mine.estimator, timeout=mine.timeout_seconds),
            mine.pair(config.model_id, config.engine_kwargs["speculative_config"]),
            replica=serve.get_replica_context().replica_id.unique_id,
            incarnation=time.time_ns() // 1_000_000,
            interval=mine.interval_seconds,
        )
        try:
            await asyncio.wait_for(self._join(self._exchange), FIRST_EXCHANGE_SECONDS)
        except Exception:
            _log.exception("the first exchange failed; serving with the initial coefficients")
        self._running = asyncio.create_task(self._exchange.run())

    async def specfleet_status(self) -> dict[str, Any]:
        """This replica's exchange, and every rank's worker."""
        exchange = self._exchange
        return {
            "exchange": {} if exchange is None else exchange.status(),
            "workers": await self._call_workers("status"),
        }

    async def specfleet_drain_record(self) -> dict[str, Any]:
        """The oldest rows of the first rank's record, by column; they are forgotten here."""
        answers = await self._call_workers("drain_record")
        return dict(answers[0]) if answers else {}

    async def specfleet_policy(self, policy: str, length: int | None, seconds: float) -> None:
        """Verify by this policy for so long, whatever the fleet's says.

        Raises OrderError for a length that does not go with the policy or with K.
        """
        if self._exchange is not None:
            await self._exchange.steer(PolicyOrder(Policy(policy), length), seconds)

    async def __del__(self) -> None:
        """Serve's graceful stop: hand over the last labels, then end the engine."""
        if self._exchange is not None:
            try:
                await asyncio.wait_for(self._exchange.flush(), FLUSH_SECONDS)
            except Exception:
                _log.exception("the last labels were not handed over")
        await super().__del__()

    async def _join(self, exchange: Exchange) -> None:
        while not await exchange.once():
            await asyncio.sleep(0.2)

    async def _exchange_workers(self, order: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
        return await self._call_workers("exchange", order)

    async def _call_workers(self, method: str, *args: Any) -> Sequence[Mapping[str, Any]]:
        answers: Sequence[Mapping[str, Any]] = await self.collective_rpc(
            method, timeout=CALL_SECONDS, args=args
        )
        return answers
