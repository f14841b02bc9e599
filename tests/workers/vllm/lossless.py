"""Run by `test_lossless_engine`: samples and greedy texts of the pair; prints JSON.

Usage: lossless.py SAMPLES
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from typing import Any

from tests.workers.vllm.engine import Engine
from workers.reference.heldout import read_heldout
from workers.reference.workloads import WORKLOADS

POSITIONS = 3
TOKENS = 4
"""Emitted by each request: one from the prompt, and then one draft's."""
ENGINE = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "block_size": 32}
SETTINGS = {"record": 4096}
GREEDY_TOKENS = 32
ARMS: dict[str, dict[str, Any]] = {
    # This one chooses how many positions to draft, too.
    "temperature 1": {"temperature": 1.0},
    "temperature .7, top-p .95": {"temperature": 0.7, "top_p": 0.95},
    # All but one token of the prompt is in the prefix cache, and vLLM pads such a request's first
    # step with placeholders, by which every draft of that step is judged in another way.
    "placeholders": {"temperature": 1.0},
}
DEPTH = "temperature 1"
PROMPTS = dict.fromkeys(ARMS, 20) | {"placeholders": 33}
"""Tokens; the engine's blocks have 32."""
NAIVE = "temperature 1"
"""The arm that is repeated with trimming by the drawn token."""


def main() -> None:
    samples = int(sys.argv[1])
    os.environ["VLLM_MAX_N_SEQUENCES"] = str(samples)
    engine = Engine(POSITIONS, SETTINGS, **ENGINE)
    # Half of the budgets are random, so that lengths vary whatever the costs are; the others are
    # chosen as always.
    engine.rpc("explore_budgets", 0.5)
    answer: dict[str, Any] = {"greedy": greedy(engine), "arms": {}}
    for name in ARMS:
        engine.rpc("choose_depth", name == DEPTH)
        answer["arms"][name] = sample(engine, samples, name)
    engine.rpc("choose_depth", False)
    engine.rpc("trim_by_draw", True)
    answer["naive"] = sample(engine, samples, NAIVE)
    answer["status"] = engine.rpc("status")
    print(json.dumps(answer))


def prompt(engine: Engine, arm: str) -> list[int]:
    """Where the drafter is often wrong, and the target itself not sure."""
    return engine.encode(read_heldout("prose").documents[0])[: PROMPTS[arm]]


def greedy_prompts(engine: Engine) -> dict[str, list[int]]:
    """Four from each workload."""
    return {
        f"{name}-{i}": engine.encode(read_heldout(name).documents[i])[:40]
        for name in WORKLOADS
        for i in range(4)
    }


def greedy(engine: Engine) -> dict[str, dict[str, list[int]]]:
    """By request, its prompt and its text."""
    prompts = greedy_prompts(engine)
    for name, tokens in prompts.items():
        engine.add(name, tokens, temperature=0.0, max_tokens=GREEDY_TOKENS)
    outcomes = engine.run()
    return {n: {"prompt": prompts[n], "tokens": o.tokens} for n, o in outcomes.items()}


def sample(engine: Engine, samples: int, arm: str) -> dict[str, Any]:
    """Texts [samples][TOKENS] of one prompt, and how much of the drafts was verified."""
    from vllm import SamplingParams

    before = engine.rpc("status")
    start = time.monotonic()
    (output,) = engine.llm.generate(
        {"prompt_token_ids": prompt(engine, arm)},
        SamplingParams(
            n=samples, max_tokens=TOKENS, ignore_eos=True, detokenize=False, **ARMS[arm]
        ),
        use_tqdm=False,
    )
    after = engine.rpc("status")
    counts = ("admitted_lengths", "depths", "unmatched")
    return {
        "prompt": prompt(engine, arm),
        "texts": [list(one.token_ids) for one in output.outputs],
        **{name: Counter(after[name]) - Counter(before[name]) for name in counts},
        "seconds": time.monotonic() - start,
    }


if __name__ == "__main__":
    main()
