"""vLLM loads every shipped drafter on a CPU, and drafts with it what we draft without vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.reference import decoding, eagle_drafting
from workers.reference.dflash_drafting import propose
from workers.reference.heldout import read_heldout
from workers.reference.models import load_model, load_tokenizer
from workers.reference.paths import model_path
from workers.reference.workloads import WORKLOADS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

METHODS = {"draft": "draft_model", "eagle": "eagle3", "dflash": "dflash"}
POSITIONS = 7
PROMPT_TOKENS = 60
NEW_TOKENS = 24
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def target() -> Any:
    return load_model("target").requires_grad_(False)


@pytest.mark.parametrize("name", METHODS)
def test_vllm_drafts_what_we_draft_and_writes_the_targets_text(name: str, target: Any) -> None:
    tokenizer = load_tokenizer()
    prompts = [
        tokenizer.encode(read_heldout(workload).documents[0]).ids[:PROMPT_TOKENS]
        for workload in WORKLOADS
    ]
    answer = run_engine(name, prompts)

    greedy = answer["greedy"]
    assert greedy["tokens"] == [continuation(target, prompt) for prompt in prompts]
    drafts, _ = propose_with(name, target, [record["context"] for record in greedy["recorded"]])
    assert [record["draft"] for record in greedy["recorded"]] == drafts.tolist()
    # Some of what was drafted was accepted: less than a step for each token.
    assert len(prompts) < len(greedy["recorded"]) < 0.7 * len(prompts) * NEW_TOKENS

    sampled = answer["sampled"]["recorded"]
    assert len(sampled) > len(prompts)
    _, logits = propose_with(name, target, [record["context"] for record in sampled])
    largest = torch.tensor([record["largest"] for record in sampled])[:, 0]
    assert largest.tolist() == pytest.approx(logits[:, 0].softmax(-1).amax(-1).tolist(), abs=1e-4)


def propose_with(name: str, target: Any, contexts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The most likely tokens [n, K] behind each context, and their logits [n, K, V]."""
    drafter = load_model(name)
    if name == "draft":
        return decoding.draft_tokens(drafter, contexts, POSITIONS)
    if name == "eagle":
        return eagle_drafting.draft_tokens(drafter, target, contexts, POSITIONS)
    rows = []
    for context in contexts:
        tokens = torch.tensor([context])
        rows.append(propose(drafter, target, tokens, torch.ones_like(tokens))[0])
    logits = torch.cat(rows)
    return logits.argmax(-1), logits


def run_engine(name: str, prompts: list[list[int]]) -> Any:
    request = {
        "target": str(model_path("target")),
        "drafter": str(model_path(name)),
        "method": METHODS[name],
        "positions": POSITIONS,
        "prompts": prompts,
        "new_tokens": NEW_TOKENS,
    }
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, str(here / "vllm_drafts.py"), json.dumps(request)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))


@torch.inference_mode()
def continuation(target: Any, prompt: list[int]) -> list[int]:
    """The target alone, always its most likely token, documents' ends included."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(int(target(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
