"""Run by `test_vllm_drafters`: an engine with target and drafter; prints what it drafted and wrote.

In a process of its own, because an engine leaves threads, handlers and environment behind.
"""

import json
import sys
from typing import Any


class Recording:
    """Added to the worker: keeps what is drafted, and the drafter's largest probabilities."""

    model_runner: Any

    def start_recording(self) -> None:
        """Listen where the scheduler takes the drafts that it will have verified."""
        self.recorded: list[dict[str, Any]] = []
        runner = self.model_runner
        take = runner.take_draft_token_ids

        def take_and_keep() -> Any:
            taken = take()
            if taken is not None:
                q = runner._draft_probs
                largest = None if q is None else q.max(-1).values.tolist()
                for row, request in enumerate(taken.req_ids):
                    state = runner.requests[request]
                    self.recorded.append(
                        {
                            "context": [*state.prompt_token_ids, *state.output_token_ids],
                            "draft": list(map(int, taken.draft_token_ids[row])),
                            "largest": largest and largest[row],
                        }
                    )
            return taken

        runner.take_draft_token_ids = take_and_keep

    def take_recorded(self) -> list[dict[str, Any]]:
        """Everything since the last call."""
        recorded, self.recorded = self.recorded, []
        return recorded


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    request = json.loads(sys.argv[1])
    engine: Any = LLM(
        model=request["target"],
        # The weights are stored in bfloat16, in which most CPUs compute much slower.
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        # Else drafts go from step to step inside the worker, and nobody takes them.
        async_scheduling=False,
        worker_extension_cls="vllm_drafts.Recording",
        speculative_config={
            "model": request["drafter"],
            "method": request["method"],
            "num_speculative_tokens": request["positions"],
            "draft_sample_method": "probabilistic",
        },
    )
    engine.collective_rpc("start_recording")
    prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in request["prompts"]]

    def generate(temperature: float) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=temperature, max_tokens=request["new_tokens"], ignore_eos=True
        )
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "recorded": engine.collective_rpc("take_recorded")[0],
        }

    print(json.dumps({"greedy": generate(0.0), "sampled": generate(1.0)}))


if __name__ == "__main__":
    main()
