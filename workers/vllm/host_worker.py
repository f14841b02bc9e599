"""Variable-length verification on vLLM's V1 model runner, decided on the host.

    LLM(..., worker_cls="workers.vllm.host_worker.HostWorker", async_scheduling=False,
        additional_config={"specfleet": {...}})

What `take_draft_token_ids` returns is what the scheduler sends to verification, and lists of
unequal length are legal: so the worker reads the drafter's distributions, and returns shorter
lists. Whatever fails in here is counted, and that step's drafts are verified whole: no failure of
ours may reach a request.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from vllm.platforms import current_platform

from workers.config import WorkerConfig
from workers.speculation import Drafted, Speculation
from workers.vllm import expand_kernel
from workers.vllm.capture import Capture
from workers.vllm.requests import read_request
from workers.vllm.rpc import (
    Exchanged,
    coefficients_hash,
    read_order,
    write_exchanged,
    write_version,
)

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)
RECORD_ROWS = 500
"""Rows of the record in one answer: some 50 KiB, which Ray sends within a message. A larger answer
goes through its object store, and a client that broadcasts a call may crash on one."""


class HostWorkerError(ValueError):
    """An engine that the host path cannot serve."""


def _engine_worker() -> Any:
    """The platform's own worker class."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


class _Timed(NamedTuple):
    start: float
    requests: int
    tokens: int


class HostWorker(_engine_worker()):  # type: ignore[misc]
    """vLLM's V1 worker, verifying prefixes of drafts and gathering labels."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Raises HostWorkerError, or pydantic's ValidationError, on a wrong configuration."""
        super().__init__(vllm_config, *args, **kwargs)
        self.specfleet = WorkerConfig.of(vllm_config.additional_config or {})
        _check(vllm_config)
        self._speculation = Speculation(
            self.specfleet,
            vllm_config.speculative_config.num_speculative_tokens,
            vary_depth=vllm_config.parallel_config.world_size_across_dp == 1,
        )
        self._capture: Capture | None = None
        self._failures: Counter[str] = Counter()
        self._timed: _Timed | None = None
        """The step that runs, if the next one's start says what it cost."""
        self._depth = self._speculation.positions
        """Positions that the step drafts."""
        self._own_seconds = 0.0
        """Spent in here, in all: on features, lengths and labels."""
        if current_platform.is_cpu():
            expand_kernel.register()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.use_v2_model_runner:
            raise HostWorkerError("the host path runs on vLLM's V1 model runner, this is V2")
        drafter = getattr(self.model_runner, "drafter", None)
        if drafter is None:
            return  # A stage of a pipeline that does not draft.
        try:
            self._capture = Capture(
                drafter, details=self.specfleet.record > 0, clock=time.perf_counter
            )
        except TypeError as error:
            raise HostWorkerError(f"the host path cannot predict: {error}") from error

    def execute_model(self, scheduler_output: Any) -> Any:
        self._guarded("time", self._time, scheduler_output)
        self._guarded("schedule", self._schedule, scheduler_output)
        output = super().execute_model(scheduler_output)
        if output is not None:
            # No step of ours: nothing was sampled, or nothing was scheduled.
            self._guarded("verified", self._verified, output)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self._capture is not None:
            self._capture.reset()
        output = super().sample_tokens(grammar_output)
        self._guarded("verified", self._verified, output)
        return output

    def take_draft_token_ids(self) -> Any:
        drafts = super().take_draft_token_ids()
        shortened = self._guarded("drafted", self._shortened, drafts)
        if shortened is not None:
            drafts.draft_token_ids = shortened
        return drafts

    def exchange(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Apply an order and drain the round. Raises OrderError, and then has done neither."""
        mine = self._speculation
        rounds = mine.exchange(read_order(order, mine.positions))
        answer = Exchanged(self.rank, mine.applied, coefficients_hash(mine.coefficients), rounds)
        return write_exchanged(answer)

    def status(self) -> dict[str, Any]:
        """This worker, for people."""
        capture = self._capture
        return {
            "rank": self.rank,
            "path": "host",
            "positions": self._speculation.positions,
            "applied": write_version(self._speculation.applied),
            "coefficients_hash": coefficients_hash(self._speculation.coefficients),
            "failures": dict(self._failures),
            "capture_failures": 0 if capture is None else capture.failures,
            "own_seconds": self._own_seconds + (0.0 if capture is None else capture.own_seconds),
            **self._speculation.status(),
        }

    def drain_record(self) -> dict[str, Any]:
        """The oldest rows of the record, by column, which are forgotten; none when it is empty."""
        return self._speculation.record.drain(RECORD_ROWS)

    def _schedule(self, scheduler_output: Any) -> None:
        admitted = scheduler_output.scheduled_spec_decode_tokens
        self._speculation.schedule(
            new=[
                read_request(new.req_id, new.sampling_params, self.specfleet.workloads)
                for new in scheduler_output.scheduled_new_reqs
            ],
            resumed=scheduler_output.scheduled_cached_reqs.resumed_req_ids,
            finished=scheduler_output.finished_req_ids,
            admitted=admitted,
            unlike=self._unlike(admitted),
            runs=scheduler_output.total_num_scheduled_tokens > 0,
        )
        scheduled = scheduler_output.num_scheduled_tokens
        self._depth = min(
            self._speculation.plan(len(scheduled)) if scheduled else self._speculation.positions,
            scheduler_output.num_spec_tokens_to_schedule,
        )
        scheduler_output.num_spec_tokens_to_schedule = self._depth

    def _unlike(self, admitted: Mapping[str, Any]) -> frozenset[str]:
        """Requests whose drafts are judged as if the drafter had been certain.

        vLLM does so, losslessly, with all drafts of a step in which one of them comes without the
        probabilities that it was drawn from: it waited for a step or more, or is a placeholder.
        """
        runner = self.model_runner
        known = runner._draft_prob_req_ids
        if known is None or runner._draft_probs is None or admitted.keys() <= set(known):
            return frozenset()
        return frozenset(admitted)

    def _time(self, scheduler_output: Any) -> None:
        """A step lasts from its start to the next one's, with all that the engine does between."""
        now = time.perf_counter()
        last, self._timed = self._timed, None
        scheduled = scheduler_output.num_scheduled_tokens
        # Without a request that goes on, the engine was idle between the two, or is now.
        goes_on = not scheduled.keys().isdisjoint(scheduler_output.scheduled_cached_reqs.req_ids)
        if last is not None and goes_on and self._capture is not None:
            draft = self._capture.seconds
            self._speculation.cost.observe(
                requests=last.requests,
                tokens=last.tokens,
                verify=now - last.start - draft,
                draft=draft,
                depth=self._depth,
            )
        drafts = scheduler_output.scheduled_spec_decode_tokens
        most = self._speculation.positions + 1
        # A step that also reads prompts says nothing about what verification costs.
        if all(n == 1 + len(drafts.get(r, ())) <= most for r, n in scheduled.items()):
            self._timed = _Timed(now, len(scheduled), scheduler_output.total_num_scheduled_tokens)

    def _verified(self, output: Any) -> None:
        # A stage of a pipeline that is not the last hands on something else.
        sampled = getattr(output, "sampled_token_ids", None)
        if not sampled:
            return
        self._speculation.verified(
            {request_id: sampled[i] for request_id, i in output.req_id_to_index.items()}
        )

    def _shortened(self, drafts: Any) -> list[list[int]] | None:
        lengths = self._drafted(drafts)
        if lengths is None:
            return None
        pairs = zip(drafts.draft_token_ids, lengths, strict=True)
        return [tokens[:length] for tokens, length in pairs]

    def _drafted(self, drafts: Any) -> list[int] | None:
        """[R], lengths to verify; None leaves the drafts as they are."""
        capture = self._capture
        positions = self._speculation.positions
        if drafts is None or not drafts.req_ids or capture is None:
            self._speculation.nothing_drafted()
            return None
        f = capture.take(len(drafts.req_ids), positions)
        if f is None:
            self._speculation.nothing_drafted()
            return None
        return self._speculation.drafted(
            Drafted(
                drafts.req_ids,
                drafts.draft_token_ids,
                f,
                capture.details(drafts.draft_token_ids, positions) if self.specfleet.record else {},
            )
        )

    def _guarded(
        self, what: str, call: Callable[P, T | None], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        except Exception:
            if not self._failures[what]:
                _log.exception("%s failed; drafts are verified whole", what)
            self._failures[what] += 1
            return None
        finally:
            self._own_seconds += time.perf_counter() - start


def _check(vllm_config: Any) -> None:
    if vllm_config.speculative_config is None:
        raise HostWorkerError("HostWorker needs a speculative_config: there is nothing to verify")
    if vllm_config.scheduler_config.async_scheduling:
        raise HostWorkerError(
            "HostWorker needs async_scheduling=False: otherwise the scheduler does not ask which "
            "drafts to verify"
        )
