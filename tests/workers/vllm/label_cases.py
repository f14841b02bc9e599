"""Run by `test_labels`: requests that end, stall or change in every way; prints JSON."""

from __future__ import annotations

import json
from typing import Any

from tests.workers.vllm.engine import Engine
from workers.reference.heldout import read_heldout
from workers.reference.workloads import WORKLOADS

POSITIONS = 7
SETTINGS = {"record": 200_000, "policy": "full", "workloads": ["code"]}
ENGINE = {
    "max_num_seqs": 12,
    "max_num_batched_tokens": 256,
    # A prompt is read in pieces, and prefixes are shared, of these sizes.
    "long_prefill_token_threshold": 48,
    "block_size": 32,
}
FORCED = {"whole": 7, "two": 2, "none": 0}
COEFFICIENTS = {
    "version": [1, 1],
    "source": "fitted",
    "slope": 0.7,
    "intercepts": [0.1 * k for k in range(POSITIONS)],
    "strata": {"greedy:default": [0.2] * POSITIONS},
}
ORDERS: list[dict[str, Any]] = [
    {"coefficients": COEFFICIENTS, "policy": {"policy": "fixed", "length": 2}},
    # Wrong in its second part: the first is not carried out either.
    {"policy": {"policy": "full"}, "coefficients": {**COEFFICIENTS, "slope": float("nan")}},
    {"policy": {"policy": "fixed", "length": 0}},
    {"policy": {"policy": "fixed", "length": 0}, "exploration": {"share": 1.0, "seconds": 1e6}},
]
REGEX = r"[ -~\n]{30,60}"
"""Wide, so that drafts pass the grammar and are verified."""


def main() -> None:
    engine = Engine(POSITIONS, SETTINGS, **ENGINE)
    answer = {
        "cases": cases(engine),
        "alone": alone(engine),
        "mixed": mixed(engine),
        "broken": broken(engine),
        "ordered": ordered(engine),
    }
    print(json.dumps(answer))


def prompts(engine: Engine, length: int) -> list[list[int]]:
    """One of `length` tokens from each workload."""
    return [engine.encode(read_heldout(name).documents[1])[:length] for name in WORKLOADS]


def cases(engine: Engine) -> dict[str, Any]:
    """Everything at once, in one batch whose places are given on as soon as they are free."""
    code, math, prose, chat, structured = prompts(engine, 40)
    engine.add("probe", chat, temperature=0.0, max_tokens=24)
    probe = engine.run()["probe"]
    drain(engine)

    engine.add("hung-up", prose, temperature=1.0, max_tokens=200)
    # Ends inside a draft: by a token, by a string, by its limit.
    for i, stop in enumerate(probe.tokens[6:12]):
        engine.add(f"stop-token-{i}", chat, temperature=0.0, max_tokens=24, stop_token_ids=[stop])
    engine.add("stop-string", chat, temperature=0.0, max_tokens=24, stop=[probe.text[20:24]])
    for i in range(1, 9):
        engine.add(f"limit-{i}", structured, temperature=1.0, max_tokens=i)
    # Temperatures side by side.
    for temperature in (0.0, 1e-6, 1.0):
        engine.add(f"temperature-{temperature}", math, temperature=temperature, max_tokens=30)
    # Lengths side by side.
    for name in FORCED:
        engine.add(f"{name}-greedy", prose, temperature=0.0, max_tokens=20)
        engine.add(f"{name}-sampled", code, temperature=1.0, max_tokens=20)
    engine.rpc("force", FORCED)
    # Prefix-cache hits: all but the last token is known, and the engine pads with placeholders.
    for i in range(4):
        engine.add(f"cached-{i}", chat[:33], temperature=float(i % 2), max_tokens=12)
    engine.add("workload", code, temperature=0.0, max_tokens=9, extra_args={"workload": "code"})
    long = [token for document in prompts(engine, 200) for token in document][:300]

    def on_step(step: int) -> None:
        if step == 6:
            engine.add("long", long, temperature=0.0, max_tokens=12)
        if step == 9:
            engine.abort("hung-up")
        if step in (12, 20):
            engine.preempt_all()

    outcomes = engine.run(on_step)
    engine.rpc("force", {})
    return {
        "requests": {name: vars(outcome) for name, outcome in outcomes.items()},
        **drain(engine),
    }


def drain(engine: Engine) -> dict[str, Any]:
    return {
        "record": engine.record(),
        "exchange": engine.rpc("exchange", {}),
        "status": engine.rpc("status"),
    }


def clean(engine: Engine) -> None:
    for i, prompt in enumerate(prompts(engine, 30)):
        engine.add(f"clean-{i}", prompt, temperature=0.0, max_tokens=24)


def alone(engine: Engine) -> dict[str, Any]:
    """The clean requests alone."""
    clean(engine)
    outcomes = engine.run()
    return {"requests": {n: o.tokens for n, o in outcomes.items()}, **drain(engine)}


def mixed(engine: Engine) -> dict[str, Any]:
    """The same among others that nobody may observe."""
    from vllm.sampling_params import StructuredOutputsParams

    clean(engine)
    prompt = prompts(engine, 30)[3]
    altered: dict[str, dict[str, Any]] = {
        "penalties": {"repetition_penalty": 1.3},
        "bad_words": {"bad_words": ["the", "a"]},
        "allowed_token_ids": {"allowed_token_ids": list(range(1, 400))},
        "min_tokens": {"min_tokens": 12},
    }
    for name, parameters in altered.items():
        engine.add(name, prompt, temperature=0.0, max_tokens=16, **parameters)
    for name in FORCED:
        engine.add(
            f"{name}-structured",
            prompt,
            temperature=0.0,
            max_tokens=40,
            structured_outputs=StructuredOutputsParams(regex=REGEX),
        )
    engine.rpc("force", FORCED)
    outcomes = engine.run()
    engine.rpc("force", {})
    return {
        "requests": {n: o.tokens for n, o in outcomes.items()},
        "texts": {n: o.text for n, o in outcomes.items()},
        **drain(engine),
    }


def broken(engine: Engine) -> dict[str, Any]:
    """The clean requests while everything of ours fails, and again when it is whole."""
    answer: dict[str, Any] = {}
    for name, fails in (("meanwhile", True), ("after", False)):
        engine.rpc("fail", fails)
        clean(engine)
        outcomes = engine.run()
        answer[name] = {"requests": {n: o.tokens for n, o in outcomes.items()}, **drain(engine)}
    return answer


def ordered(engine: Engine) -> list[dict[str, Any]]:
    """The clean requests under one order after the other."""
    answer = []
    for order in ORDERS:
        said: dict[str, Any] = {}
        try:
            engine.rpc("exchange", order)
        except ValueError as error:
            said["error"] = str(error)
        clean(engine)
        outcomes = engine.run()
        steps = [step for outcome in outcomes.values() for step in outcome.steps]
        said["lengths"] = sorted({len(draft) for draft, _, _ in steps})
        said["tokens"] = {n: o.tokens for n, o in outcomes.items()}
        said |= {"exchange": engine.rpc("exchange", {}), "status": engine.rpc("status")}
        answer.append(said)
    return answer


if __name__ == "__main__":
    main()
