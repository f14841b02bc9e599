"""What the device path adds to a vLLM worker, as a class to mix in before vLLM's.

`device_worker.DeviceWorker` is it with vLLM's GPU worker. Everything is attached where vLLM makes
what it attaches to, and before CUDA graphs are captured:

    load_model                  the estimator takes the place of vLLM's in the speculator
    initialize_from_config      policies reach vLLM's adaptive verification
    compile_or_warm_up_model    what was learned from made-up requests is forgotten
    execute_model               new requests are noted, and which of them must not be observed
    exchange, status            what the replica calls through `collective_rpc`
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workers.config import WorkerConfig
from workers.lease import Lease
from workers.vllm import device_contract as contract
from workers.vllm.device_estimator import DeviceEstimator
from workers.vllm.device_steering import Steering, steer
from workers.vllm.requests import read_request
from workers.vllm.rpc import (
    Exchanged,
    coefficients_hash,
    read_order,
    write_coefficients,
    write_exchanged,
    write_version,
)

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    # vLLM is typed, but its worker pulls in half of vLLM, and the CPU's is another one.
    class _Worker:
        vllm_config: Any
        model_runner: Any
        rank: int

        def load_model(self, **named: Any) -> None: ...
        def initialize_from_config(self, kv_cache_config: Any) -> None: ...
        def compile_or_warm_up_model(self) -> Any: ...
        def execute_model(self, scheduler_output: Any) -> Any: ...
else:
    _Worker = object


class NoEstimatorError(RuntimeError):
    """This worker has no estimator to exchange with; the message says why."""


class DeviceHooks(_Worker):
    """Mix in before a worker class of vLLM, on its V2 model runner."""

    fleet: DeviceEstimator | None = None
    steering: Steering | None = None
    _why_not = "no model is loaded"
    _skipped: dict[str, str]
    """Reason by id, of the running requests that are not observed."""

    # vLLM's life.

    def load_model(self, **named: Any) -> None:
        """Load target and drafter, and take the estimator's place.

        Raises:
            ValidationError: of pydantic, for settings that break a rule.
        """
        config = WorkerConfig.of(self.vllm_config.additional_config or {})
        super().load_model(**named)
        self._skipped = {}
        try:
            self._attach(config)
        except Exception as error:
            self._detach(f"attaching failed: {error!r}")

    def _attach(self, config: WorkerConfig) -> None:
        speculator = getattr(self.model_runner, "speculator", None)
        kernels = getattr(speculator, "acceptance_estimator", None)
        if speculator is None or kernels is None:
            self._detach(
                "vLLM has no acceptance estimator here: it needs the V2 model runner, a drafter "
                "and enable_adaptive_verification"
            )
            return
        moved = contract.moved_in_speculator(speculator)
        if not moved:
            slots, positions = speculator.max_num_reqs, speculator.num_speculative_steps
            moved = contract.moved_in_kernels(kernels, slots, positions)
        if moved:
            self._detach("; ".join(moved))
            return
        self.steering = Steering(positions, config.order)
        self.fleet = DeviceEstimator(kernels, self.steering, Lease(config.lease))
        # Compiled now, and not while somebody waits for an answer.
        self.fleet.warm_up()
        speculator.acceptance_estimator = self.fleet
        self._why_not = ""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make vLLM's adaptive verification, and steer it."""
        super().initialize_from_config(kv_cache_config)
        manager = getattr(self.model_runner, "adaptive_verification", None)
        if manager is None or self.steering is None:
            return
        moved = contract.moved_in_manager(manager)
        if moved:
            self.steering.fault = "; ".join(moved)
            logger.error("policies have no effect: %s", self.steering.fault)
        else:
            steer(manager, self.steering)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, and forget what came of it."""
        result = super().compile_or_warm_up_model()
        if self.fleet is not None:
            self.fleet.forget()
        self._skipped.clear()
        return result

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the target, and note new requests before `sample_tokens` grades what it says."""
        output = super().execute_model(scheduler_output)
        if self.fleet is not None and self.fleet.fault is None:
            try:
                self._note(self.fleet, scheduler_output)
            except Exception as error:
                self.fleet.fail(error)
        return output

    def _note(self, fleet: DeviceEstimator, scheduler_output: Any) -> None:
        for request_id in scheduler_output.finished_req_ids:
            self._skipped.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            # A request that comes back after a preemption is new here, in another slot.
            skipped = read_request(new.req_id, new.sampling_params, ()).skipped
            counted = new.req_id in self._skipped
            if skipped is not None:
                self._skipped[new.req_id] = skipped
            slot = self.model_runner.req_states.req_id_to_index[new.req_id]
            fleet.begin(slot, skipped, count=not counted)

    def _detach(self, why: str) -> None:
        self.fleet = self.steering = None
        self._why_not = why
        logger.warning("acceptance is not shared with the fleet: %s", why)

    # The replica's calls.

    def exchange(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Apply an order and drain, at one step boundary; see `rpc`.

        An exchange also keeps the fleet in charge: without one for about half a minute, vLLM fits
        by itself. `coefficients_hash` is of what the device held at the last look, which on a GPU
        was at the end of the exchange before.

        Raises:
            OrderError: the order breaks a rule; nothing has changed.
            NoEstimatorError: nothing is attached.
        """
        if self.fleet is None or self.steering is None:
            raise NoEstimatorError(self._why_not)
        told = read_order(order, self.fleet.positions)
        rounds = self.fleet.exchange(told.coefficients)
        self.steering.exchanged()
        if told.policy is not None:
            self.steering.policy = told.policy
        if told.exploration is not None:
            self.steering.explore(told.exploration)
        proof = self.fleet.proof
        return write_exchanged(
            Exchanged(self.rank, self.fleet.applied, coefficients_hash(proof), rounds)
        )

    def status(self) -> dict[str, Any]:
        """Who, what is applied and what went wrong, in plain types.

        `coefficients` are the device's at the last look; what it holds if the ranks differ is for
        `ranks.correction`.
        """
        status: dict[str, Any] = {
            "rank": self.rank,
            "path": "device",
            "attached": not self._why_not,
        }
        if self.fleet is None or self.steering is None:
            return {**status, "fault": self._why_not}
        policy = self.steering.policy
        return {
            **status,
            "fault": self.fleet.fault or self.steering.fault,
            "applied": write_version(self.fleet.applied),
            "coefficients": write_coefficients(self.fleet.proof),
            "coefficients_hash": coefficients_hash(self.fleet.proof),
            "local": self.fleet.local,
            "refits": self.fleet.refits,
            "dropped": self.fleet.dropped,
            "policy": {"policy": policy.policy.value, "length": policy.length},
            "exploring": self.steering.explores,
            "steered": getattr(self.model_runner, "adaptive_verification", None) is not None,
        }
