from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator_service.logistic import Array
from workers.budget import NEIGHBOURS, Forecast, admit, best_budget, best_depth, survival

NAN = float("nan")

# Few distinct values, so that ties are the rule; powers of two, so that sums are exact.
probabilities = st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0])
seconds = st.sampled_from([0.5, 1.0, 1.0, 2.0])


@st.composite
def batches(draw: st.DrawFn) -> tuple[Array, Array]:
    """Survivals [R, K], and the seconds of each budget."""
    requests, positions = draw(st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (2, 3)]))
    row = st.lists(probabilities, min_size=positions, max_size=positions)
    rows = draw(st.lists(row, min_size=requests, max_size=requests))
    slots = requests * positions
    cost = draw(st.lists(seconds, min_size=slots + 1, max_size=slots + 1))
    return survival(rows), np.array(cost)


def allocations(requests: int, positions: int) -> list[tuple[int, ...]]:
    """All lengths that prefixes can have."""
    return list(itertools.product(range(positions + 1), repeat=requests))


def rate(survivals: Array, cost: Array, lengths: tuple[int, ...]) -> float:
    gained = sum(float(row[:n].sum()) for row, n in zip(survivals, lengths, strict=True))
    return float((len(survivals) + gained) / cost[sum(lengths)])


@given(batches())
def test_the_budget_is_the_best_of_all_prefix_allocations(batch: tuple[Array, Array]) -> None:
    survivals, cost = batch
    budget = best_budget(survivals, cost)
    best: dict[int, float] = {}
    for lengths in allocations(*survivals.shape):
        total = sum(lengths)
        best[total] = max(best.get(total, 0.0), rate(survivals, cost, lengths))
    assert budget == min(b for b, r in best.items() if r == max(best.values()))


@given(batches())
def test_the_admitted_slots_are_the_best_with_ties_by_request_then_position(
    batch: tuple[Array, Array],
) -> None:
    survivals, _ = batch
    requests, positions = survivals.shape
    for budget in range(requests * positions + 1):
        slots = sorted((-survivals[r, k], r, k) for r in range(requests) for k in range(positions))[
            :budget
        ]
        expected = [sum(1 for s, r, _ in slots if r == i and s < 0.0) for i in range(requests)]
        assert admit(survivals, budget).tolist() == expected
        for i, length in enumerate(expected):
            assert [k for s, r, k in slots if r == i and s < 0.0] == list(range(length))


def test_a_slot_that_has_no_prediction_is_never_admitted_and_the_others_are() -> None:
    survivals = survival([[NAN, 0.9], [0.9, NAN], [0.5, 0.5], [2.0, 0.9], [-0.1, math.inf]])
    assert survivals.tolist() == [[0, 0], [0.9, 0], [0.5, 0.25], [0, 0], [0, 0]]
    assert admit(survivals, 10).tolist() == [0, 1, 2, 0, 0]
    assert admit(survivals, 0).tolist() == [0] * 5


def test_a_budget_of_none_is_a_normal_answer() -> None:
    assert best_budget([[0.1, 0.01]], [1.0, 1.5, 2.0]) == 0
    assert best_budget([[0.0, 0.0]], [1.0, 1.0, 1.0]) == 0


@pytest.mark.parametrize("broken", [NAN, math.inf, 0.0, -1.0])
def test_a_broken_cost_is_refused(broken: float) -> None:
    with pytest.raises(ValueError, match="seconds must be finite and positive"):
        best_budget([[0.5]], [1.0, broken])


def test_over_several_cases_the_expected_gain_decides() -> None:
    # Whole drafts pay in the good case, none in the bad one, and one token on the average.
    good, bad = [[0.9, 0.9]], [[0.9, 0.0]]
    cost = [1.0, 1.5, 2.2]
    assert (best_budget(good, cost), best_budget(bad, cost)) == (2, 1)
    assert best_budget([good, bad], cost) == 1


def test_a_forecast_takes_the_first_probability_from_now_and_the_rest_from_drafts_like_it() -> None:
    forecast = Forecast(3)
    np.testing.assert_allclose(forecast.survivals([0.5])[:, 0], [[0.5, 0.25, 0.125]])
    low, high = survival([[0.2, 0.1, 0.1]]), survival([[0.9, 0.9, 0.8]])
    for _ in range(NEIGHBOURS):
        forecast.remember(low, 3)
        forecast.remember(high, 3)
    cases = forecast.survivals([0.25, 0.8, NAN])
    assert cases.shape == (NEIGHBOURS, 3, 3)
    expected = np.array([[0.25, 0.025, 0.0025], [0.8, 0.72, 0.576], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(cases[0], expected)
    np.testing.assert_array_equal(cases, np.tile(cases[:1], (NEIGHBOURS, 1, 1)))


def test_a_forecast_learns_nothing_from_drafts_without_a_first_probability() -> None:
    forecast = Forecast(2)
    forecast.remember(survival([[NAN, 0.5], [0.0, 0.5]]), 2)
    forecast.remember(survival([[0.9, 0.5]]), 0)
    np.testing.assert_allclose(forecast.survivals([0.5]), [[[0.5, 0.25]]])


def test_a_shallow_draft_is_remembered_as_if_it_went_on_like_others() -> None:
    forecast = Forecast(3)
    forecast.remember(survival([[0.8, 0.5, 0.5]]), 3)
    forecast.remember(np.array([[0.4, 0.2, 0.0]]), 2)
    cases = forecast.typical(1)
    assert cases is not None
    np.testing.assert_allclose(cases[:, 0], [[0.4, 0.2, 0.1], [0.8, 0.4, 0.2]])


@given(batches(), st.lists(seconds, min_size=4, max_size=4))
def test_the_depth_is_that_of_the_best_budget_over_all_depths(
    batch: tuple[Array, Array], more: list[float]
) -> None:
    survivals, verify = batch
    positions = survivals.shape[1]
    draft = np.cumsum([0.25, *more])[: positions + 1]
    best = []
    for depth in range(positions + 1):
        seen = np.where(np.arange(positions) < depth, survivals, 0.0)
        lengths = itertools.product(range(depth + 1), repeat=len(survivals))
        best.append(max(rate(seen, verify + draft[depth], x) for x in lengths))
    assert best_depth(survivals[None], verify, draft) == best.index(max(best))
