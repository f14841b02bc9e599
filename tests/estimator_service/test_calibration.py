"""Scores of predictions, against scikit-learn's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from estimator_service.calibration import ECE_BINS, calibrate, reliability


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(2, 300), st.booleans())
def test_scores_equal_scikit_learn_s(seed: int, count: int, tied: bool) -> None:
    rng = np.random.default_rng(seed)
    p = rng.random(count)
    p = np.round(p, 1) * 0.98 + 0.01 if tied else p
    y = rng.integers(0, 2, count).astype(float)
    y[:2] = [0.0, 1.0]
    ours = calibrate(p, accepted=y)
    np.testing.assert_allclose(ours.log_loss, log_loss(y, p), rtol=1e-9)
    np.testing.assert_allclose(ours.brier, brier_score_loss(y, p), rtol=1e-9)
    np.testing.assert_allclose(ours.auc, roc_auc_score(y, p), rtol=1e-9)
    np.testing.assert_allclose([ours.observed, ours.predicted], [y.mean(), p.mean()])


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_weighted_points_score_like_the_labels_they_stand_for(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.random(20)
    n = rng.integers(0, 9, 20)
    y = rng.integers(0, n + 1)
    expanded_p = np.repeat(p, n)
    expanded_y = np.concatenate(
        [np.r_[np.ones(a), np.zeros(b - a)] for a, b in zip(y, n, strict=True)]
    )
    left, right = calibrate(p, n, accepted=y), calibrate(expanded_p, accepted=expanded_y)
    for name in ("observations", "log_loss", "brier", "ece", "auc", "observed", "predicted"):
        np.testing.assert_allclose(getattr(left, name), getattr(right, name), rtol=1e-9, atol=1e-12)


def test_ece_is_the_labels_share_times_the_gap_of_each_bin() -> None:
    p = np.r_[np.full(30, 0.9), np.full(10, 0.3)]
    y = np.r_[np.ones(21), np.zeros(9), np.ones(5), np.zeros(5)]
    np.testing.assert_allclose(calibrate(p, accepted=y).ece, (30 * 0.2 + 10 * 0.2) / 40)


def test_without_labels_every_score_is_nan() -> None:
    scores = calibrate([], accepted=[])
    assert scores.observations == 0.0
    assert np.isnan([scores.log_loss, scores.brier, scores.ece, scores.auc]).all()


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_auc_needs_both_kinds_of_labels(label: float) -> None:
    scores = calibrate([0.2, 0.9], accepted=[label, label])
    assert np.isnan(scores.auc)
    assert np.isfinite(scores.log_loss)


def test_a_certain_prediction_that_fails_costs_much_and_stays_finite() -> None:
    scores = calibrate([0.0, 1.0], accepted=[1.0, 0.0])
    assert 700.0 < scores.log_loss < 750.0
    assert scores.brier == 1.0


def test_the_reliability_diagram_has_a_bar_for_each_bin_with_labels() -> None:
    bars = reliability([0.0, 0.01, 0.99, 1.0], accepted=[0, 0, 1, 1])
    assert [(b.lower, b.upper) for b in bars] == [(0.0, 1 / ECE_BINS), (14 / ECE_BINS, 1.0)]
    assert [(b.observations, b.observed) for b in bars] == [(2.0, 0.0), (2.0, 1.0)]
