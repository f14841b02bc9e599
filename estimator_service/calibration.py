"""How well predicted acceptance probabilities agree with what was accepted.

Works on weighted points, so that raw labels (count 1 each) and a sketch's cells (many labels at
nearly one probability) are judged by the same code.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from estimator_service.logistic import Array

ECE_BINS = 15
"""Equal-width probability bins, as in Guo et al., 2017 (arXiv:1706.04599)."""


@dataclass(frozen=True)
class Calibration:
    """Scores of one set of predictions. All means are per label; NaN where nothing says anything.

    `auc` is NaN unless both accepted and rejected labels are there.
    """

    observations: float
    log_loss: float
    """Mean negative log-likelihood, nats."""
    brier: float
    ece: float
    """Expected calibration error over ECE_BINS bins."""
    auc: float
    """Probability that an accepted label was predicted above a rejected one; ties count half."""
    observed: float
    """Share of labels accepted."""
    predicted: float
    """Mean predicted probability."""


@dataclass(frozen=True)
class ReliabilityBin:
    """One bar of a reliability diagram: labels whose prediction fell between two edges."""

    lower: float
    upper: float
    observations: float
    predicted: float
    observed: float


def calibrate(
    probability: ArrayLike, count: ArrayLike = 1.0, *, accepted: ArrayLike
) -> Calibration:
    """Score predictions.

    Args:
        probability: [M], predicted, each in [0, 1].
        count: [M] or scalar, labels at each point; a point without labels has no say.
        accepted: [M], how many of them were accepted.

    >>> calibrate([0.8, 0.8, 0.8, 0.8, 0.8], accepted=[1, 1, 1, 1, 0]).ece < 1e-12
    True
    """
    p, n, y = _points(probability, count, accepted)
    total = n.sum()
    if total <= 0.0:
        nan = float("nan")
        return Calibration(0.0, nan, nan, nan, nan, nan, nan)
    # A prediction of exactly 0 or 1 that was wrong costs the log-loss of the smallest float.
    tiny = np.finfo(np.float64).tiny
    log_p, log_q = np.log(np.maximum(p, tiny)), np.log(np.maximum(1.0 - p, tiny))
    bars = _bin_sums(p, n, y)
    return Calibration(
        observations=float(total),
        log_loss=float(-(y @ log_p + (n - y) @ log_q) / total),
        brier=float((y @ (1.0 - p) ** 2 + (n - y) @ p**2) / total),
        ece=float(np.abs(bars[2] - bars[1]).sum() / total),
        auc=_auc(p, n, y),
        observed=float(y.sum() / total),
        predicted=float(n @ p / total),
    )


def reliability(
    probability: ArrayLike, count: ArrayLike = 1.0, *, accepted: ArrayLike
) -> list[ReliabilityBin]:
    """The reliability diagram's bars, empty ones left out. Arguments as in `calibrate`."""
    count_sum, predicted_sum, accepted_sum = _bin_sums(*_points(probability, count, accepted))
    return [
        ReliabilityBin(i / ECE_BINS, (i + 1) / ECE_BINS, float(m), float(q / m), float(a / m))
        for i, (m, q, a) in enumerate(zip(count_sum, predicted_sum, accepted_sum, strict=True))
        if m > 0.0
    ]


def _points(p: ArrayLike, n: ArrayLike, y: ArrayLike) -> tuple[Array, Array, Array]:
    p, n, y = np.broadcast_arrays(p, n, y)
    p, n, y = (np.ravel(x).astype(np.float64) for x in (p, n, y))
    live = n > 0.0
    return p[live], n[live], y[live]


def _bin_sums(p: Array, n: Array, y: Array) -> Array:
    """[3, ECE_BINS]: labels, sum of predictions, accepted."""
    which = np.minimum((p * ECE_BINS).astype(np.intp), ECE_BINS - 1)
    return np.stack([np.bincount(which, x, ECE_BINS) for x in (n, n * p, y)])


def _auc(p: Array, n: Array, y: Array) -> float:
    """Mann-Whitney, with labels of equal probability counted half."""
    _, tied = np.unique(p, return_inverse=True)
    positive, negative = np.bincount(tied, y), np.bincount(tied, n - y)
    pairs = positive.sum() * negative.sum()
    if pairs <= 0.0:
        return float("nan")
    below = np.cumsum(negative) - negative
    return float(positive @ (below + 0.5 * negative) / pairs)
