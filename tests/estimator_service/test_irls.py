"""The solve, its damping and its guard."""

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from estimator_service.irls import (
    MAX_INTERCEPT,
    MAX_SLOPE,
    FitResult,
    NormalEquations,
    Outcome,
    SingularSystemError,
    borrowed,
    guarded,
    shrink,
)
from estimator_service.logistic import Array, predict, softplus
from estimator_service.parameters import Parameters, Pins
from estimator_service.pooling import Priors, refit
from estimator_service.sketch import Sketch
from estimator_service.statistics import Quadratic, Statistics
from tests.estimator_service.fleet import Labels, Truth

TRUTH = Truth(0.6, (0.5, 0.2, 0.0, -0.2, -0.3, -0.4, -0.5))
K = TRUTH.positions


def repeated_refits(labels: Labels, priors: Priors, positions: int, refits: int) -> Parameters:
    """A fixed trace, graded again at every refit's result: as a fleet under steady traffic."""
    at = Parameters(0.5, np.full(positions, -0.2), np.full((1, positions), -0.2))
    k = labels.position.astype(int)
    sketch = Sketch.of(positions, k, labels.features, labels.accepted).cells[None]
    for _ in range(refits):
        p = predict(at.slope, at.strata[0][k], labels.features)
        statistics = Statistics.of(positions, k, labels.features, labels.accepted, p)
        quadratic = Quadratic.of(statistics, at.slope, at.strata[0])
        at = refit(quadratic.sums[None], sketch, at, priors, Pins.none(1, positions)).coefficients
    return at


def design(labels: Labels, positions: int) -> Array:
    """[M, 1 + K]: the feature, then the position one-hot."""
    return np.column_stack([labels.features, np.eye(positions)[labels.position.astype(int)]])


def test_repeated_refits_converge_to_what_statsmodels_and_scikit_learn_get() -> None:
    labels = TRUTH.drafts(np.random.default_rng(5), 3000)
    ours = repeated_refits(labels, Priors(damping=50.0), K, 40)
    mine = np.array([ours.slope, *ours.strata[0]])
    x = design(labels, K)
    by_statsmodels = sm.Logit(labels.accepted, x).fit(disp=0, tol=1e-12).params
    by_sklearn = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-12, max_iter=1000)
    by_sklearn.fit(x, labels.accepted)
    np.testing.assert_allclose(mine, by_statsmodels, atol=1e-6, rtol=0)
    np.testing.assert_allclose(mine, by_sklearn.coef_[0], atol=1e-6, rtol=0)


def test_with_the_random_walk_they_converge_to_the_penalized_optimum() -> None:
    labels = TRUTH.drafts(np.random.default_rng(6), 300)
    x, rho = design(labels, K), 4.0

    def objective(theta: Array) -> float:
        z = x @ theta
        loss = np.sum(softplus(z) - labels.accepted * z)
        return float(loss + 0.5 * rho * np.sum(np.diff(theta[1:]) ** 2))

    def gradient(theta: Array) -> Array:
        slope: Array = x.T @ (predict(1.0, 0.0, x @ theta) - labels.accepted)
        steps = rho * np.diff(theta[1:])
        slope[1:-1] -= steps
        slope[2:] += steps
        return slope

    best = minimize(objective, np.zeros(K + 1), jac=gradient, method="BFGS", options={"gtol": 1e-9})
    ours = repeated_refits(labels, Priors(smoothness=rho, damping=50.0), K, 200)
    np.testing.assert_allclose([ours.slope, *ours.strata[0]], best.x, atol=1e-6, rtol=0)


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 20.0), st.integers(0, 2**7 - 1), st.booleans())
def test_solving_around_pins_equals_one_system_without_them(
    seed: int, smoothness: float, pinned: int, pin_slope: bool
) -> None:
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(K + 1, K + 1))
    joint = root @ root.T + 0.1 * np.eye(K + 1)
    a, b, w = float(joint[0, 0]), joint[0, 1:], joint[1:, 1:]
    e0, e1 = float(rng.normal()), rng.normal(size=K)
    system = NormalEquations(a, b, w, e0, e1, np.full(K, 100.0), 700.0)
    pins = np.array([rng.normal() if pinned >> k & 1 else np.nan for k in range(K)])
    slope_pin = 0.7 if pin_slope else np.nan
    start_slope, start = 0.4, rng.normal(size=K)
    slope, intercepts = system.solve(
        start_slope,
        start,
        ridge=0.01,
        smoothness=smoothness,
        damping=0.0,
        slope_pin=slope_pin,
        pins=pins,
    )

    differences = np.diff(np.eye(K), axis=0)
    matrix = np.zeros((K + 1, K + 1))
    matrix[0, 0], matrix[0, 1:], matrix[1:, 0] = a, b, b
    matrix[1:, 1:] = w + smoothness * differences.T @ differences
    matrix += 0.01 * np.eye(K + 1)
    right = np.array([e0, *e1]) + 0.01 * np.array([start_slope, *start])
    fixed = np.array([slope_pin, *pins])
    if np.isnan(fixed[0]):
        best = dense(matrix, right, fixed)
        if not 0.0 <= best[0] <= MAX_SLOPE:  # at its bound, the rest given that
            fixed[0] = np.clip(best[0], 0.0, MAX_SLOPE)
    expected = dense(matrix, right, fixed)
    expected[1:] = np.where(np.isnan(pins), np.clip(expected[1:], -20, 20), pins)
    np.testing.assert_allclose([slope, *intercepts], expected, rtol=1e-6, atol=1e-8)


def dense(matrix: Array, right: Array, fixed: Array) -> Array:
    """Solve for the coordinates that are NaN in `fixed`, given the others."""
    free = np.isnan(fixed)
    x: Array = np.where(free, 0.0, fixed)
    rest = right[free] - matrix[np.ix_(free, ~free)] @ fixed[~free]
    x[free] = np.linalg.solve(matrix[np.ix_(free, free)], rest)
    return x


def test_a_slope_that_wants_to_be_negative_stops_at_zero_with_the_intercepts_fitted_there() -> None:
    x = np.repeat([0.0, 0.0, 0.001, 100.0, -1.0, -1.0], [50, 1, 50, 1, 5, 10])
    y = np.repeat([0.0, 1.0, 0.0, 0.0, 0.0, 1.0], [50, 1, 50, 1, 5, 10])
    labels = Labels(np.zeros_like(x), np.clip(x, -40, 40), y)
    fitted = repeated_refits(labels, Priors(damping=50.0), 1, 200)
    # Those that step downhill here without a guard diverge (statsmodels issue 1604).
    assert fitted.slope == 0.0
    np.testing.assert_allclose(predict(0.0, fitted.strata[0], 0.0), y.mean(), atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_system_without_a_finite_solution_is_reported_and_changes_nothing(value: float) -> None:
    at = Parameters(0.5, np.zeros(2), np.zeros((1, 2)))
    quadratic = np.ones((1, 2, 6))
    quadratic[0, 0, 2] = value
    result = refit(quadratic, np.ones((1, 3, 2, 48)), at, Priors(), Pins.none(1, 2))
    assert result.outcome is Outcome.SINGULAR
    assert not result.outcome.ok
    assert result.coefficients.distance(at) == 0.0


def test_equations_that_contradict_each_other_are_singular() -> None:
    system = NormalEquations(1.0, np.zeros(2), np.zeros((2, 2)), 0.0, np.ones(2), np.ones(2), 2.0)
    none = np.full(2, np.nan)
    with pytest.raises(SingularSystemError):
        system.solve(
            0.5, np.zeros(2), ridge=0.0, smoothness=0.0, damping=0.0, slope_pin=np.nan, pins=none
        )


def test_a_step_that_does_harm_is_halved_until_it_does_not() -> None:
    at, far = (Parameters(s, np.zeros(1), np.zeros((1, 1))) for s in (0.0, 8.0))
    result = guarded(at, far, lambda p: (p.slope - 1.5) ** 2)
    assert (result.outcome, result.halvings) == (Outcome.HALVED, 2)
    assert result.coefficients.slope == 2.0
    assert result.objective_after < result.objective_before
    full = guarded(at, far, lambda p: -p.slope)
    assert (full.outcome, full.coefficients.slope) == (Outcome.MOVED, 8.0)


def test_a_step_that_does_harm_however_small_is_refused() -> None:
    at, far = (Parameters(s, np.zeros(1), np.zeros((1, 1))) for s in (0.0, 8.0))
    result: FitResult = guarded(at, far, lambda p: p.slope)
    assert result.outcome is Outcome.REFUSED
    assert result.coefficients is at
    nowhere = guarded(at, at, lambda p: p.slope)
    assert nowhere.outcome is Outcome.CONVERGED


def test_without_evidence_the_coefficients_stay() -> None:
    at = Parameters(0.5, np.zeros(2), np.zeros((1, 2)))
    result = refit(np.zeros((1, 2, 6)), np.zeros((1, 3, 2, 48)), at, Priors(), Pins.none(1, 2))
    assert result.outcome is Outcome.NO_EVIDENCE
    assert result.coefficients.distance(at) == 0.0


@given(st.floats(0.0, 1e12), st.floats(0.0, 1e6))
def test_damping_is_a_share_that_grows_with_the_labels(n: float, damping: float) -> None:
    share = float(shrink(n, damping))
    assert 0.0 <= share <= 1.0
    assert float(shrink(n + 1.0, damping)) >= share


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=16), st.floats(0.0, 100.0))
def test_a_position_borrows_less_than_the_prior_or_its_neighbour_has(
    labels: list[float], smoothness: float
) -> None:
    n = np.array(labels)
    out = borrowed(n, smoothness)
    lent = out - n
    assert lent[0] == 0.0
    assert (lent >= 0.0).all()
    assert (lent[1:] <= np.minimum(out[:-1], 4.0 * smoothness) * (1 + 1e-9) + 1e-6).all()


def test_bounds_are_kept_however_one_sided_the_labels_are() -> None:
    f = TRUTH.features(np.random.default_rng(7), (4000,))
    k = np.arange(4000) % K
    for accepted in (1.0, 0.0):
        labels = Labels(k.astype(float), f, np.full(4000, accepted))
        fitted = repeated_refits(labels, Priors(damping=50.0), K, 300)
        assert np.abs(fitted.strata).max() <= MAX_INTERCEPT
        assert 0.0 <= fitted.slope <= MAX_SLOPE


def with_position(labels: Labels, position: int, features: Array, accepted: Array) -> Labels:
    """`labels` without those of one position, and these instead."""
    rest = labels.part(np.flatnonzero(labels.position != position))
    k = np.full(len(features), float(position))
    return Labels(
        np.append(rest.position, k),
        np.append(rest.features, features),
        np.append(rest.accepted, accepted),
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_position_of_broken_features_leaves_the_others_as_if_it_had_none(bad: float) -> None:
    labels = TRUTH.drafts(np.random.default_rng(8), 1000)
    nothing = np.zeros(0)
    without = repeated_refits(with_position(labels, 3, nothing, nothing), Priors(damping=50), K, 30)
    broken = with_position(labels, 3, np.full(500, bad), np.ones(500))
    with_them = repeated_refits(broken, Priors(damping=50), K, 30)
    assert with_them.distance(without) == 0.0
    # Without a single label, and without a prior over positions, it stays where it began.
    assert with_them.strata[0, 3] == -0.2


def test_a_huge_feature_counts_as_the_bound_and_moves_the_fit_no_further() -> None:
    labels = TRUTH.drafts(np.random.default_rng(9), 1000)
    ends = [
        repeated_refits(
            with_position(labels, 6, np.full(50, f), np.ones(50)), Priors(damping=50.0), K, 30
        )
        for f in (40.0, 1e24)
    ]
    # Not equal: what predicted with 1e24 was sure to the last digit, with 40 to nine of them.
    assert ends[0].distance(ends[1]) < 1e-4


def test_features_that_hardly_vary_around_a_large_mean_still_give_the_right_acceptance() -> None:
    rng = np.random.default_rng(10)
    labels = TRUTH.drafts(rng, 2000)
    usual = repeated_refits(labels, Priors(damping=50.0), K, 60)
    # One position, and then all, where b^2 / c takes all but the last digits of a away.
    for positions in ([0], range(K)):
        flat = labels
        for k in positions:
            y = labels.accepted[labels.position == k]
            flat = with_position(flat, k, 30.0 + rng.normal(0.0, 1e-7, len(y)), y)
        fitted = repeated_refits(flat, Priors(damping=50.0), K, 60)
        for k in range(K):
            mine = flat.part(np.flatnonzero(flat.position == k))
            p = predict(fitted.slope, fitted.strata[0, k], mine.features)
            assert abs(p.mean() - mine.accepted.mean()) < 1e-3
        if len(positions) == 1:
            np.testing.assert_allclose(fitted.strata[0, 1:], usual.strata[0, 1:], atol=0.1)
