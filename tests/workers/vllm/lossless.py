"""Run by `test_lossless_engine`: samples and greedy texts of the pair; prints JSON.

Usage: lossless.py SAMPLES
"""

from __future__ import annotations

import json
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
    "temperature 1": {"temperature": 1.0},
    "temperature .7, top-p .95": {"temperature": 0.7, "top_p": 0.95},
}
DEPTH = "temperature 1"
"""The arm that chooses how many positions to draft, too."""


def main() -> None:
    samples = int(sys.argv[1])
    engine = Engine(POSITIONS, SETTINGS, **ENGINE)
    # Half of the budgets are random, so that lengths vary whatever the costs are; the others are
    # chosen as always.
    engine.rpc("explore_budgets", 0.5)
    answer: dict[str, Any] = {"greedy": greedy(engine), "prompt": prompt(engine), "arms": {}}
    for name, parameters in ARMS.items():
        engine.rpc("choose_depth", name == DEPTH)
        answer["arms"][name] = sample(engine, samples, parameters)
    engine.rpc("trim_by_draw", True)
    answer["naive"] = sample(engine, samples, ARMS["temperature 1"])
    answer["status"] = engine.rpc("status")
    print(json.dumps(answer))


def prompt(engine: Engine) -> list[int]:
    """Where the drafter is often wrong, and the target itself not sure."""
    return engine.encode(read_heldout("prose").documents[0])[:20]


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


def sample(engine: Engine, samples: int, parameters: dict[str, Any]) -> dict[str, Any]:
    """Texts [samples][TOKENS] of one prompt, and how much of the drafts was verified."""
    from vllm import SamplingParams

    before = Counter(engine.rpc("status")["admitted_lengths"])
    start = time.monotonic()
    (output,) = engine.llm.generate(
        {"prompt_token_ids": prompt(engine)},
        SamplingParams(
            n=samples, max_tokens=TOKENS, ignore_eos=True, detokenize=False, **parameters
        ),
        use_tqdm=False,
    )
    after = Counter(engine.rpc("status")["admitted_lengths"])
    return {
        "texts": [list(one.token_ids) for one in output.outputs],
        "lengths": after - before,
        "seconds": time.monotonic() - start,
    }


if __name__ == "__main__":
    main()
