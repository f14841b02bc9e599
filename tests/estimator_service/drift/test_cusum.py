"""Cusum against theory, published tables, simulation, and river's Page-Hinkley."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial.legendre import leggauss
from numpy.typing import NDArray
from river import drift

from estimator_service.drift import Cusum
from tests.estimator_service.drift.run_lengths import (
    agree,
    detections,
    documented,
    false_alarm_interval,
    shifting_stream,
)

Floats = NDArray[np.float64]

SLACK, THRESHOLD = Cusum().slack, Cusum().threshold
streams = st.lists(st.floats(-20, 20), max_size=200)


def statistics(x: Floats, slack: float) -> Floats:
    """The statistic after each update along the last axis, never restarted.

    The recurrence max(0, .) is written as a random walk less its running minimum.
    """
    statistic = np.zeros(x.shape)
    for sign in (1, -1):
        walk = np.cumsum(sign * x - slack, axis=-1)
        side = walk - np.minimum(np.minimum.accumulate(walk, axis=-1), 0)
        np.maximum(statistic, side, out=statistic)
    return statistic


def run_lengths(x: Floats, slack: float, threshold: float) -> Floats:
    """Updates until the first detection in each row; NaN where there is none."""
    crossed = statistics(x, slack) > threshold
    return np.where(crossed.any(axis=1), crossed.argmax(axis=1) + 1.0, np.nan)


def delay(
    shift: float, slack: float, threshold: float, runs: int, seed: int
) -> tuple[float, float]:
    """Mean updates to a detection on N(shift, 1) from a fresh start, and its standard error."""
    rng = np.random.default_rng(seed)
    lengths = np.concatenate(
        [
            run_lengths(rng.normal(shift, 1, (2_000, 500)), slack, threshold)
            for _ in range(runs // 2_000)
        ]
    )
    return float(lengths.mean()), float(lengths.std() / math.sqrt(runs))


def one_sided_run_length(slack: float, threshold: float, shift: float = 0.0) -> float:
    """Page's integral equation for the mean run length from 0, solved by Gauss-Legendre nodes.

    L(s) = 1 + L(0) P(x <= slack - s) + integral over y in (0, threshold) of L(y) p(y - s + slack)
    """
    nodes, weights = leggauss(120)
    y = (nodes + 1) * threshold / 2
    s = np.concatenate([[0.0], y])
    stay = slack - shift - s
    kernel = np.exp(-((y[None, :] + stay[:, None]) ** 2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([(1 + math.erf(v / math.sqrt(2))) / 2 for v in stay])
    transition = np.column_stack([below, kernel * weights * threshold / 2])
    return float(np.linalg.solve(np.eye(len(s)) - transition, np.ones(len(s)))[0])


def two_sided_run_length(slack: float, threshold: float, shift: float = 0.0) -> float:
    """The sides' alarm rates add (Van Dobben de Bruyn 1968)."""
    up = one_sided_run_length(slack, threshold, shift)
    down = one_sided_run_length(slack, threshold, -shift)
    return 1 / (1 / up + 1 / down)


def siegmund(slack: float, threshold: float) -> float:
    """Siegmund's approximation to the two-sided mean run length at shift 0."""
    b = threshold + 1.166
    return (math.exp(2 * slack * b) - 1 - 2 * slack * b) / (2 * slack**2) / 2


# The recurrence


def test_constant_stream_crosses_when_the_arithmetic_says() -> None:
    """The sum n (c - slack) first exceeds the threshold at n > threshold / (c - slack)."""
    assert detections(Cusum(0.5, 4.0), [1.5] * 5) == [4]
    assert detections(Cusum(0.5, 4.0), [-2.5] * 3) == [2]
    assert detections(Cusum(0.5, 4.0), [0.5] * 1000) == []


def test_reaching_the_threshold_is_not_exceeding_it() -> None:
    cusum = Cusum(slack=0.5, threshold=4.0)
    assert not cusum.update(4.5)
    assert cusum.statistic == cusum.threshold
    assert cusum.update(0.75)


def test_detection_shows_its_statistic_and_restarts_at_the_next_update() -> None:
    cusum = Cusum(slack=0.5, threshold=4.0)
    assert cusum.update(10.0)
    assert (cusum.statistic, cusum.upper, cusum.lower) == (9.5, 9.5, 0.0)
    assert cusum.detected
    assert not cusum.update(1.0)
    assert (cusum.statistic, cusum.detected) == (0.5, False)


@given(streams)
def test_steps_equal_the_vectorised_walk(stream: list[float]) -> None:
    """Step by step until the first detection, and from each restart on."""
    cusum = Cusum(slack=0.5, threshold=5.0)
    start = 0
    for i, x in enumerate(stream):
        detected = cusum.update(x)
        expected = statistics(np.array(stream[start : i + 1]), 0.5)[-1]
        assert cusum.statistic == pytest.approx(expected, abs=1e-9)
        if detected:
            start = i + 1


@pytest.mark.parametrize("size", [1.0, 2.0, 5.0])
def test_equals_river_page_hinkley_fed_with_the_same_deviations(size: float) -> None:
    """A CUSUM is what river 0.26.1 lacks, but its Page-Hinkley is one of deviations at alpha = 1.

    From the mean m of the i - 1 values since its restart, y = m + x i / (i - 1) has the deviation
    x. The first value after a restart always deviates by 0, which leaves a fresh CUSUM at 0.
    """
    ours = Cusum(slack=0.5, threshold=5.0)
    rivers = drift.PageHinkley(min_instances=1, delta=0.5, threshold=5.0, alpha=1.0)
    mean, count, found = 0.0, 0, []
    for i, x in enumerate(shifting_stream(size)):
        if count == 0:
            rivers.update(0.0)
            mean, count = 0.0, 1
        count += 1
        y = mean + x * count / (count - 1)
        mean += (y - mean) / count
        rivers.update(y)
        assert ours.update(x) == rivers.drift_detected
        if rivers.drift_detected:
            found.append(i)
            count = 0
    assert len(found) > 2


@given(streams)
def test_mirrored_stream_detects_at_the_same_places(stream: list[float]) -> None:
    ours, mirrored = Cusum(threshold=5.0), Cusum(threshold=5.0)
    for x in stream:
        assert ours.update(x) == mirrored.update(-x)
        assert (ours.upper, ours.lower) == (mirrored.lower, mirrored.upper)
        assert ours.statistic >= 0


# False alarms and delays


@pytest.mark.parametrize(
    ("threshold", "shift", "published"),
    [
        (4.0, 0.0, 168.0),
        (4.0, 0.5, 26.6),
        (4.0, 1.0, 8.38),
        (4.0, 2.0, 3.34),
        (4.0, 4.0, 1.71),
        (5.0, 0.0, 465.0),
        (5.0, 0.5, 38.0),
        (5.0, 1.0, 10.4),
        (5.0, 2.0, 4.01),
        (5.0, 4.0, 2.01),
    ],
)
def test_integral_equation_gives_lucas_and_crosiers_table(
    threshold: float, shift: float, published: float
) -> None:
    """Mean run lengths for slack 0.5, published to three digits."""
    assert two_sided_run_length(0.5, threshold, shift) == pytest.approx(published, rel=3e-3)


def test_simulated_run_lengths_give_the_published_ones() -> None:
    interval, error, _ = false_alarm_interval(
        lambda x: run_lengths(x, 0.5, 4.0), 4_000_000, seed=1, length=2_000
    )
    assert agree((interval, error), (two_sided_run_length(0.5, 4.0), 0.0))
    assert agree(delay(1.0, 0.5, 4.0, 20_000, seed=2), (two_sided_run_length(0.5, 4.0, 1.0), 0.0))


def test_class_detects_where_the_simulation_does() -> None:
    x = np.random.default_rng(3).normal(0.6, 1.0, (200, 400))
    expected = run_lengths(x, SLACK, THRESHOLD)
    found = [detections(Cusum(), [float(v) for v in row]) for row in x]
    assert np.isfinite(expected).sum() > 20
    for first, indices in zip(expected, found, strict=True):
        assert (indices[0] + 1 if indices else None) == (None if np.isnan(first) else first)


def test_documented_false_alarm_interval_is_the_one_of_theory_and_of_a_rerun() -> None:
    exact = two_sided_run_length(SLACK, THRESHOLD)
    assert agree(documented(Cusum)[0], (exact, 0.0))
    assert siegmund(SLACK, THRESHOLD) == pytest.approx(exact, rel=0.03)
    interval, error, alarms = false_alarm_interval(
        lambda x: run_lengths(x, SLACK, THRESHOLD), 40_000_000, seed=4
    )
    assert alarms > 20
    assert agree((interval, error), documented(Cusum)[0])
    assert f"{exact:,.0f}"[:5] in (Cusum.__doc__ or "")


@pytest.mark.parametrize("shift", [1, 2, 5])
def test_documented_delays_are_those_of_theory_and_of_a_rerun(shift: int) -> None:
    assert agree(documented(Cusum)[shift], (two_sided_run_length(SLACK, THRESHOLD, shift), 0.0))
    assert agree(documented(Cusum)[shift], delay(shift, SLACK, THRESHOLD, 10_000, seed=5))


# State


@given(streams, streams)
def test_restored_detector_continues_identically(past: list[float], future: list[float]) -> None:
    ours = Cusum(threshold=5.0)
    for x in past:
        ours.update(x)
    restored = Cusum(threshold=5.0)
    restored.restore(json.loads(json.dumps(ours.state(), allow_nan=False)))
    assert (restored.state(), restored.detected) == (ours.state(), ours.detected)
    for x in future:
        assert restored.update(x) == ours.update(x)
        assert restored.state() == ours.state()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"upper": 1.0, "lower": 0.0},
        {"upper": 1.0, "lower": 0.0, "detected": 0, "mean": 0.0},
        {"upper": math.nan, "lower": 0.0, "detected": 0},
        {"upper": 1.0, "lower": -1.0, "detected": 0},
        {"upper": 1.0, "lower": 0.0, "detected": 2},
    ],
)
def test_impossible_state_is_refused_without_a_change(state: dict[str, float]) -> None:
    cusum = Cusum()
    cusum.update(2.0)
    before = cusum.state()
    with pytest.raises(ValueError, match="must"):
        cusum.restore(state)
    assert cusum.state() == before


@pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf, 1e200])
@pytest.mark.parametrize("last", [2.0, 20.0])
def test_observation_not_finite_is_refused_without_a_change(x: float, last: float) -> None:
    """Also right after a detection, when the update would first restart the test."""
    cusum = Cusum()
    cusum.update(last)
    before = cusum.state()
    with pytest.raises(ValueError, match="finite"):
        cusum.update(x)
    assert cusum.state() == before


def test_numpy_observation_leaves_plain_floats_in_the_state() -> None:
    cusum = Cusum()
    cusum.update(np.float64(2.0))
    assert [type(value) for value in cusum.state().values()] == [float, float, int]


def test_reset_equals_a_new_detector() -> None:
    cusum = Cusum()
    cusum.update(20.0)
    cusum.reset()
    assert (cusum.state(), cusum.detected) == (Cusum().state(), False)


@pytest.mark.parametrize(
    ("slack", "threshold"), [(-0.1, 5.0), (math.nan, 5.0), (0.5, 0.0), (0.5, math.inf)]
)
def test_impossible_parameters_are_refused(slack: float, threshold: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Cusum(slack, threshold)
