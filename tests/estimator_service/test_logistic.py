"""The acceptance model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import expit, log_expit

from estimator_service.logistic import MAX_LOG_ODDS, feature, predict, sigmoid, softplus

logits = arrays(np.float64, (3, 8), elements=st.floats(-30, 30))


@given(logits)
def test_feature_is_the_log_odds_of_the_most_likely_token(z: np.ndarray) -> None:
    q = np.exp(z - z.max(axis=1, keepdims=True))
    q /= q.sum(axis=1, keepdims=True)
    top = q.max(axis=1)
    # The complement as a sum, since 1 - top has no digits left where top is nearly 1.
    rest = np.sort(q, axis=1)[:, :-1].sum(axis=1)
    expected = np.clip(np.log(top) - np.log(rest), -MAX_LOG_ODDS, MAX_LOG_ODDS)
    np.testing.assert_allclose(feature(z), expected, atol=1e-9)


@given(logits, st.floats(0.05, 5.0))
def test_temperature_divides_the_logits_and_zero_leaves_them(z: np.ndarray, t: float) -> None:
    temperatures = np.array([t, 0.0, 1.0])
    expected = np.array([feature(z[0] / t), feature(z[1]), feature(z[2])])
    np.testing.assert_allclose(feature(z, temperatures), expected, atol=1e-9)


def test_feature_keeps_its_digits_where_the_drafter_is_nearly_certain() -> None:
    # 1 - q(top) is 1e-13 here; subtracting from 1 would leave three digits.
    np.testing.assert_allclose(feature([30.0, 0.0]), 30.0, rtol=1e-14)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([-np.inf, -np.inf], np.nan),
        ([np.nan, 0.0], np.nan),
        ([np.inf, 0.0], np.nan),
        ([5.0, -np.inf], MAX_LOG_ODDS),
        ([1e24, 0.0], MAX_LOG_ODDS),
        ([0.0] * 3, -np.log(2.0)),
    ],
)
def test_feature_of_a_row_that_says_nothing_is_nan_and_of_a_certain_one_bounded(
    row: list[float], expected: float
) -> None:
    np.testing.assert_allclose(feature(row), expected)


@settings(max_examples=200)
@given(st.floats(-1e6, 1e6))
def test_sigmoid_and_softplus_agree_with_scipy_everywhere(x: float) -> None:
    np.testing.assert_allclose(sigmoid(x), expit(x), rtol=1e-14, atol=0.0)
    np.testing.assert_allclose(softplus(x), -log_expit(-x), rtol=1e-14, atol=1e-15)


def test_predict_broadcasts_positions_over_drafts() -> None:
    p = predict(0.5, [0.0, 1.0], np.zeros((4, 2)))
    assert p.shape == (4, 2)
    np.testing.assert_allclose(p[0], sigmoid([0.0, 1.0]))
