"""Labels from a real engine, compared with what a replay of its texts gives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estimator_service.logistic import predict
from estimator_service.sketch import Sketch
from estimator_service.statistics import Statistics
from tests.workers.vllm.label_cases import FORCED, POSITIONS, REGEX
from workers.rounds import Round
from workers.vllm.rpc import read_exchanged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[3]
Label = tuple[str, int, int]
"""Request, position, accepted."""


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.workers.vllm.label_cases"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return said


def replayed(name: str, request: dict[str, Any]) -> Counter[Label]:
    """What the text and the verified drafts say: a draft token is accepted where it is the text.

    A string that stops a text is found outside the engine, which by then has emitted more; only
    there its own tokens are taken for the text.
    """
    labels: Counter[Label] = Counter()
    at = 0
    for draft, emitted, judged in request["steps"]:
        text = emitted if name == "stop-string" else request["tokens"][at : at + len(emitted)]
        at += len(emitted)
        for k, (token, drafted) in enumerate(zip(text, draft if judged else [], strict=False)):
            labels[name, k, int(token == drafted)] += 1
            if token != drafted:
                break
    return labels


def observed(record: dict[str, list[Any]]) -> Counter[Label]:
    """The labels in a record."""
    drafts = defaultdict(list)
    columns = ("request", "step", "position", "admitted", "accepted")
    for request, step, position, admitted, accepted in zip(
        *(record[name] for name in columns), strict=True
    ):
        drafts[request, step].append((position, admitted, accepted))
    labels: Counter[Label] = Counter()
    for (request, _), positions in drafts.items():
        for position, admitted, accepted in sorted(positions):
            if not admitted:
                break
            labels[request, position, accepted] += 1
            if not accepted:
                break
    return labels


def test_every_label_is_what_the_text_says(answer: dict[str, Any]) -> None:
    cases = answer["cases"]
    print(json.dumps(cases["status"]))
    assert not cases["status"]["failures"]
    mine = observed(cases["record"])
    for name, request in cases["requests"].items():
        theirs = replayed(name, request)
        got = Counter({label: n for label, n in mine.items() if label[0] == name})
        assert got == theirs, name
    named = {name for name, _, _ in mine}
    silent = ("limit-1", "none", "cached")
    assert named >= {name for name in cases["requests"] if not name.startswith(silent)}


def test_every_case_happened(answer: dict[str, Any]) -> None:
    cases = answer["cases"]
    requests = cases["requests"]
    lengths = {name: {len(d) for d, _, _ in request["steps"]} for name, request in requests.items()}
    assert all(lengths[f"none-{how}"] == {0} for how in ("greedy", "sampled"))
    assert all(max(lengths[f"two-{how}"]) == 2 for how in ("greedy", "sampled"))
    assert all(max(lengths[f"whole-{how}"]) == POSITIONS for how in ("greedy", "sampled"))
    # A text ended within what a step had accepted.
    for kind in ("stop-token", "stop-string", "limit"):
        mine = [r for name, r in requests.items() if name.startswith(kind)]
        assert any(sum(len(e) for _, e, _ in r["steps"]) > len(r["tokens"]) for r in mine), kind
    # Placeholders, prompts read in pieces, preemptions.
    assert any(d[:1] == [-1] for r in requests.values() for d, _, _ in r["steps"])
    assert sum(not emitted for _, emitted, _ in requests["long"]["steps"]) > 3
    assert cases["status"]["unmatched"]["no such draft"] > 0
    assert len(requests["hung-up"]["tokens"]) < 200


def sums_of(record: dict[str, list[Any]], exchanged: dict[str, Any]) -> None:
    """Assert that the round holds the record's labels and nothing else."""
    (round_,) = read_exchanged(exchanged, POSITIONS).rounds
    drafts = defaultdict(list)
    columns = ("request", "step", "position", "feature", "admitted", "accepted", "stratum")
    for request, step, *rest in zip(*(record[name] for name in columns), strict=True):
        drafts[request, step].append(rest)
    labels = defaultdict(list)
    for rows in drafts.values():
        for k, feature, admitted, accepted, stratum in sorted(rows):
            if not admitted:
                break
            labels[stratum].append((k, feature, accepted))
            if not accepted:
                break
    assert round_.strata.keys() == labels.keys()
    for stratum, seen in labels.items():
        k, f, y = (np.array(column) for column in zip(*seen, strict=True))
        sums = round_.strata[stratum]
        p = predict(round_.slope, np.array(sums.intercepts)[k], f)
        expected = Statistics.of(POSITIONS, k, f, y, p)
        np.testing.assert_allclose(sums.statistics.sums, expected.sums, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(sums.sketch.cells, Sketch.of(POSITIONS, k, f, y).cells)


def test_the_round_is_the_sum_of_the_labels(answer: dict[str, Any]) -> None:
    sums_of(answer["cases"]["record"], answer["cases"]["exchange"])
    strata = {s for r in answer["cases"]["exchange"]["rounds"] for s in r["strata"]}
    assert strata == {"greedy:default", "sampled:default", "greedy:code"}


def test_who_is_excluded_is_served_right_and_adds_nothing(answer: dict[str, Any]) -> None:
    alone, mixed = answer["alone"], answer["mixed"]
    for name, tokens in alone["requests"].items():
        assert mixed["requests"][name] == tokens
    for name in FORCED:
        assert re.fullmatch(REGEX, mixed["texts"][f"{name}-structured"])
    assert len({mixed["texts"][f"{name}-structured"] for name in FORCED}) == 1
    assert len(mixed["requests"]["min_tokens"]) >= 12
    assert max(mixed["requests"]["allowed_token_ids"]) < 400
    assert not re.search(r"\b(the|a)\b", mixed["texts"]["bad_words"])
    (ours,), (theirs,) = (read_exchanged(x["exchange"], POSITIONS).rounds for x in (mixed, alone))
    assert ours.skipped == {
        "penalties": 1,
        "bad_words": 1,
        "allowed_token_ids": 1,
        "min_tokens": 1,
        # The third verifies nothing, so there is nothing that could be observed.
        "structured output": 2,
    }
    assert ours.strata.keys() == theirs.strata.keys() == {"greedy:default"}
    mine, clean = ours.strata["greedy:default"], theirs.strata["greedy:default"]
    np.testing.assert_array_equal(mine.statistics.observations, clean.statistics.observations)
    # In another batch the same logits differ in their last digits.
    np.testing.assert_allclose(mine.statistics.sums, clean.statistics.sums, rtol=1e-3, atol=1e-3)
    assert observed(mixed["record"]) == observed(alone["record"])


def test_when_everything_of_ours_fails_requests_are_served_all_the_same(
    answer: dict[str, Any],
) -> None:
    meanwhile, after = answer["broken"]["meanwhile"], answer["broken"]["after"]
    assert meanwhile["requests"] == after["requests"] == answer["alone"]["requests"]
    assert meanwhile["exchange"]["rounds"] == []
    assert all(meanwhile["status"]["failures"][what] > 0 for what in ("schedule", "drafted"))
    assert after["status"]["failures"] == meanwhile["status"]["failures"]
    # What runs before anything fails is not known to the worker; these requests are new.
    assert observed(after["record"]) == observed(answer["alone"]["record"])


def round_of(said: dict[str, Any]) -> Round:
    """The newest; a step that was under way when an order came belongs to the one before."""
    return read_exchanged(said["exchange"], POSITIONS).rounds[-1]


def test_an_order_is_carried_out_whole_or_not_at_all(answer: dict[str, Any]) -> None:
    two, refused, none, exploring = answer["ordered"]
    for said in answer["ordered"]:
        assert said["tokens"] == answer["alone"]["requests"]
        assert said["exchange"]["applied"] == [1, 1]
    assert (two["lengths"], none["lengths"]) == ([0, 2], [0])
    assert "slope must be in 0..20, got nan" in refused["error"]
    assert refused["lengths"] == two["lengths"]
    assert refused["status"]["coefficients_hash"] == two["status"]["coefficients_hash"]
    assert two["status"]["coefficients_hash"] != answer["alone"]["status"]["coefficients_hash"]
    round_ = round_of(two)
    assert round_.strata["greedy:default"].intercepts == (0.2,) * POSITIONS
    assert round_.admitted[1] > 0 == round_.admitted[2]
    assert max(exploring["lengths"]) == POSITIONS
    round_ = round_of(exploring)
    assert round_.explored_steps == round_.steps > 0
