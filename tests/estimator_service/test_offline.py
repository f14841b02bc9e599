"""The offline fit: maximum likelihood where there is such a thing, and bounded elsewhere."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from estimator_service.calibration import calibrate
from estimator_service.config import FitConfig
from estimator_service.irls import MAX_INTERCEPT, MAX_SLOPE
from estimator_service.logistic import INITIAL_INTERCEPT, INITIAL_SLOPE, Array, predict, sigmoid
from estimator_service.offline import NoLabelsError, OfflineFit, fit_labels
from estimator_service.offline_evidence import Evidence
from estimator_service.parameters import Parameters
from estimator_service.pooling import Priors
from estimator_service.trace import Labels

SLOPE = 0.65


def make(
    position: object,
    feature: object,
    accepted: object,
    stratum: object = 0,
    *,
    positions: int | None = None,
    strata: tuple[str, ...] = ("default",),
) -> Labels:
    k = np.asarray(position, dtype=np.intp)
    return Labels(
        positions=positions or 1 + int(k.max()),
        position=k,
        feature=np.asarray(feature, dtype=np.float64),
        accepted=np.asarray(accepted, dtype=np.float64),
        stratum=np.broadcast_to(np.asarray(stratum, dtype=np.intp), k.shape),
        strata=strata,
    )


def sample(
    count: int, positions: int = 5, mean: float = 1.5, spread: float = 2.0, seed: int = 0
) -> Labels:
    """Labels that thin out with depth, of a drafter with slope SLOPE."""
    random = np.random.default_rng(seed)
    k = np.minimum(random.geometric(0.4, count) - 1, positions - 1)
    f = np.clip(random.normal(mean, spread, count), -40.0, 40.0)
    y = random.random(count) < sigmoid(SLOPE * (f - mean) + 0.3 - 0.1 * k)
    return make(k, f, y, positions=positions)


def one_hot(labels: Labels) -> Array:
    return np.column_stack([labels.feature, np.eye(labels.positions)[labels.position]])


def coefficients(fit: OfflineFit) -> Array:
    return np.array([fit.slope, *fit.intercepts])


SAMPLES = {
    "many": sample(50_000),
    "few": sample(400, positions=3),
    "one position": sample(1000, positions=1),
    "large features": sample(20_000, mean=12.0, spread=1.0),
    "deep": sample(100_000, positions=16),
}


@pytest.mark.parametrize("labels", SAMPLES.values(), ids=SAMPLES)
def test_equals_statsmodels(labels: Labels) -> None:
    fit = fit_labels(labels)
    model = sm.Logit(labels.accepted, one_hot(labels))
    theirs = model.fit(method="newton", maxiter=100, tol=1e-12, disp=0)
    np.testing.assert_allclose(coefficients(fit), theirs.params, rtol=0, atol=1e-6)
    assert fit.calibration.log_loss == pytest.approx(-theirs.llf / len(labels), abs=1e-12)
    assert fit.converged
    assert fit.problems == []
    assert fit.iterations < 15


@pytest.mark.parametrize("labels", SAMPLES.values(), ids=SAMPLES)
def test_equals_scikit_learn(labels: Labels) -> None:
    theirs = LogisticRegression(
        C=np.inf, fit_intercept=False, solver="newton-cholesky", tol=1e-12, max_iter=100
    )
    with warnings.catch_warnings():
        # It may say that its line search found nothing better than where it is.
        warnings.simplefilter("ignore")
        theirs.fit(one_hot(labels), labels.accepted)
    np.testing.assert_allclose(coefficients(fit_labels(labels)), theirs.coef_[0], rtol=0, atol=1e-6)


def test_scores_are_those_of_the_labels_themselves() -> None:
    labels = sample(5000)
    fit = fit_labels(labels)
    p = predict(fit.slope, fit.intercepts[labels.position], labels.feature)
    assert fit.calibration == calibrate(p, accepted=labels.accepted)
    for k, scores in enumerate(fit.per_position):
        at = labels.position == k
        assert scores == calibrate(p[at], accepted=labels.accepted[at])
        assert scores.observed == pytest.approx(scores.predicted, abs=1e-9)
    assert fit.observations.tolist() == np.bincount(labels.position).tolist()
    assert sum(bar.observations for bar in fit.reliability) == len(labels)


def test_neither_order_nor_clones_of_the_labels_matter() -> None:
    labels = sample(3000)
    fit = fit_labels(labels)
    shuffled = fit_labels(labels.select(np.random.default_rng(1).permutation(len(labels))))  # type: ignore[arg-type]
    twice = fit_labels(
        make(*(np.tile(x, 2) for x in (labels.position, labels.feature, labels.accepted)))
    )
    np.testing.assert_allclose(coefficients(shuffled), coefficients(fit), rtol=0, atol=1e-9)
    np.testing.assert_allclose(coefficients(twice), coefficients(fit), rtol=0, atol=1e-9)


def test_statsmodels_issue_1604_is_finite_and_bounded() -> None:
    counts = [50, 1, 50, 1, 5, 10]
    y = np.repeat([0, 1, 0, 0, 0, 1], counts)
    x = np.repeat([0, 0, 0.001, 100, -1, -1], counts)
    for feature in (x, -x):
        fit = fit_labels(make(np.zeros_like(y), feature, y))
        assert_bounded(fit)
        assert np.isfinite([fit.calibration.log_loss, fit.calibration.auc]).all()
    # The features speak against acceptance: the best slope that is allowed is none.
    fit = fit_labels(make(np.zeros_like(y), x, y))
    assert fit.problems == ["the slope is at its bound of 0"]
    assert sigmoid(fit.intercepts[0]) == pytest.approx(y.mean(), abs=1e-9)


def assert_bounded(fit: OfflineFit) -> None:
    assert 0.0 <= fit.slope <= MAX_SLOPE
    assert (np.abs(fit.intercepts) <= MAX_INTERCEPT).all()
    for stratum in fit.strata.values():
        assert (np.abs(stratum.intercepts) <= MAX_INTERCEPT).all()


@pytest.mark.parametrize(("verdict", "bound"), [(1.0, MAX_INTERCEPT), (0.0, -MAX_INTERCEPT)])
def test_position_of_labels_all_alike_is_bounded_and_leaves_the_rest_alone(
    verdict: float, bound: float
) -> None:
    labels = sample(5000, positions=4)
    alike = labels.position == 2
    fit = fit_labels(replace(labels, accepted=np.where(alike, verdict, labels.accepted)))
    assert fit.intercepts[2] == bound
    assert not fit.converged
    [problem] = fit.problems
    assert problem.startswith(f"intercept 2 is left at {bound:g}: every label there was ")
    rest = fit_labels(labels.select(~alike))
    assert fit.slope == pytest.approx(rest.slope, abs=1e-9)
    assert fit.intercepts[[0, 1, 3]] == pytest.approx(rest.intercepts[[0, 1, 3]], abs=1e-9)


@pytest.mark.parametrize("smoothness", [0.0, 4.0])
@pytest.mark.parametrize("verdict", [0.0, 1.0])
def test_labels_all_alike(verdict: float, smoothness: float) -> None:
    fit = fit_labels(make([0, 0, 1], [1.0, 2.0, 3.0], [verdict] * 3), smoothness=smoothness)
    assert fit.slope == INITIAL_SLOPE
    assert np.abs(fit.intercepts).tolist() == [MAX_INTERCEPT] * 2
    assert fit.calibration.log_loss < 1e-6
    assert np.isnan(fit.calibration.auc)
    assert len(fit.problems) == 3


def test_features_that_separate_the_labels_are_reported() -> None:
    f = np.linspace(-3.0, 3.0, 100)
    fit = fit_labels(make(np.zeros(100), f, f > 0.0))
    assert_bounded(fit)
    assert not fit.converged


def test_one_sided_separation_is_no_convergence() -> None:
    # Far out the predictions are 1 to the last digit, and no step moves any more.
    fit = fit_labels(make([0, 0, 0], [0.0, 0.0, 40.0], [1, 0, 1]))
    assert not fit.converged
    assert "the labels do not determine it" in fit.problems[-1]


def test_features_that_do_not_vary_leave_the_slope_where_it_started() -> None:
    fit = fit_labels(make([0] * 10, [3.0] * 10, [1] * 7 + [0] * 3))
    assert fit.slope == INITIAL_SLOPE
    assert fit.calibration.predicted == pytest.approx(0.7, abs=1e-9)
    assert fit.problems == [f"the slope is left at {INITIAL_SLOPE}: the labels do not determine it"]


@pytest.mark.parametrize("mean", [-30.0, 30.0])
def test_features_around_a_large_mean_converge_from_the_start(mean: float) -> None:
    fit = fit_labels(sample(20_000, mean=mean, spread=1.0))
    assert fit.slope == pytest.approx(SLOPE, abs=0.1)
    assert fit.converged


def test_intercept_beyond_its_bound_is_held_there_and_the_slope_fitted_to_it() -> None:
    y = np.repeat([1, 0, 1, 0], [480, 20, 300, 200])
    fit = fit_labels(make(np.zeros(1000), np.repeat([40.0, 39.0], 500), y))
    assert fit.intercepts[0] == -MAX_INTERCEPT
    assert fit.calibration.predicted == pytest.approx(0.78, abs=0.01)
    assert fit.problems == [f"intercept 0 is at its bound of {-MAX_INTERCEPT:g}"]


def test_position_without_labels_keeps_its_start_and_smoothness_moves_it() -> None:
    labels = replace(sample(5000, positions=4), positions=6)
    alone = fit_labels(labels)
    assert alone.intercepts[4:].tolist() == [INITIAL_INTERCEPT] * 2
    assert alone.converged
    assert np.isnan(alone.per_position[5].log_loss)
    smooth = fit_labels(labels, smoothness=4.0)
    assert smooth.intercepts[4:] == pytest.approx([smooth.intercepts[3]] * 2, abs=1e-6)
    assert np.ptp(fit_labels(labels, smoothness=1e9).intercepts) < 1e-3


def test_features_beyond_the_bound_are_clamped() -> None:
    labels = sample(2000)
    wild = replace(labels, feature=np.where(labels.feature > 5.0, 1e24, labels.feature))
    tame = replace(labels, feature=np.where(labels.feature > 5.0, 40.0, labels.feature))
    assert coefficients(fit_labels(wild)).tolist() == coefficients(fit_labels(tame)).tolist()


def test_nothing_to_fit_is_an_error() -> None:
    empty = sample(10).select(np.zeros(10, dtype=bool))
    with pytest.raises(NoLabelsError, match="no draft position was observed"):
        fit_labels(empty)
    with pytest.raises(ValueError, match="finite"):
        fit_labels(make([0], [np.nan], [1]))


def two_strata(shallow: int, deep: int) -> Labels:
    parts = [sample(shallow, seed=1), sample(deep, seed=2)]
    shift = np.random.default_rng(3).random(deep) < 0.3
    parts[1] = replace(parts[1], accepted=np.maximum(parts[1].accepted, shift))
    k, f, y = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("position", "feature", "accepted")
    )
    return make(k, f, y, np.repeat([0, 1], [shallow, deep]), strata=("greedy", "sampled"))


def test_strata_have_intercepts_of_their_own_and_share_the_slope() -> None:
    labels = two_strata(20_000, 20_000)
    fit = fit_labels(labels)
    assert fit.converged
    assert list(fit.strata) == ["greedy", "sampled"]
    for s, stratum in enumerate(fit.strata.values()):
        mine = labels.stratum == s
        assert stratum.observations.sum() == 20_000
        p = predict(fit.slope, stratum.intercepts[labels.position[mine]], labels.feature[mine])
        assert stratum.calibration == calibrate(p, accepted=labels.accepted[mine])
        assert stratum.calibration.ece < 0.05
    assert fit.observations.sum() == 40_000
    assert fit.strata["sampled"].intercepts[0] > fit.strata["greedy"].intercepts[0] + 0.3


def test_stratum_with_few_labels_stays_near_the_pair() -> None:
    pooled = fit_labels(two_strata(20_000, 20)).strata["sampled"].intercepts
    alone = fit_labels(two_strata(20_000, 20), pooling=1e-3).strata["sampled"].intercepts
    pair = fit_labels(two_strata(20_000, 20), pooling=float("inf")).intercepts
    assert abs(pooled[0] - pair[0]) < abs(alone[0] - pair[0])


def test_full_pooling_is_one_fit() -> None:
    labels = two_strata(3000, 1000)
    one = replace(labels, stratum=np.zeros_like(labels.stratum), strata=("all",))
    pooled, plain = fit_labels(labels, pooling=float("inf")), fit_labels(one)
    assert coefficients(pooled) == pytest.approx(coefficients(plain), abs=1e-9)
    for stratum in pooled.strata.values():
        assert stratum.intercepts == pytest.approx(plain.intercepts, abs=1e-9)


def test_one_stratum_is_not_pooled_with_anything() -> None:
    labels = sample(500)
    assert coefficients(fit_labels(labels, pooling=1e-3)).tolist() == (
        coefficients(fit_labels(labels, pooling=1e3)).tolist()
    )


@pytest.mark.parametrize("smoothness", [0.0, 4.0])
def test_no_point_nearby_is_better(smoothness: float) -> None:
    labels = two_strata(2000, 300)
    config = FitConfig()
    fit = fit_labels(labels, smoothness=smoothness)
    priors = Priors(
        smoothness=smoothness, pooling=config.pooling, offset_smoothness=config.offset_smoothness
    )
    strata = np.stack([stratum.intercepts for stratum in fit.strata.values()])
    evidence = Evidence(labels, priors)
    best = evidence.objective(Parameters(fit.slope, fit.intercepts, strata))
    random = np.random.default_rng(0)
    for scale in (1e-1, 1e-2, 1e-3):
        for _ in range(20):
            near = Parameters(
                fit.slope + scale * random.normal(),
                fit.intercepts + scale * random.normal(size=5),
                strata + scale * random.normal(size=(2, 5)),
            )
            assert evidence.objective(near) > best


def test_steps_are_reported_and_shrink() -> None:
    steps: list[tuple[int, float]] = []
    fit = fit_labels(sample(5000), on_step=lambda n, size: steps.append((n, size)))
    assert [n for n, _ in steps] == list(range(1, fit.iterations + 1))
    assert steps[-1][1] < 1e-10


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.one_of(st.floats(-40, 40), st.sampled_from([-40.0, 0.0, 40.0])),
            st.integers(0, 1),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([0.0, 1.0, 1e6]),
    st.sampled_from([1e-6, 4.0, float("inf")]),
)
def test_any_labels_give_finite_coefficients_within_their_bounds(
    rows: list[tuple[int, float, int, int]], smoothness: float, pooling: float
) -> None:
    k, f, y, s = zip(*rows, strict=True)
    fit = fit_labels(make(k, f, y, s, strata=("a", "b")), smoothness=smoothness, pooling=pooling)
    assert_bounded(fit)
    assert np.isfinite(coefficients(fit)).all()
    assert np.isfinite(fit.calibration.log_loss)
