"""What we estimate on the host is what vLLM estimates on the device.

`vllm_kernels` runs vLLM's own kernels under Triton's interpreter, in a process of its own, and
records what went in and what came out. Here our float64 code replays the record.

vLLM computes in float32. Tolerances are two to four times the largest deviation found with seeds
0 to 4, and each follows from a rounding named beside it. Where vLLM departs from us by more than
rounding, and not by accident, a test pins both answers.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from estimator_service.logistic import (
    INITIAL_INTERCEPT,
    INITIAL_SLOPE,
    MAX_LOG_ODDS,
    Array,
    feature,
    predict,
)
from estimator_service.parameters import Parameters, Pins
from estimator_service.pooling import Priors, newton_point
from estimator_service.statistics import G0, G1, A, B, C, N, Quadratic, Statistics

Record = dict[str, npt.NDArray[Any]]

ROOT = Path(__file__).resolve().parents[2]
FITTED = ("interval", "serial", "parallel", "wide")
SCENARIOS = (*FITTED, "inverted")
PRIORS = Priors(ridge=1e-3, damping=50.0)

pytestmark = pytest.mark.slow


# --- Ours, in the shapes of the record. ---


def features_of(run: Record) -> Array:
    """[T, L, K], from the logits of the live rows."""
    live = run["num_sampled"].shape[1]
    logits = run["logits"][:, :, :live].transpose(0, 2, 1, 3)
    return feature(logits, run["temperature"][slots_of(run)][:, :, None])


def predictions_of(run: Record, features: npt.NDArray[Any]) -> Array:
    """[T, L, K], from features [T, L, K] and the coefficients in force at each step."""
    return np.stack(
        [predict(*their(run, r), f) for r, f in zip(round_of(run), features, strict=True)]
    )


def statistics_of(
    run: Record, step: int, features: npt.NDArray[Any], predictions: npt.NDArray[Any]
) -> Statistics:
    """A step's sums, from its counts and the features and predictions [T, L, K]."""
    positions = features.shape[2]
    position = np.arange(positions)
    accepted = np.maximum(run["num_sampled"][step] - 1, 0)[:, None]
    admitted = accepted + run["num_rejected"][step][:, None]
    row, k = np.nonzero((position <= accepted) & (position < admitted))
    label = k < accepted[row, 0]
    f, p = features[step, row, k], predictions[step, row, k]
    return Statistics.of(positions, k, f, label, p)


def refit_of(
    statistics: Statistics, slope: float, intercepts: Array, slope_pin: float = float("nan")
) -> tuple[float, Array]:
    """One damped Newton step without what vLLM does not have: strata and random walk."""
    start = Parameters(slope, intercepts, intercepts[None])
    pins = Pins.none(1, len(intercepts))
    pins = Pins(slope_pin, pins.intercepts, pins.strata)
    quadratic = Quadratic.of(statistics, slope, intercepts)
    end = newton_point(quadratic.sums[None], start, PRIORS, pins)
    return end.slope, end.intercepts


# --- The record. ---


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    for package in ("triton", "vllm"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp("vllm_kernels")
    out, log = folder / "record.npz", folder / "log"
    # numpy warns, in the interpreter, of log(0) that the kernels expect: no -W error there.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    command = [sys.executable, "-m", "tests.estimator_service.vllm_kernels", str(out)]
    try:
        with log.open("wb") as file:
            subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=240,
                check=True,
            )
    except subprocess.SubprocessError as error:
        pytest.fail(f"{error}\n{log.read_text()}")
    with np.load(out) as file:
        return {name: file[name] for name in file.files}


def part(record: Record, name: str) -> Record:
    return {k.removeprefix(f"{name}/"): v for k, v in record.items() if k.startswith(f"{name}/")}


@pytest.fixture(params=SCENARIOS)
def run(record: Record, request: pytest.FixtureRequest) -> Record:
    return part(record, request.param)


def slots_of(run: Record) -> npt.NDArray[Any]:
    """[T, L], the slots of the live rows."""
    slots: npt.NDArray[Any] = run["idx_mapping"][:, : run["num_sampled"].shape[1]]
    return slots


def live(run: Record, name: str) -> npt.NDArray[Any]:
    """[T, L, K] of an array by slot."""
    values: npt.NDArray[Any] = np.take_along_axis(run[name], slots_of(run)[:, :, None], axis=1)
    return values


def round_of(run: Record) -> npt.NDArray[Any]:
    """[T], the round of each step: also the index of the coefficients it predicted with."""
    steps = np.arange(len(run["logits"]))
    return np.searchsorted(run["round_ends"], steps, side="right")


def recorded_statistics(run: Record, step: int) -> Statistics:
    """Their sums since the last refit, as they were after `step`."""
    sums = np.empty((run["info"].shape[1], 6))
    sums[:, [A, B, C]] = run["info"][step]
    sums[:, [G0, G1]] = run["grad"][step]
    sums[:, N] = run["counts"][step]
    return Statistics(sums)


# --- What the record holds. ---


def test_constants_are_still_those_of_vllm(record: Record) -> None:
    assert record["l2"] == PRIORS.ridge
    assert record["damping"] == PRIORS.damping
    assert record["interval"] == 100
    for name in SCENARIOS:
        run = part(record, name)
        assert run["slope"][0] == np.float32(INITIAL_SLOPE)
        assert (run["intercepts"][0] == np.float32(INITIAL_INTERCEPT)).all()


def test_record_covers_what_can_happen(record: Record) -> None:
    for name in FITTED:
        run = part(record, name)
        sampled, rejected = run["num_sampled"], run["num_rejected"]
        assert ((sampled == 1) & (rejected == 0)).any(), "a request without drafts"
        assert ((sampled == 8) & (rejected == 0)).any(), "a whole draft accepted"
        assert ((sampled > 1) & (rejected > 0)).any(), "a draft cut short"
        assert (sampled == 0).any(), "a request in its prefill"
        assert (live(run, "features") == MAX_LOG_ODDS).any(), "a saturated row"
    counts = part(record, "serial")["counts"][part(record, "serial")["round_ends"] - 1]
    assert (counts[0, 3:] == 0).all()
    assert (counts[1, 3:] > 0).all(), "positions without labels at first"
    assert [bool(part(record, name)["parallel"]) for name in FITTED] == [False, False, True, False]


# --- Drafting. ---


def assert_same_features(theirs: npt.NDArray[Any], ours: Array) -> None:
    """Compare the odds exp(-f), which the kernel takes as a sum of exponentials, minus the top 1.

    Found: 9e-7 relative where f < 0, from rounding scaled logits, exponentials and their sum, and
    9e-7 absolute elsewhere: a confident row's small exponentials are added to 1, where float32 has
    steps of 1.2e-7, and the digits that this loses "minus 1" does not bring back.
    """
    np.testing.assert_allclose(
        np.exp(-theirs.astype(np.float64)), np.exp(-ours), rtol=3e-6, atol=2e-6
    )


def test_features(run: Record) -> None:
    assert_same_features(live(run, "features"), features_of(run))


def test_predictions(run: Record) -> None:
    theirs = live(run, "predictions")
    # Found: 9.3e-8, the rounding of a float32 near 1.
    ours = predictions_of(run, live(run, "features"))
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=3e-7)
    # From the logits on, found: 1.3e-5 below a feature of 8, and 8.1e-5 above, where the loss of
    # digits described above tells: odds of e^-11 are uncertain by 1%.
    features = features_of(run)
    error = np.abs(theirs - predictions_of(run, features))
    assert error[features < 8].max() < 4e-5
    assert error.max() < 2.5e-4


def test_confidences_are_the_predictions_by_batch_row(run: Record) -> None:
    count = slots_of(run).shape[1]
    np.testing.assert_array_equal(run["confidence"][:, :count], live(run, "predictions"))


def test_padded_rows_write_nothing(record: Record) -> None:
    for name in SCENARIOS:
        run = part(record, name)
        padded = run["idx_mapping"] < 0
        assert (run["confidence"][padded] == record["sentinel"]).all()
        # Where an unchecked slot of −1 would have been written.
        assert (run["guard_features"] == record["sentinel"]).all()
        assert (run["guard_predictions"] == record["sentinel"]).all()
        # Slots that had no row in a step keep what they had.
        for values in (run["features"], run["predictions"]):
            before = np.concatenate([np.zeros_like(values[:1]), values[:-1]])
            for step, slots in enumerate(slots_of(run)):
                others = np.setdiff1d(np.arange(values.shape[1]), slots)
                np.testing.assert_array_equal(values[step, others], before[step, others])
    assert (part(record, "parallel")["idx_mapping"] < 0).any()
    assert (part(record, "serial")["idx_mapping"] < 0).any()


DIFFERENT = {
    # The complement of 1 in float32 is 0 or at least 2^-23: no feature between 15.94 and 40.
    "feature 20": (20.0, 40.0),
    # A row that says nothing: vLLM is certain of it, we leave it out. (No GPU was asked. It is
    # what `max.f32` does with NaN; Triton's interpreter by itself would give NaN.)
    "all -inf": (np.nan, 40.0),
}


def test_edge_rows(record: Record) -> None:
    edge = part(record, "edge")
    ours = feature(edge["logits"], edge["temperature"])
    theirs = edge["features"]
    pinned = np.array([DIFFERENT.get(name, (0.0, 0.0)) for name in edge["names"]])
    different = np.isin(edge["names"], list(DIFFERENT))
    assert different.sum() == len(DIFFERENT)
    np.testing.assert_allclose(ours[different], pinned[different, 0], atol=1e-5)
    np.testing.assert_array_equal(theirs[different], pinned[different, 1])
    assert_same_features(theirs[~different], ours[~different])

    at = dict(zip(edge["names"], theirs, strict=True))
    assert at["only one token"] == at["saturated"] == at["temperature 1e-6"] == MAX_LOG_ODDS
    assert at["two tied"] == 0
    assert at["flat"] == pytest.approx(-np.log(4999), abs=1e-5)
    expected = predict(INITIAL_SLOPE, INITIAL_INTERCEPT, theirs)
    np.testing.assert_allclose(edge["predictions"], expected, rtol=0, atol=3e-7)


# --- Learning. ---


def test_sums(run: Record) -> None:
    features, predictions = live(run, "features"), live(run, "predictions")
    rounds = round_of(run)
    held = Statistics.empty(features.shape[2])
    for step in range(len(rounds)):
        if step and rounds[step] != rounds[step - 1]:
            held = Statistics.empty(held.positions)
        held = held.merge(statistics_of(run, step, features, predictions))
        theirs = recorded_statistics(run, step).sums
        np.testing.assert_array_equal(theirs[:, N], held.observations)
        # Found: 1.0e-6 of 1 + |sum|: up to 99 float32 additions, of terms that may cancel.
        np.testing.assert_allclose(theirs, held.sums, rtol=3e-6, atol=3e-6)


def test_refits_from_their_sums(record: Record) -> None:
    for name in FITTED:
        run = part(record, name)
        for index, end in enumerate(run["round_ends"]):
            slope, intercepts = refit_of(recorded_statistics(run, end - 1), *their(run, index))
            # Found: 6e-8 and 1.1e-7, a rounding of the result.
            assert_same_coefficients(slope, intercepts, *their(run, index + 1), atol=4e-7)


def test_refits_from_the_logits(record: Record) -> None:
    for name in FITTED:
        run = part(record, name)
        features = features_of(run)
        rounds = round_of(run)
        slope, intercepts = INITIAL_SLOPE, np.full(features.shape[2], INITIAL_INTERCEPT)
        for index in range(len(run["round_ends"])):
            predictions = predict(slope, intercepts, features)
            held = Statistics.empty(len(intercepts))
            for step in np.flatnonzero(rounds == index):
                held = held.merge(statistics_of(run, step, features, predictions))
            slope, intercepts = refit_of(held, slope, intercepts)
            # Found: 7.1e-6 and 7.2e-6, from the digits that confident rows lose.
            assert_same_coefficients(slope, intercepts, *their(run, index + 1), atol=3e-5)


def test_negative_slope_is_refused_by_them_and_stops_at_zero_with_us(record: Record) -> None:
    run = part(record, "inverted")
    for index, end in enumerate(run["round_ends"]):
        statistics = recorded_statistics(run, end - 1)
        slope, intercepts = their(run, index)
        their_slope, their_intercepts = their(run, index + 1)
        assert their_slope == slope > 0
        assert refit_of(statistics, slope, intercepts)[0] == 0
        # With their slope, the intercepts are theirs. Found: 2.0e-7.
        ours = refit_of(statistics, slope, intercepts, slope_pin=slope)
        assert_same_coefficients(*ours, their_slope, their_intercepts, atol=6e-7)


def their(run: Record, refits: int) -> tuple[float, Array]:
    """Their coefficients after so many refits."""
    return float(run["slope"][refits]), run["intercepts"][refits].astype(np.float64)


def assert_same_coefficients(
    slope: float, intercepts: Array, their_slope: float, their_intercepts: Array, atol: float
) -> None:
    np.testing.assert_allclose(slope, their_slope, rtol=0, atol=atol)
    np.testing.assert_allclose(intercepts, their_intercepts, rtol=0, atol=atol)
