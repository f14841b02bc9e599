from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator_service.logistic import predict
from estimator_service.messages import CoefficientSet, Source, Version
from estimator_service.sketch import Sketch
from estimator_service.statistics import Statistics
from workers import rounds as module
from workers.rounds import Label, Rounds

K = 4
FIRST = CoefficientSet(Version(1, 1), Source.FITTED, 0.5, (0.0, -0.5, -1.0, -1.5))
SECOND = CoefficientSet(
    Version(1, 2), Source.FITTED, 0.8, (0.2, -0.2, -0.6, -1.0), {"greedy:default": (1.0,) * K}
)
VERSIONS = (FIRST, SECOND)
STRATA = ("greedy:default", "sampled:default")

labels = st.builds(
    Label, st.integers(0, K - 1), st.floats(-40.0, 40.0, width=32), st.integers(0, 1)
)
observed = st.tuples(st.sampled_from(VERSIONS), st.sampled_from(STRATA), labels)


@given(st.lists(observed, max_size=40), st.integers(1, 10))
def test_sums_are_those_of_the_labels_by_version_and_stratum(
    stream: list[tuple[CoefficientSet, str, Label]], fold_at: int
) -> None:
    rounds = Rounds()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FOLD_AT", fold_at)
        for coefficients, stratum, label in stream:
            rounds.observe(coefficients, stratum, [label])
    drained = {r.graded: r for r in rounds.drain()}
    assert drained.keys() == {c.version for c, _, _ in stream}
    for coefficients in VERSIONS:
        for stratum in STRATA:
            mine = [x for c, s, x in stream if c == coefficients and s == stratum]
            if not mine:
                continue
            sums = drained[coefficients.version].strata[stratum]
            k, f, y = (list(column) for column in zip(*mine, strict=True))
            at = np.array(coefficients.intercepts_of(stratum))
            p = predict(coefficients.slope, at[k], f)
            assert sums.intercepts == coefficients.intercepts_of(stratum)
            np.testing.assert_allclose(
                sums.statistics.sums, Statistics.of(K, k, f, y, p).sums, rtol=1e-12, atol=1e-12
            )
            np.testing.assert_array_equal(sums.sketch.cells, Sketch.of(K, k, f, y).cells)


def test_a_drain_starts_anew_and_counts_by_the_version_that_dispatched() -> None:
    rounds = Rounds()
    rounds.step(FIRST, [4, 0, 2], explored=False)
    rounds.step(FIRST, [4, 4], explored=True)
    rounds.step(SECOND, [], explored=False)
    rounds.skip(SECOND, "penalties")
    first, second = rounds.drain()
    assert (first.graded, first.slope, first.steps, first.explored_steps) == (
        FIRST.version,
        0.5,
        2,
        1,
    )
    assert first.admitted == (4, 4, 3, 3)
    assert (second.steps, second.admitted, second.skipped) == (1, (), {"penalties": 1})
    assert rounds.drain() == []


def test_a_label_without_a_finite_feature_is_in_no_sum() -> None:
    rounds = Rounds()
    rounds.observe(FIRST, "s", [Label(0, float("nan"), 1), Label(0, 1.0, 1)])
    (drained,) = rounds.drain()
    assert drained.strata["s"].statistics.observations.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert drained.strata["s"].sketch.observations.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_what_nobody_drains_is_forgotten_and_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "FOLD_AT", 1)
    monkeypatch.setattr(module, "MAX_LABELS", 5)
    rounds = Rounds()
    for _ in range(8):
        rounds.observe(FIRST, "s", [Label(0, 1.0, 1)])
    assert rounds.forgotten == 6
    (drained,) = rounds.drain()
    assert drained.strata["s"].statistics.observations[0] == 2.0
