"""Partial pooling over strata."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from estimator_service.config import FitConfig
from estimator_service.logistic import Array, predict
from estimator_service.parameters import Parameters, Pins
from estimator_service.pooling import Objective, Priors, newton_point, refit
from estimator_service.sketch import BINS, Sketch
from estimator_service.statistics import Quadratic, Statistics
from tests.estimator_service.fleet import Labels, Truth, mean_error

K = 5


def quadratics(rng: np.random.Generator, strata: int) -> Array:
    """[S, K, 6] of random labels, some cells empty."""
    out = []
    for _ in range(strata):
        n = int(rng.integers(0, 60))
        k, f = rng.integers(0, K, n), rng.normal(1, 2, n)
        y = rng.integers(0, 2, n).astype(float)
        statistics = Statistics.of(K, k, f, y, predict(0.5, -0.2, f))
        out.append(Quadratic.of(statistics, 0.5, np.full(K, -0.2)).sums)
    return np.stack(out)


@settings(max_examples=150)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.floats(0.1, 50.0),
    st.floats(0.1, 50.0),
    st.floats(0.0, 10.0),
)
def test_eliminating_the_offsets_equals_one_dense_system(
    seed: int, strata: int, tau: float, sigma: float, rho: float
) -> None:
    rng = np.random.default_rng(seed)
    held = quadratics(rng, strata)
    pins = Pins(
        0.8 if rng.random() < 0.3 else np.nan,
        np.full(K, np.nan),
        np.where(rng.random((strata, K)) < 0.2, rng.normal(0, 1, (strata, K)), np.nan),
    )
    if rng.random() < 0.3:  # a pair's pin is every stratum's
        pins.intercepts[2] = pins.strata[:, 2] = 0.3
    start = Parameters(0.5, rng.normal(0, 1, K), rng.normal(0, 1, (strata, K)))
    start = pins.apply(start)
    priors = Priors(ridge=0.01, smoothness=rho, pooling=tau, offset_smoothness=sigma)
    expected = dense(held, start, priors, pins)
    assume(0.0 < expected[0] < 20.0)  # off the bound, which the dense system does not know
    found = newton_point(held, start, priors, pins)
    np.testing.assert_allclose(found.slope, expected[0], rtol=1e-5, atol=1e-6)
    # Where no label is, nor before it, a coefficient stays as it was: damping by 0 / (0 + d).
    labels = held[:, :, 5] * np.isnan(pins.strata)
    seen = (np.cumsum(labels.sum(axis=0)) > 0) | ~np.isnan(pins.intercepts)
    expected_intercepts = expected[1 : 1 + K]
    np.testing.assert_allclose(
        found.intercepts[seen], expected_intercepts[seen], rtol=1e-5, atol=1e-6
    )
    effective = np.where(np.isnan(pins.strata), expected[1 + K :].reshape(strata, K), pins.strata)
    seen = (np.cumsum(labels, axis=1) > 0) | ~np.isnan(pins.strata)
    np.testing.assert_allclose(found.strata[seen], effective[seen], rtol=1e-5, atol=1e-6)


def dense(held: Array, start: Parameters, priors: Priors, pins: Pins) -> Array:
    """Minimize over (slope, b [K], alpha [S, K]) in one system; a pinned alpha is latent."""
    strata = len(held)
    size = 1 + K + strata * K
    h, g = np.zeros((size, size)), np.zeros(size)
    h[: 1 + K, : 1 + K] += priors.ridge * np.eye(1 + K)
    g[: 1 + K] += priors.ridge * np.array([start.slope, *start.intercepts])
    step = np.diff(np.eye(K), axis=0)
    h[1 : 1 + K, 1 : 1 + K] += priors.smoothness * step.T @ step
    walk = priors.offset_smoothness * step.T @ step
    walk[0, 0] += priors.pooling
    profile = slice(1, 1 + K)
    for s in range(strata):
        mine = slice(1 + K + s * K, 1 + K + (s + 1) * K)
        h[mine, mine] += walk
        h[profile, profile] += walk
        h[mine, profile] -= walk
        h[profile, mine] -= walk
        for k in range(K):
            i = mine.start + k
            a, b, c, h0, h1, _ = held[s, k]
            h[0, 0] += a
            g[0] += h0
            if np.isnan(pins.strata[s, k]):
                h[0, i] += b
                h[i, 0] += b
                h[i, i] += c
                g[i] += h1
            else:
                g[0] -= b * pins.strata[s, k]
    fixed = np.full(size, np.nan)
    fixed[0], fixed[profile] = pins.slope, pins.intercepts
    free = np.isnan(fixed)
    x: Array = np.where(free, 0.0, fixed)
    rest = g[free] - h[np.ix_(free, ~free)] @ x[~free]
    x[free] = np.linalg.solve(h[np.ix_(free, free)], rest)
    return x


def test_an_idle_stratum_keeps_its_offsets_and_moves_with_the_pair() -> None:
    rng = np.random.default_rng(8)
    held = quadratics(rng, 2)
    held[1] = 0.0
    offsets = np.linspace(-1, 1, K)
    start = Parameters(0.5, np.zeros(K), np.stack([np.zeros(K), offsets]))
    priors = FitConfig().priors
    end = newton_point(held, start, priors, Pins.none(2, K))
    assert np.abs(end.intercepts).max() > 0.01
    np.testing.assert_allclose(end.strata[1] - end.intercepts, offsets, atol=1e-12)


def test_pins_are_kept_exactly_and_the_rest_fits_around_them() -> None:
    truth = Truth(0.6, (0.5, 0.2, 0.0, -0.2, -0.3))
    labels = truth.labels(np.random.default_rng(9), 4000)
    pins = Pins.none(1, K)
    pins.strata[0, 1] = pins.intercepts[1] = 3.0
    steep = Pins(1.0, pins.intercepts, pins.strata)
    at = Parameters(0.5, np.full(K, -0.2), np.full((1, K), -0.2))
    for _ in range(10):
        at = step(labels, at, Priors(), steep)
    assert at.slope == 1.0
    assert at.strata[0, 1] == at.intercepts[1] == 3.0
    for k in (0, 2, 3, 4):  # the best intercept given the pinned slope leaves no residual
        mine = labels.part(labels.position == k)
        p = predict(1.0, at.strata[0, k], mine.features)
        assert abs((mine.accepted - p).mean()) < 1e-6


def step(labels: Labels, at: Parameters, priors: Priors, pins: Pins) -> Parameters:
    k = labels.position.astype(int)
    p = predict(at.slope, at.strata[0][k], labels.features)
    statistics = Statistics.of(K, k, labels.features, labels.accepted, p)
    held = Quadratic.of(statistics, at.slope, at.strata[0]).sums[None]
    sketch = Sketch.of(K, k, labels.features, labels.accepted).cells[None]
    return refit(held, sketch, at, priors, pins).coefficients


def test_the_objective_is_the_sketch_s_log_loss_and_the_priors() -> None:
    truth = Truth(0.6, (0.5, 0.2, 0.0, -0.2, -0.3))
    labels = truth.labels(np.random.default_rng(10), 100)
    sketch = Sketch.of(K, labels.position, labels.features, labels.accepted)
    at = Parameters(0.5, np.linspace(0, 1, K), np.linspace(0, 1, K)[None] + 0.5)
    loss = sketch.calibration(0.5, at.strata[0]).log_loss
    plain = Objective(sketch.cells[None], Priors())(at)
    np.testing.assert_allclose(plain, loss, rtol=1e-9)
    at = Parameters(at.slope, at.intercepts, at.strata + 0.1 * (np.arange(K) == 1))
    loss = sketch.calibration(0.5, at.strata[0]).log_loss
    priors = Priors(smoothness=4.0, pooling=2.0, offset_smoothness=10.0)
    full = Objective(sketch.cells[None], priors)(at)
    penalty = 0.5 * 4.0 * 4 * 0.25**2 + 0.5 * 2.0 * 0.5**2 + 0.5 * 10.0 * 2 * 0.1**2
    np.testing.assert_allclose(full, loss + penalty / (K * 100), rtol=1e-9)


WAYS = {
    "partial": FitConfig().priors,
    "full": replace(FitConfig().priors, pooling=np.inf, offset_smoothness=np.inf),
    "none": replace(FitConfig().priors, pooling=1e-6, offset_smoothness=1e-6),
}
DISCOUNT = 0.5 ** (5.0 / FitConfig().half_life)
"""Between refits five seconds apart."""


@pytest.mark.slow
def test_partial_pooling_is_never_the_worst_of_the_three_and_wins_overall() -> None:
    # Two populations of one pair, as fitted on real ones. Their slopes differ too, which no way of
    # pooling intercepts can follow; "apart" fits each as a pair of its own, slope and all, for
    # comparison: what sharing one slope costs where the truth does not share it.
    truths = [Truth(0.648, (-0.551,) * 7), Truth(0.501, (-0.137,) * 7)]
    print("\nmean |p - truth| of both strata, by drafts between refits")
    print(" drafts  share  refits   " + "  ".join(f"{way:>15}" for way in (*WAYS, "apart")))
    table = []
    for drafts in (32, 200, 1600):
        for share in (0.5, 0.95):
            trials = [trial(truths, share, drafts, seed) for seed in range(10)]
            for refits, errors in zip((1, 5, 50), np.mean(trials, axis=0), strict=True):
                row = "  ".join(f"{a:7.4f} {b:7.4f}" for a, b in errors)
                print(f"{drafts:7d}  {share:5.2f}  {refits:6d}   {row}")
                table.append(errors.mean(axis=1))
    overall = np.mean(table, axis=0)
    print(
        "overall "
        + ", ".join(f"{w} {e:.4f}" for w, e in zip((*WAYS, "apart"), overall, strict=True))
    )
    for partial, full, none, _ in table:
        assert partial < max(full, none)
    assert overall[0] < min(overall[1:3])


def trial(truths: list[Truth], share: float, drafts: int, seed: int) -> Array:
    """[refits 1, 5 and 50][partial, full, none, apart][stratum]: mean errors."""
    rng = np.random.default_rng(seed)
    counts = [round(drafts * share), drafts - round(drafts * share)]
    together = [Population(priors, [0, 1]) for priors in WAYS.values()]
    apart = [Population(WAYS["full"], [s]) for s in (0, 1)]
    errors = []
    for refits in range(1, 51):
        rounds = [t.drafts(rng, n) for t, n in zip(truths, counts, strict=True)]
        for population in (*together, *apart):
            population.learn(rounds)
        if refits in (1, 5, 50):
            errors.append(
                [[p.error(t, s) for s, t in enumerate(truths)] for p in together]
                + [[apart[s].error(t, s) for s, t in enumerate(truths)]]
            )
    return np.array(errors)


class Population:
    """Some of the strata, fitted as one pair."""

    def __init__(self, priors: Priors, strata: list[int]) -> None:
        self.priors, self.strata = priors, strata
        size = (len(strata), 7)
        self.at = Parameters(0.5, np.full(7, -0.2), np.full(size, -0.2))
        self.held, self.cells = np.zeros((*size, 6)), np.zeros((len(strata), 3, 7, BINS))

    def learn(self, rounds: list[Labels]) -> None:
        self.held *= DISCOUNT
        self.cells *= DISCOUNT
        for row, s in enumerate(self.strata):
            labels, intercepts = rounds[s], self.at.strata[row]
            k = labels.position.astype(int)
            p = predict(self.at.slope, intercepts[k], labels.features)
            statistics = Statistics.of(7, k, labels.features, labels.accepted, p)
            self.held[row] += Quadratic.of(statistics, self.at.slope, intercepts).sums
            self.cells[row] += Sketch.of(7, k, labels.features, labels.accepted).cells
        pins = Pins.none(len(self.strata), 7)
        self.at = refit(self.held, self.cells, self.at, self.priors, pins).coefficients

    def error(self, truth: Truth, stratum: int) -> float:
        intercepts = self.at.strata[self.strata.index(stratum)]
        return mean_error(self.at.slope, intercepts, truth, np.random.default_rng(0), 2000)
