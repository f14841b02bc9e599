"""An engine on vLLM's V2 runner on the CPU, and the calls that a replica makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workers.reference.paths import model_path
from workers.vllm.rpc import Exchanged, Order, read_exchanged, write_order

POSITIONS = 3
PROMPTS = ["Once upon a time there was", "def add(a, b):"]
WORKER = "tests.workers.vllm.device.v2_worker.CpuDeviceWorker"


@dataclass
class Engine:
    """A vLLM engine, and the calls that a replica makes."""

    llm: Any

    def exchange(self, order: Order | None = None) -> Exchanged:
        (answer,) = self.exchange_ranks(order)
        return answer

    def exchange_ranks(self, order: Order | None = None) -> list[Exchanged]:
        answers = self.llm.collective_rpc("exchange", args=(write_order(order or Order()),))
        return [read_exchanged(answer, POSITIONS) for answer in answers]

    def status(self) -> dict[str, Any]:
        (status,) = self.status_ranks()
        return status

    def status_ranks(self) -> list[dict[str, Any]]:
        return [dict(status) for status in self.llm.collective_rpc("status")]

    def peek(self) -> dict[str, Any]:
        (tensors,) = self.peek_ranks()
        return tensors

    def peek_ranks(self) -> list[dict[str, Any]]:
        return [dict(tensors) for tensors in self.llm.collective_rpc("peek")]

    def generate(self, tokens: int, prompts: list[str] = PROMPTS, **sampling: Any) -> list[int]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            **{"temperature": 1.0, "seed": 1, "max_tokens": tokens, "ignore_eos": True, **sampling}
        )
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


def start(drafter: str, ranks: int = 1) -> Engine:
    from vllm import LLM

    return Engine(
        LLM(
            model=str(model_path("target")),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            enforce_eager=True,
            tensor_parallel_size=ranks,
            worker_cls=WORKER,
            speculative_config={
                "model": str(model_path(drafter)),
                "method": "draft_model",
                "num_speculative_tokens": POSITIONS,
                "draft_sample_method": "probabilistic",
            },
        )
    )


def labels_of(answer: Exchanged) -> list[float]:
    """[K]."""
    counted = np.zeros(POSITIONS)
    for round_ in answer.rounds:
        for sums in round_.strata.values():
            counted += sums.statistics.observations
    labels: list[float] = counted.tolist()
    return labels
