"""Sufficient statistics: sums of anything in any order are the sums of the whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator_service.logistic import Array, predict
from estimator_service.messages import CoefficientSet
from estimator_service.parameters import Parameters, Pins
from estimator_service.pooling import Priors, newton_point
from estimator_service.statistics import Quadratic, Statistics
from tests.estimator_service.fleet import Labels, Truth

TRUTH = Truth(0.6, (0.5, 0.2, 0.0, -0.2, -0.3, -0.4, -0.5))
K = TRUTH.positions


def statistics_of(labels: Labels, coefficients: CoefficientSet) -> Statistics:
    k = labels.position.astype(int)
    p = predict(coefficients.slope, np.array(coefficients.intercepts)[k], labels.features)
    return Statistics.of(K, k, labels.features, labels.accepted, p)


def assert_same(left: Statistics, right: Statistics) -> None:
    np.testing.assert_allclose(left.sums, right.sums, rtol=1e-9, atol=1e-9)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 12))
def test_any_sharding_gives_the_statistics_of_the_single_stream(
    seed: int, frames: int, replicas: int
) -> None:
    rng = np.random.default_rng(seed)
    labels = TRUTH.drafts(rng, 500)
    coefficients = CoefficientSet.initial(K)
    whole = statistics_of(labels, coefficients)
    order = rng.permutation(len(labels))
    cuts = np.sort(rng.integers(0, len(labels) + 1, frames - 1))
    merged = [Statistics.empty(K) for _ in range(replicas)]
    for shard in np.split(order, cuts):
        replica = rng.integers(replicas)
        part = statistics_of(labels.part(shard), coefficients)
        merged[replica] = merged[replica].merge(part)
    total = Statistics.empty(K)
    for replica in rng.permutation(replicas):
        total = total.merge(merged[replica])
    assert_same(total, whole)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3))
def test_merge_is_associative_and_commutative_with_empty_as_identity(seeds: list[int]) -> None:
    a, b, c = (
        statistics_of(TRUTH.drafts(np.random.default_rng(s), 20), CoefficientSet.initial(K))
        for s in seeds
    )
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)))
    np.testing.assert_array_equal(a.merge(b).sums, b.merge(a).sums)
    np.testing.assert_array_equal(a.merge(Statistics.empty(K)).sums, a.sums)


@pytest.mark.slow
def test_a_million_merges_of_one_equal_one_merge_of_a_million() -> None:
    rng = np.random.default_rng(1)
    count = 1_000_000
    k = rng.integers(0, K, count)
    f = TRUTH.features(rng, (count,))
    y = (rng.random(count) < predict(0.6, -0.1, f)).astype(float)
    p = predict(0.5, -0.2, f)
    whole = Statistics.of(K, k, f, y, p)
    v, r = p * (1 - p), y - p
    single = np.stack([v * f * f, v * f, v, r * f, r, np.ones(count)], axis=1)
    total = np.zeros((K, 6))
    one = Statistics(np.zeros((K, 6)))
    running = Statistics(total)
    for i in range(count):
        one.sums[k[i]] = single[i]
        running = running.merge(one)
        one.sums[k[i]] = 0.0
    # And the rows are those that the class makes of one observation.
    for i in range(0, count, 50_000):
        made = Statistics.of(K, k[i : i + 1], f[i : i + 1], y[i : i + 1], p[i : i + 1])
        np.testing.assert_array_equal(made.sums[k[i]], single[i])
    np.testing.assert_allclose(running.sums, whole.sums, rtol=1e-9)


def test_merging_another_number_of_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="K=3 with K=7"):
        Statistics.empty(3).merge(Statistics.empty(7))


def test_a_quadratic_s_gradient_at_the_grading_coefficients_is_the_round_s() -> None:
    labels = TRUTH.drafts(np.random.default_rng(2), 300)
    coefficients = CoefficientSet.initial(K)
    statistics = statistics_of(labels, coefficients)
    slope, intercepts = coefficients.slope, np.array(coefficients.intercepts)
    g0, g1 = Quadratic.of(statistics, slope, intercepts).gradient(slope, intercepts)
    np.testing.assert_allclose(g0, statistics.sums[:, 3].sum(), rtol=1e-9)
    np.testing.assert_allclose(g1, statistics.sums[:, 4], rtol=1e-9, atol=1e-9)


def test_rounds_of_three_versions_merge_to_the_fit_that_saw_them_at_one() -> None:
    rng = np.random.default_rng(3)
    labels = TRUTH.labels(rng, 40_000)
    reference = maximum_likelihood(labels)
    centre = np.array(TRUTH.intercepts)
    tilt = np.linspace(-1.0, 1.0, K)
    for scale in (0.05, 0.2, 0.5):
        # As a fleet sees them around refits: each differently off the truth, up to `scale` logits.
        versions = [
            (0.6 + 0.1 * scale, centre + scale),
            (0.6 - 0.1 * scale, centre - scale),
            (0.6, centre + scale * tilt),
        ]
        merged, plain = merged_and_added(labels, versions, rng)
        ours, theirs = distance(merged, reference), distance(plain, reference)
        print(
            f"\nversions {scale} off: re-centred {ours:.1e}, plain adding {theirs:.1e} from the fit"
        )
        if scale == 0.05:
            assert ours < 1e-3
        assert theirs > 10 * ours


def merged_and_added(
    labels: Labels, versions: list[tuple[float, Array]], rng: np.random.Generator
) -> tuple[Parameters, Parameters]:
    """Newton points of rounds under several versions: re-centred, and with gradients added."""
    which = rng.integers(0, len(versions), len(labels))
    merged, plain = Quadratic.empty(K), Statistics.empty(K)
    for i, (slope, intercepts) in enumerate(versions):
        part = labels.part(np.flatnonzero(which == i))
        k = part.position.astype(int)
        p = predict(slope, intercepts[k], part.features)
        statistics = Statistics.of(K, k, part.features, part.accepted, p)
        merged = merged.merge(Quadratic.of(statistics, slope, intercepts))
        plain = plain.merge(statistics)
    newest = versions[-1]
    return point(merged, *newest), point(Quadratic.of(plain, *newest), *newest)


def distance(left: Parameters, right: Parameters) -> float:
    intercepts = float(np.abs(left.intercepts - right.intercepts).max())
    return max(abs(left.slope - right.slope), intercepts)


def point(quadratic: Quadratic, slope: float, intercepts: Array) -> Parameters:
    """The undamped Newton point of one stratum."""
    at = Parameters(slope, intercepts, intercepts[None])
    return newton_point(quadratic.sums[None], at, Priors(ridge=1e-9), Pins.none(1, K))


def maximum_likelihood(labels: Labels) -> Parameters:
    k = labels.position.astype(int)
    at = Parameters(0.5, np.zeros(K), np.zeros((1, K)))
    for _ in range(25):
        p = predict(at.slope, at.intercepts[k], labels.features)
        statistics = Statistics.of(K, k, labels.features, labels.accepted, p)
        at = point(Quadratic.of(statistics, at.slope, at.intercepts), at.slope, at.intercepts)
    return at


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_label_that_says_nothing_enters_no_sum(bad: float) -> None:
    rng = np.random.default_rng(4)
    labels = TRUTH.drafts(rng, 50)
    coefficients = CoefficientSet.initial(K)
    clean = statistics_of(labels, coefficients)
    n = len(labels)
    k = np.append(labels.position, [0, 1]).astype(int)
    f = np.append(labels.features, [bad, 1.0])
    y = np.append(labels.accepted, [1, 1])
    p = np.append(predict(0.5, -0.2, labels.features), [0.5, bad])
    mixed = Statistics.of(K, k, f, y, p)
    np.testing.assert_allclose(mixed.sums, clean.sums)
    assert mixed.observations.sum() == n


def test_a_feature_beyond_the_bound_counts_as_the_bound() -> None:
    huge = Statistics.of(1, [0], [1e24], [1], [0.9])
    bound = Statistics.of(1, [0], [40.0], [1], [0.9])
    np.testing.assert_array_equal(huge.sums, bound.sums)


@pytest.mark.parametrize("position", [-1, 7])
def test_a_position_outside_the_draft_is_an_error(position: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.6"):
        Statistics.of(K, [position], [0.0], [1], [0.5])
