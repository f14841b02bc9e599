"""What the engine writes is the target's, however much of each draft is verified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency

from tests.workers.vllm.lossless import ARMS, DEPTH, GREEDY_TOKENS, NAIVE, POSITIONS, TOKENS
from workers.reference.models import load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[3]
SAMPLES = int(os.environ.get("SPECFLEET_SAMPLES", "20000"))
REFERENCE = 3 * SAMPLES
"""Samples of the target alone: cheap, and the more of them the sharper the test."""
ALPHA = 0.01
"""Chance of a false alarm over all comparisons together (Bonferroni)."""
RARE = 25
"""Tokens with fewer samples than this in both together are counted as one."""


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.workers.vllm.lossless", str(SAMPLES)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert not said["status"]["failures"]
    return said


@cache
@torch.inference_mode()
def target_samples(
    prompt: tuple[int, ...], temperature: float = 1.0, top_p: float = 1.0
) -> list[Any]:
    """Texts [REFERENCE][TOKENS] of the target alone, without an engine."""
    generator = torch.Generator().manual_seed(7)
    target = load_model("target")
    texts = []
    for start in range(0, REFERENCE, 2000):
        rows = min(2000, REFERENCE - start)
        # The prompt is read once for all rows.
        out = target(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        out.past_key_values.batch_repeat_interleave(rows)
        logits = out.logits[:, -1].expand(rows, -1)
        drawn = torch.empty(rows, 0, dtype=torch.long)
        while True:
            p = nucleus((logits / temperature).softmax(-1), top_p)
            drawn = torch.cat([drawn, torch.multinomial(p, 1, generator=generator)], 1)
            if drawn.size(1) == TOKENS:
                break
            out = target(input_ids=drawn[:, -1:], past_key_values=out.past_key_values)
            logits = out.logits[:, -1]
        texts += drawn.tolist()
    return texts


def nucleus(p: torch.Tensor, top_p: float) -> torch.Tensor:
    """Without the least likely tokens that have 1 - top_p together (Holtzman et al., 2020)."""
    least, order = p.sort(dim=-1)
    kept = least.cumsum(-1) > 1.0 - top_p
    return torch.zeros_like(p).scatter(-1, order, least * kept)


def p_values(texts: list[Any], reference: list[Any]) -> list[float]:
    """Of the first, second, ... emitted token: that both come from one distribution."""
    values = []
    for i in range(TOKENS):
        mine, theirs = (Counter(text[i] for text in sample) for sample in (texts, reference))
        common = [t for t in mine | theirs if mine[t] + theirs[t] >= RARE]
        table = np.array([[sample[t] for t in common] for sample in (mine, theirs)])
        rest = np.array([[len(texts)], [len(reference)]]) - table.sum(axis=1, keepdims=True)
        table = np.concatenate([table, rest], axis=1)
        values.append(float(chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue))
    return values


def test_greedy_texts_are_the_targets_token_for_token(answer: dict[str, Any]) -> None:
    target = load_model("target")
    for name, text in answer["greedy"].items():
        tokens = torch.tensor([text["prompt"]])
        out = target.generate(tokens, do_sample=False, max_new_tokens=GREEDY_TOKENS)
        assert text["tokens"] == out[0, tokens.size(1) :].tolist(), name


@pytest.mark.parametrize("arm", ARMS)
def test_sampled_texts_are_distributed_as_the_targets(answer: dict[str, Any], arm: str) -> None:
    ours = answer["arms"][arm]
    values = p_values(ours["texts"], target_samples(tuple(ours["prompt"]), **ARMS[arm]))
    lengths = {int(n): count for n, count in sorted(ours["admitted_lengths"].items())}
    print(f"\n{arm}: {SAMPLES} samples in {ours['seconds']:.0f} s; p {np.round(values, 4)}")
    print(f"drafts by how much of them was verified: {lengths}")
    print(f"steps by how much was drafted: {ours['depths']}; without a label: {ours['unmatched']}")
    assert min(values) > ALPHA / (len(ARMS) * TOKENS)
    assert all(lengths.get(n, 0) > SAMPLES / 50 for n in range(POSITIONS + 1))
    assert (len(ours["depths"]) > 1) == (arm == DEPTH)
    assert (ours["unmatched"].get("judged by another rule", 0) > 0) == (arm == "placeholders")


def test_the_same_test_detects_trimming_by_the_drawn_token(answer: dict[str, Any]) -> None:
    naive = answer["naive"]
    values = p_values(naive["texts"], target_samples(tuple(naive["prompt"]), **ARMS[NAIVE]))
    print(f"\ntrimmed by the drawn token: p {values}")
    assert min(values[1:]) < ALPHA / (len(ARMS) * TOKENS)
