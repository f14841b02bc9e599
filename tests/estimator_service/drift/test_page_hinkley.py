"""PageHinkley against river step by step, against CUSUM theory, and against simulation."""

import json
import math
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from river import drift

from estimator_service.drift import Cusum, PageHinkley
from tests.estimator_service.drift.run_lengths import (
    agree,
    detections,
    documented,
    false_alarm_interval,
    shifting_stream,
)

Floats = NDArray[np.float64]
Mode = Literal["up", "down", "both"]

DELTA, THRESHOLD, MIN_INSTANCES = (
    PageHinkley().delta,
    PageHinkley().threshold,
    PageHinkley().min_instances,
)
streams = st.lists(st.floats(-20, 20), max_size=200)
modes = st.sampled_from(["up", "down", "both"])


def run_lengths(x: Floats, delta: float, threshold: float, warm: int = 0) -> Floats:
    """Updates until the first detection in each row (alpha = 1), NaN where there is none.

    Rows that detect within their first `warm` updates are left out.
    """
    n = np.arange(1, x.shape[1] + 1)
    deviation = x - np.cumsum(x, axis=1) / n
    crossed = np.zeros(x.shape, dtype=bool)
    for sign in (1, -1):
        walk = np.cumsum(sign * deviation - delta, axis=1)
        crossed |= walk - np.minimum.accumulate(walk, axis=1) > threshold
    crossed &= n >= MIN_INSTANCES
    crossed = crossed[~crossed[:, :warm].any(axis=1)]
    return np.where(crossed.any(axis=1), crossed.argmax(axis=1) + 1.0, np.nan) - warm


def delays(shift: float, after: int, runs: int, seed: int, horizon: int = 1_000) -> Floats:
    """Updates from the shift to its detection in default detectors; NaN beyond the horizon."""
    rng = np.random.default_rng(seed)
    levels = np.repeat([0.0, shift], [after, horizon])
    return np.concatenate(
        [
            run_lengths(rng.normal(levels, 1.0, (500, len(levels))), DELTA, THRESHOLD, after)
            for _ in range(runs // 500)
        ]
    )


def mean_and_error(values: Floats) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def fading_false_alarms(alpha: float, rows: int, updates: int, seed: int) -> int:
    """Detections on N(0, 1) by default detectors but for alpha, restarted after each."""
    rng = np.random.default_rng(seed)
    n, mean, rise, fall, low, high = np.zeros((6, rows))
    alarms = 0
    for _ in range(updates):
        x = rng.standard_normal(rows)
        n += 1
        mean += (x - mean) / n
        rise = alpha * rise + (x - mean - DELTA)
        fall = alpha * fall + (x - mean + DELTA)
        low, high = np.minimum(low, rise), np.maximum(high, fall)
        hit = (np.maximum(rise - low, high - fall) > THRESHOLD) & (n >= MIN_INSTANCES)
        alarms += int(hit.sum())
        for values in (n, mean, rise, fall, low, high):
            values[hit] = 0
    return alarms


def assert_equals_river(
    stream: list[float],
    min_instances: int,
    delta: float,
    threshold: float,
    alpha: float,
    mode: Mode,
) -> int:
    """Detections and, through the private sums, the statistics are equal to the last bit."""
    ours = PageHinkley(min_instances, delta, threshold, alpha, mode)
    rivers = drift.PageHinkley(min_instances, delta, threshold, alpha, mode)
    found = 0
    for x in stream:
        detected = ours.update(x)
        rivers.update(x)
        assert detected == ours.detected == rivers.drift_detected
        assert ours.upper == rivers._sum_increase - rivers._min_increase
        assert ours.lower == rivers._max_decrease - rivers._sum_decrease
        found += detected
    return found


# Agreement with river


@given(
    streams,
    st.integers(1, 40),
    st.floats(0, 2),
    st.floats(0.01, 50),
    st.floats(0, 1, exclude_min=True),
    modes,
)
def test_any_stream_gives_what_river_gives(
    stream: list[float],
    min_instances: int,
    delta: float,
    threshold: float,
    alpha: float,
    mode: Mode,
) -> None:
    assert_equals_river(stream, min_instances, delta, threshold, alpha, mode)


@pytest.mark.parametrize("mode", ["up", "down", "both"])
@pytest.mark.parametrize("size", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("alpha", [0.99, 0.9999, 1.0])
def test_shifting_stream_gives_what_river_gives_through_detections(
    size: float, alpha: float, mode: Mode
) -> None:
    found = assert_equals_river(shifting_stream(size), 5, 0.25, 4.0, alpha, mode)
    assert found > 1


def test_river_defaults_give_rivers_own_example() -> None:
    rng = np.random.default_rng(12345)
    stream = [*rng.integers(0, 2, 1000).astype(float), *rng.integers(4, 8, 1000).astype(float)]
    assert assert_equals_river(stream, 30, 0.005, 50.0, 1 - 0.0001, "both") > 0


# The recurrence


def test_step_is_detected_when_the_arithmetic_says() -> None:
    """After n zeros, the j-th value c deviates by c n / (n + j)."""
    n, c, delta, threshold = 20, 2.0, 0.5, 6.0
    evidence = np.cumsum([c * n / (n + j) - delta for j in range(1, 30)])
    expected = n + int(np.argmax(evidence > threshold))
    stream = [0.0] * n + [c] * 29
    assert detections(PageHinkley(1, delta, threshold), stream)[0] == expected
    assert detections(PageHinkley(1, delta, threshold, mode="down"), stream) == []


@given(streams)
def test_without_fading_it_is_a_cusum_of_the_deviations(stream: list[float]) -> None:
    ours = PageHinkley(min_instances=1, delta=0.5, threshold=5.0)
    cusum = Cusum(slack=0.5, threshold=5.0)
    for x in stream:
        ours.update(x)
        cusum.update(x - ours.state()["mean"])
        assert ours.upper == pytest.approx(cusum.upper, abs=1e-9)
        assert ours.lower == pytest.approx(cusum.lower, abs=1e-9)
        if ours.detected != cusum.detected:  # a tie, parted by rounding
            assert ours.statistic == pytest.approx(ours.threshold)
            return


def test_detection_shows_its_statistic_and_restarts_at_the_next_update() -> None:
    detector = PageHinkley(min_instances=2)
    assert not detector.update(0.0)
    assert detector.update(40.0)
    assert detector.detected
    assert detector.statistic == 20.0 - DELTA
    assert not detector.update(40.0)
    assert (detector.statistic, detector.state()["n"]) == (0.0, 1)


def test_no_detection_before_min_instances() -> None:
    stream = [0.0] * 3 + [100.0] * 10
    assert detections(PageHinkley(min_instances=8), stream)[0] == 7
    assert PageHinkley().min_instances == 10


@given(streams)
def test_mirrored_stream_detects_at_the_same_places(stream: list[float]) -> None:
    both, mirrored_both = PageHinkley(3, threshold=5.0), PageHinkley(3, threshold=5.0)
    up, mirrored_down = (
        PageHinkley(3, threshold=5.0, mode="up"),
        PageHinkley(3, threshold=5.0, mode="down"),
    )
    for x in stream:
        assert both.update(x) == mirrored_both.update(-x)
        assert (both.upper, both.lower) == (mirrored_both.lower, mirrored_both.upper)
        assert up.update(x) == mirrored_down.update(-x)
        assert up.statistic == mirrored_down.statistic >= 0


@given(st.floats(-5, 5))
def test_constant_offset_changes_nothing_to_speak_of(offset: float) -> None:
    for size in (1.0, 2.0, 5.0):
        plain, moved = PageHinkley(), PageHinkley()
        for x in shifting_stream(size):
            assert plain.update(x) == moved.update(x + offset)


# False alarms and delays


def test_class_detects_where_the_simulation_does() -> None:
    levels = np.repeat([0.0, 1.0], 200)
    x = np.random.default_rng(3).normal(levels, 1.0, (200, 400))
    expected = run_lengths(x, DELTA, THRESHOLD)
    found = [detections(PageHinkley(), [float(v) for v in row]) for row in x]
    assert np.isfinite(expected).sum() > 20
    for first, indices in zip(expected, found, strict=True):
        assert (indices[0] + 1 if indices else None) == (None if np.isnan(first) else first)


def test_false_alarms_are_those_of_a_cusum_of_independent_deviations() -> None:
    """The n-th deviation is N(0, 1 - 1/n), independent of the others; 0.5 and 5 are frequent."""
    interval, error, _ = false_alarm_interval(
        lambda x: run_lengths(x, 0.5, 5.0), 10_000_000, seed=1, length=5_000
    )
    n = np.arange(1, 5_001)
    deviations = np.random.default_rng(2).standard_normal((2_000, 5_000)) * np.sqrt(1 - 1 / n)
    crossed = np.zeros(deviations.shape, dtype=bool)
    for sign in (1, -1):
        walk = np.cumsum(sign * deviations - 0.5, axis=1)
        crossed |= walk - np.minimum.accumulate(walk, axis=1) > 5.0
    crossed &= n >= MIN_INSTANCES
    runs = crossed.argmax(axis=1) + 1.0
    runs[~crossed.any(axis=1)] = len(n)
    assert agree((interval, error), mean_and_error(runs))
    assert interval > 465.4 - 4 * error  # CUSUM's published run length


def test_documented_false_alarm_interval_is_that_of_a_rerun_and_near_siegmunds() -> None:
    interval, error, alarms = false_alarm_interval(
        lambda x: run_lengths(x, DELTA, THRESHOLD), 40_000_000, seed=4
    )
    assert alarms > 20
    assert agree((interval, error), documented(PageHinkley)[0])
    b = THRESHOLD + 1.166
    one_sided = (math.exp(2 * DELTA * b) - 1 - 2 * DELTA * b) / (2 * DELTA**2)
    mean, error = documented(PageHinkley)[0]
    assert mean == pytest.approx(one_sided / 2, abs=0.03 * one_sided / 2 + 4 * error)


@pytest.mark.parametrize("shift", [1, 2, 5])
def test_documented_delays_are_those_of_a_rerun(shift: int) -> None:
    assert agree(
        mean_and_error(delays(shift, 1_000, 4_000, seed=5)), documented(PageHinkley)[shift]
    )


def test_fading_as_in_river_alarms_more_than_fifty_times_as_often() -> None:
    """Why alpha is 1 by default."""
    assert (
        fading_false_alarms(1 - 0.0001, 200, 20_000, seed=6)
        > 50 * 4e6 / documented(PageHinkley)[0][0]
    )
    assert fading_false_alarms(1.0, 200, 20_000, seed=6) < 25


# State


@given(streams, streams, modes)
def test_restored_detector_continues_identically(
    past: list[float], future: list[float], mode: Mode
) -> None:
    ours = PageHinkley(3, threshold=5.0, mode=mode)
    for x in past:
        ours.update(x)
    restored = PageHinkley(3, threshold=5.0, mode=mode)
    restored.restore(json.loads(json.dumps(ours.state(), allow_nan=False)))
    assert (restored.state(), restored.detected) == (ours.state(), ours.detected)
    for x in future:
        assert restored.update(x) == ours.update(x)
        assert restored.state() == ours.state()


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean": math.nan},
        {"n": -1},
        {"n": 1.5},
        {"min_increase": 10.0},
        {"max_decrease": -10.0},
        {"detected": 2},
        {"unknown": 0.0},
    ],
)
def test_impossible_state_is_refused_without_a_change(wrong: dict[str, float]) -> None:
    detector = PageHinkley()
    for x in (0.0, 2.0):
        detector.update(x)
    before = detector.state()
    with pytest.raises(ValueError, match="must"):
        detector.restore({**before, **wrong})
    assert detector.state() == before


@pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf, 1e200])
@pytest.mark.parametrize("last", [2.0, 80.0])
def test_observation_not_finite_is_refused_without_a_change(x: float, last: float) -> None:
    """Also right after a detection, when the update would first restart the test."""
    detector = PageHinkley(min_instances=2)
    for value in (0.0, last):
        detector.update(value)
    before = detector.state()
    with pytest.raises(ValueError, match="finite"):
        detector.update(x)
    assert detector.state() == before


def test_reset_equals_a_new_detector() -> None:
    detector = PageHinkley(min_instances=2)
    for x in (0.0, 80.0):
        detector.update(x)
    detector.reset()
    assert (detector.state(), detector.detected) == (PageHinkley().state(), False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_instances": 0},
        {"delta": -0.1},
        {"delta": math.nan},
        {"threshold": 0.0},
        {"alpha": 0.0},
        {"alpha": 1.1},
        {"mode": "sideways"},
    ],
)
def test_impossible_parameters_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        PageHinkley(**wrong)  # type: ignore[arg-type]
