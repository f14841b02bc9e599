"""Whose labels count, and how much."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator_service.config import TrustConfig
from estimator_service.logistic import Array, predict
from estimator_service.statistics import Statistics
from estimator_service.trust import Trust, influence

CONFIG = TrustConfig()


@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=40),
    st.floats(0.01, 1.0),
)
def test_no_replica_has_more_than_its_share_and_none_is_cut_needlessly(
    brought: list[int], share: float
) -> None:
    labels = np.array(brought, dtype=float)
    weights = influence(labels, share)
    weighted = weights * labels
    total, live = weighted.sum(), int((labels > 0).sum())
    cap = max(share, 2.0 / max(live, 1))
    assert ((weights >= 0.0) & (weights <= 1.0)).all()
    assert (weighted <= cap * total * (1 + 1e-9) + 1e-300).all()
    # Who is cut is cut to the cap, not below; who is not, keeps everything.
    cut = weights < 1.0
    if cut.any():
        np.testing.assert_allclose(weighted[cut], cap * total, rtol=1e-6)


def test_influence_of_an_even_fleet_is_untouched() -> None:
    assert influence(np.full(100, 7.0), 0.02).tolist() == [1.0] * 100
    assert influence(np.array([1.0, 1e6]), 0.5).tolist() == [1.0, 1.0]
    assert influence(np.zeros(3), 0.5).tolist() == [1.0] * 3
    assert influence(np.array([]), 0.5).tolist() == []


def labels(
    rng: np.random.Generator, count: int = 2000, slope: float = 0.5, shift: float = 0.0
) -> Array:
    """[6] of labels graded at slope .5, intercept 0, made by other coefficients."""
    f = rng.normal(0.0, 2.0, count)
    y = (rng.random(count) < predict(slope, shift, f)).astype(float)
    sums: Array = Statistics.of(1, np.zeros(count), f, y, predict(0.5, 0.0, f)).sums[0]
    return sums


def judged(made: dict[str, Array]) -> list[str]:
    trust = Trust(CONFIG)
    for name, sums in made.items():
        trust.observe(name, sums)
    return trust.judge()[0]


def test_a_replica_at_odds_with_the_fleet_is_outside_and_the_fleet_is_not() -> None:
    rng = np.random.default_rng(1)
    sound = {f"r{i}": labels(rng) for i in range(6)}
    assert judged(sound) == []
    assert judged({**sound, "bad": labels(rng, shift=1.5)}) == ["bad"]


def test_inverted_labels_are_found_where_half_are_accepted_and_no_residual_shows_it() -> None:
    rng = np.random.default_rng(2)
    inverted = labels(rng, slope=-0.5)
    assert abs(inverted[4] / inverted[5]) < 0.03
    assert judged({**{f"r{i}": labels(rng) for i in range(3)}, "bad": inverted}) == ["bad"]


def test_of_two_that_disagree_the_one_at_odds_with_the_coefficients_is_outside() -> None:
    rng = np.random.default_rng(3)
    assert judged({"good": labels(rng), "bad": labels(rng, shift=1.5)}) == ["bad"]


def test_what_moves_everybody_accuses_nobody_and_one_alone_is_not_judged() -> None:
    rng = np.random.default_rng(4)
    assert judged({f"r{i}": labels(rng, shift=1.5) for i in range(5)}) == []
    assert judged({"only": labels(rng, shift=1.5)}) == []


def test_few_labels_are_not_judged_and_small_effects_are_no_offence_however_sure() -> None:
    rng = np.random.default_rng(5)
    sound = {f"r{i}": labels(rng, 100_000) for i in range(4)}
    assert judged({**sound, "new": labels(rng, 100, shift=3.0)}) == []
    assert judged({**sound, "other": labels(rng, 100_000, shift=0.3)}) == []


@pytest.mark.parametrize("burst", [200, 100_000])
def test_who_agrees_again_comes_back_however_much_it_had_said(burst: int) -> None:
    rng = np.random.default_rng(6)
    trust = Trust(CONFIG)
    for i in range(4):
        trust.observe(f"r{i}", labels(rng))
    trust.observe("bad", labels(rng, burst, shift=3.0))
    assert trust.judge() == (["bad"], [])
    back: list[str] = []
    healed = 0
    while not back and healed < 100:
        trust.observe("bad", labels(rng, 100))
        healed += 1
        back = trust.judge()[1]
    print(f"\nback after {100 * healed} sound labels")
    assert back == ["bad"]


def test_a_hold_outlasts_agreement_and_silence_until_it_is_cleared() -> None:
    rng = np.random.default_rng(7)
    trust = Trust(CONFIG)
    for i in range(3):
        trust.observe(f"r{i}", labels(rng))
    trust.hold("r1")
    trust.judge()
    trust.forget("r1")
    assert not trust.standing("r1").trusted
    trust.clear("r1")
    assert trust.standing("r1").trusted


def test_silence_clears_nobody() -> None:
    rng = np.random.default_rng(8)
    trust = Trust(CONFIG)
    for i in range(3):
        trust.observe(f"r{i}", labels(rng))
    trust.observe("bad", labels(rng, shift=3.0))
    trust.judge()
    for name in ("r0", "bad"):
        trust.forget(name)
    assert "r0" not in trust.standings
    assert not trust.standing("bad").trusted
