"""Run by `test_vllm_pair`: an engine with target and drafter; prints as JSON what it wrote.

In a process of its own, because an engine leaves threads, handlers and environment behind.
"""

import json
import sys
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.loads(sys.argv[1])
    engine: Any = LLM(
        model=request["target"],
        # The weights are stored in bfloat16, in which most CPUs compute a hundred times slower.
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={
            "model": request["draft"],
            "method": "draft_model",
            "num_speculative_tokens": 5,
        },
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=request["new_tokens"])
    outputs = engine.generate(request["prompts"], sampling, use_tqdm=False)
    counted = {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}
    answer = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafted": counted["vllm:spec_decode_num_draft_tokens"],
        "accepted": counted["vllm:spec_decode_num_accepted_tokens"],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
