"""The drafts of a pair inside vLLM, as `decoding` makes them outside of it."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.reference.decoding import Drafts
from workers.reference.paths import model_path
from workers.reference.tokenizer import CONTEXT
from workers.vllm.requests import SAMPLED, stratum

BATCH = 16
"""Requests that run at the same time."""


def decode_in_engine(
    root: Path,
    prompts: Mapping[str, list[list[int]]],
    *,
    positions: int,
    new_tokens: int,
    seed: int,
) -> dict[str, Drafts]:
    """Continue `prompts`, tokens by workload, at temperature 1 by up to `new_tokens`.

    The target and the draft model in `root` run under vLLM's V1 model runner, in the worker that
    SpecFleet serves with. It verifies whole drafts and records each of them.
    """
    requests = [(name, tokens) for name, texts in prompts.items() for tokens in texts]
    with _quiet_engine():
        from vllm import LLM, SamplingParams, TokensPrompt

        engine: Any = LLM(
            model=str(model_path("target", root)),
            # The weights are stored in bfloat16, in which most CPUs compute much slower.
            dtype="float32",
            max_model_len=CONTEXT,
            max_num_seqs=BATCH,
            enforce_eager=True,
            async_scheduling=False,
            seed=seed,
            speculative_config={
                "model": str(model_path("draft", root)),
                "method": "draft_model",
                "num_speculative_tokens": positions,
                "draft_sample_method": "probabilistic",
            },
            worker_cls="workers.vllm.host_worker.HostWorker",
            additional_config={
                "specfleet": {
                    "policy": "full",
                    "workloads": list(prompts),
                    "record": len(requests) * new_tokens * positions,
                }
            },
        )
        outputs = engine.generate(
            [TokensPrompt(prompt_token_ids=tokens) for _, tokens in requests],
            [
                SamplingParams(
                    temperature=1.0, max_tokens=new_tokens, extra_args={"workload": name}
                )
                for name, _ in requests
            ],
            use_tqdm=False,
        )
        rows = _drain(engine)
        engine.llm_engine.engine_core.shutdown()
    emitted: dict[str, list[list[int]]] = {name: [] for name in prompts}
    for (name, _), output in zip(requests, outputs, strict=True):
        emitted[name].append(list(output.outputs[0].token_ids))
    return {name: _drafts(rows, name, positions, emitted[name]) for name in prompts}


def _drain(engine: Any) -> dict[str, NDArray[Any]]:
    """The whole record, by column."""
    parts: list[dict[str, Any]] = []
    while not parts or parts[-1]["request"]:
        parts.append(engine.collective_rpc("drain_record")[0])
    if any(part.pop("dropped") for part in parts):
        raise RuntimeError("the record was too small for the run")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _drafts(
    rows: dict[str, NDArray[Any]], workload: str, positions: int, emitted: list[list[int]]
) -> Drafts:
    """One workload's; a draft is `positions` rows, one behind the other."""
    of = rows["stratum"] == stratum(SAMPLED, workload)
    table = {name: column[of].reshape(-1, positions) for name, column in rows.items()}
    _, request = np.unique(table["request"][:, 0], return_inverse=True)
    return Drafts(
        request=request,
        step=table["step"][:, 0].astype(np.int64),
        feature=table["feature"].astype(np.float64),
        entropy=table["entropy"].astype(np.float64),
        admitted=table["admitted"].astype(np.int64).sum(1),
        accepted=table["accepted"].astype(np.int64).sum(1),
        emitted=emitted,
    )


@contextmanager
def _quiet_engine() -> Iterator[None]:
    """Around an engine's life: it logs errors only, and to stderr, as do its processes."""
    settings = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    stdout = os.dup(1)
    sys.stdout.flush()
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
