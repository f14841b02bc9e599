"""The sketch: what it says of any coefficients, against the labels themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator_service.calibration import calibrate
from estimator_service.logistic import Array, predict
from estimator_service.sketch import BINS, EDGES, Sketch, SketchFormatError, mean_features
from tests.estimator_service.fleet import Labels, Truth

TRUTH = Truth(0.6, (0.9, 0.5, 0.2, 0.0, -0.2, -0.5, -0.8))
K = TRUTH.positions


def sketch_of(labels: Labels) -> Sketch:
    return Sketch.of(K, labels.position, labels.features, labels.accepted)


def real_features(rng: np.random.Generator, count: int) -> Array:
    """Skewed, with a share of saturated rows, as drafters' are."""
    f = np.exp(rng.normal(0.6, 0.9, count)) - 2.0 + rng.normal(0.0, 0.5, count)
    return np.where(rng.random(count) < 0.05, 40.0, np.clip(f, -40.0, 40.0))


@pytest.mark.parametrize(
    ("slope", "shift"),
    [(0.6, 0.0), (0.5, -0.2), (1.2, 1.0), (0.05, -1.0), (0.6, -5.0), (3.0, 0.0)],
    ids=["in_force", "initial", "steep", "flat", "pessimistic", "very_steep"],
)
def test_scores_from_the_sketch_are_within_two_thousandths_of_the_labels(
    slope: float, shift: float
) -> None:
    rng = np.random.default_rng(11)
    count = 200_000
    k, f = rng.integers(0, K, count), real_features(rng, count)
    y = (rng.random(count) < predict(0.6, np.array(TRUTH.intercepts)[k], f)).astype(float)
    sketch = Sketch.of(K, k, f, y)
    intercepts = np.array(TRUTH.intercepts) + shift
    exact = calibrate(predict(slope, intercepts[k], f), accepted=y)
    ours = sketch.calibration(slope, intercepts)
    for name in ("log_loss", "brier", "ece", "auc", "observed", "predicted"):
        difference = getattr(ours, name) - getattr(exact, name)
        print(f"{name}: {getattr(exact, name):.4f}, sketch {difference:+.5f}")
        assert abs(difference) < 0.002, name
    assert ours.observations == count


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6))
def test_merging_sketches_is_sketching_the_union_to_the_bit(seeds: list[int]) -> None:
    parts = [TRUTH.drafts(np.random.default_rng(seed), 30) for seed in seeds]
    union = Labels(*(np.concatenate(x) for x in zip(*map(columns, parts), strict=True)))
    merged = Sketch.empty(K)
    for part in parts:
        merged = merged.merge(sketch_of(part))
    np.testing.assert_array_equal(merged.cells, sketch_of(union).cells)
    backwards = Sketch.empty(K)
    for part in reversed(parts):
        backwards = sketch_of(part).merge(backwards)
    np.testing.assert_array_equal(merged.cells, backwards.cells)


def columns(labels: Labels) -> tuple[Array, Array, Array]:
    return labels.position, labels.features, labels.accepted


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(0, 400), st.sampled_from([1, 300, 70_000, 2_000_000]))
def test_packing_loses_nothing(seed: int, count: int, weight: int) -> None:
    rng = np.random.default_rng(seed)
    sketch = Sketch.of(
        K, rng.integers(0, K, count), rng.normal(1, 4, count), rng.integers(0, 2, count)
    )
    heavy = Sketch(sketch.cells * weight)
    if heavy.cells.max(initial=0) > 2**32 - 1:
        with pytest.raises(OverflowError, match="above"):
            heavy.pack()
    else:
        np.testing.assert_array_equal(Sketch.unpack(K, heavy.pack()).cells, heavy.cells)


@given(st.binary(max_size=400))
def test_bytes_that_pack_cannot_have_made_are_refused(data: bytes) -> None:
    try:
        sketch = Sketch.unpack(K, data)
    except SketchFormatError:
        return
    # What is let through is a sketch: it packs, and no cell accepts more than it counts.
    assert (sketch.cells[1] <= sketch.cells[0]).all()
    np.testing.assert_array_equal(Sketch.unpack(K, sketch.pack()).cells, sketch.cells)


def test_the_mean_feature_of_a_cell_is_that_of_its_labels() -> None:
    f = np.array([0.30, 0.31, 0.45, 39.0, 40.0, -40.0])
    sketch = Sketch.of(1, np.zeros(6), f, np.ones(6))
    at = mean_features(sketch.cells)[0]
    for low, high, inside in ((0.25, 0.5, f[:3]), (20.0, 40.0, f[3:5]), (-40.0, -12.0, f[5:])):
        cell = int(np.flatnonzero((EDGES[:-1] == low) & (EDGES[1:] == high))[0])
        assert sketch.cells[0, 0, cell] == len(inside)
        assert abs(at[cell] - inside.mean()) <= 1 / 128


def test_a_label_without_a_finite_feature_is_left_out_and_a_huge_one_is_bounded() -> None:
    f = [np.nan, np.inf, -np.inf, 1e24, -1e24]
    sketch = Sketch.of(1, [0] * 5, f, [1] * 5)
    assert sketch.observations.tolist() == [2.0]
    assert np.isfinite(sketch.cells).all()
    assert sketch.cells[0, 0, [0, BINS - 1]].tolist() == [1.0, 1.0]


def test_expected_accepted_length_is_what_verifying_the_prefix_accepts() -> None:
    rng = np.random.default_rng(12)
    whole = TRUTH.drafts(rng, 40_000)
    expected = sketch_of(whole).expected_accepted_length(0.6, TRUTH.intercepts)
    for length in range(1, K + 1):
        verified = TRUTH.drafts(rng, 40_000, length)
        assert abs(verified.accepted.sum() / 40_000 - expected[length - 1]) < 0.02


def test_expected_accepted_length_is_unknown_from_the_first_position_without_labels() -> None:
    labels = TRUTH.drafts(np.random.default_rng(13), 100, 2)
    expected = sketch_of(labels).expected_accepted_length(0.6, TRUTH.intercepts)
    assert np.isfinite(expected[:2]).all()
    assert np.isnan(expected[2:]).all()


def test_merging_another_number_of_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="K=3 with K=7"):
        Sketch.empty(3).merge(Sketch.empty(7))
