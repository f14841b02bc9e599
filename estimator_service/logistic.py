"""The acceptance model: a logistic regression on the drafter's log-odds.

    f   = clamp(z_m - logsumexp_{x != m} z_x, +-40)      m = argmax z
    p_k = sigmoid(slope * f + intercept_k)

z are the draft logits after temperature scaling (temperature 0: unscaled), k is the draft
position. The feature scores the draft *distribution*, never the token drawn from it: trimming by
the drawn token's probability would bias the emitted text.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

MAX_LOG_ODDS = 40.0
"""The feature's bound, in logits. A row with all its mass on one token would be infinite."""

INITIAL_SLOPE = 0.5
INITIAL_INTERCEPT = -0.2
"""Cold start, as in vLLM: the median of what was fitted online over several large pairs."""


def feature(logits: ArrayLike, temperature: ArrayLike = 0.0) -> Array:
    """Log-odds of the most likely token of each row.

    Args:
        logits: [..., V], draft logits before temperature; padding columns hold -inf.
        temperature: broadcastable to [...]; 0 leaves the logits unscaled.

    Returns:
        [...], within +-MAX_LOG_ODDS. NaN where a row has no finite maximum (all -inf, a NaN, or
        +inf): such a row says nothing, and `Statistics.of` and `Sketch.of` leave it out.

    >>> feature([[0.0, 0.0], [3.0, -np.inf], [2.0, 0.0]])
    array([ 0., 40.,  2.])
    """
    z = np.asarray(logits, dtype=np.float64)
    scale = np.asarray(temperature, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        z = z / np.where(scale > 0.0, scale, 1.0)[..., None]
        best = np.argmax(z, axis=-1)[..., None]
        top = np.take_along_axis(z, best, axis=-1)
        odds = np.exp(z - top)
        # Leaving the maximum out, rather than subtracting 1 from the whole sum, keeps every
        # digit of a confident row: exp(-f) may be far below the rounding of 1.
        np.put_along_axis(odds, best, 0.0, axis=-1)
        f = 0.0 - np.log(odds.sum(axis=-1))
    f = np.clip(f, -MAX_LOG_ODDS, MAX_LOG_ODDS)
    return np.where(np.isfinite(top[..., 0]), f, np.nan)


def sigmoid(x: ArrayLike) -> Array:
    """1 / (1 + exp(-x)), without overflow.

    >>> sigmoid([-1000.0, 0.0, 1000.0])
    array([0. , 0.5, 1. ])
    """
    x = np.asarray(x, dtype=np.float64)
    # exp of a non-positive number only: it cannot overflow, and numpy vectorizes it.
    e = np.exp(-np.abs(x))
    p: Array = np.where(x >= 0.0, 1.0, e) / (1.0 + e)
    return p


def softplus(x: ArrayLike) -> Array:
    """log(1 + exp(x)), without overflow; exact to 1e-16 absolute.

    >>> softplus([-1000.0, 1000.0])
    array([   0., 1000.])
    """
    x = np.asarray(x, dtype=np.float64)
    y: Array = np.maximum(x, 0.0) + np.log(1.0 + np.exp(-np.abs(x)))
    return y


def predict(slope: float, intercepts: ArrayLike, features: ArrayLike) -> Array:
    """Acceptance probabilities, `sigmoid(slope * features + intercepts)`, broadcast."""
    return sigmoid(slope * np.asarray(features, dtype=np.float64) + np.asarray(intercepts))
