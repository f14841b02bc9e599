"""Sufficient statistics of a round, and the quadratic that it stands for.

For labels y with features f at draft position k, graded at predictions p = sigmoid(w f + b_k),
with weight v = p (1 - p) and residual r = y - p, a round keeps per position

    a = sum v f^2    b = sum v f    c = sum v    g0 = sum r f    g1 = sum r    n = sum 1

which is the gradient g and the negative Hessian H of the log-likelihood in theta = [w, b_0..b_K-1]:

    H = | sum_k a_k   b^T     |        g = | sum_k g0_k |
        | b           diag(c) |            | g1         |

Gradients add only where they were taken at the same theta. So what is merged over versions is the
log-likelihood's second-order expansion itself, in its canonical form: precision L = H and
potential h = H theta + g, whose maximum is the Newton point. Canonical forms add, whatever theta
each of them was expanded around. Sums only, never means: `merge` is associative and commutative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from estimator_service.logistic import MAX_LOG_ODDS, Array

WIDTH = 6
"""Columns per position."""
A, B, C, G0, G1, N = range(WIDTH)


@dataclass(frozen=True, eq=False)
class _Sums:
    sums: Array
    """[K, 6], float64."""

    @classmethod
    def empty(cls, positions: int) -> Self:
        """The identity of `merge` for a pair with K = `positions`."""
        return cls(np.zeros((positions, WIDTH)))

    @property
    def positions(self) -> int:
        """K."""
        return len(self.sums)

    @property
    def observations(self) -> Array:
        """[K], labels per position."""
        return self.sums[:, N]

    def merge(self, other: Self) -> Self:
        """The sum of both. Raises ValueError if they have different K."""
        if self.positions != other.positions:
            raise ValueError(f"cannot merge K={self.positions} with K={other.positions}")
        return type(self)(self.sums + other.sums)

    def scale(self, factor: float) -> Self:
        """Every sum times `factor`: discounted, or capped, evidence."""
        return type(self)(self.sums * factor)


@dataclass(frozen=True, eq=False)
class Statistics(_Sums):
    """One round's sums [a, b, c, g0, g1, n] per position, all graded at the same coefficients."""

    @classmethod
    def of(
        cls,
        positions: int,
        position: ArrayLike,
        features: ArrayLike,
        accepted: ArrayLike,
        predictions: ArrayLike,
    ) -> Self:
        """Statistics of M labels.

        Args:
            positions: K.
            position: [M], ints in 0..K-1.
            features: [M], clamped to +-MAX_LOG_ODDS; a non-finite one leaves its label out.
            accepted: [M], 1 or 0.
            predictions: [M], the probabilities in force when the labels were made; a label whose
                prediction is not a probability is left out.

        Raises:
            ValueError: a position outside 0..K-1.

        >>> Statistics.of(2, [0, 1], [2.0, np.nan], [1, 1], [0.5, 0.5]).sums.tolist()
        [[1.0, 0.5, 0.25, 1.0, 0.5, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
        """
        k = np.asarray(position, dtype=np.intp)
        f = np.asarray(features, dtype=np.float64)
        p = np.asarray(predictions, dtype=np.float64)
        y = np.asarray(accepted, dtype=np.float64)
        known = np.isfinite(f) & (p >= 0.0) & (p <= 1.0)
        if k.size and not (k.min() >= 0 and k.max() < positions):
            raise ValueError(f"positions must be in 0..{positions - 1}, got {k.min()}..{k.max()}")
        k, p, y = k[known], p[known], y[known]
        f = np.clip(f[known], -MAX_LOG_ODDS, MAX_LOG_ODDS)
        v, r = p * (1.0 - p), y - p
        columns = (v * f * f, v * f, v, r * f, r, np.ones_like(p))
        sums = [np.bincount(k, x, positions) for x in columns]
        return cls(np.stack(sums, axis=1).astype(np.float64))


@dataclass(frozen=True, eq=False)
class Quadratic(_Sums):
    """Canonical form of rounds graded under any versions: [a, b, c, h0, h1, n] per position.

    h0 and h1 are the potential's slope part (summed over positions by the solver) and intercept
    part.
    """

    @classmethod
    def of(cls, statistics: Statistics, slope: float, intercepts: ArrayLike) -> Self:
        """The quadratic of a round that was graded at `slope` and `intercepts` [K].

        >>> round_ = Statistics.of(1, [0, 0], [1.0, 2.0], [1, 0], [0.5, 0.5])
        >>> Quadratic.of(round_, slope=0.0, intercepts=[0.0]).sums[0, 3:5].tolist()
        [-0.5, 0.0]
        """
        sums = statistics.sums.copy()
        at = np.asarray(intercepts, dtype=np.float64)
        sums[:, G0 : G1 + 1] += hessian_times(sums, slope, at)
        return cls(sums)

    def gradient(self, slope: float, intercepts: Array) -> tuple[float, Array]:
        """Of the held log-likelihood at other coefficients: d/dslope, and d/dintercepts [K]."""
        a, b, c, h0, h1, _ = self.sums.T
        return float(np.sum(h0 - a * slope - b * intercepts)), h1 - b * slope - c * intercepts


def hessian_times(sums: Array, slope: float, intercepts: Array) -> Array:
    """[K, 2]: per position, the slope and intercept parts of H theta.

    Added to a round's gradients g they make its potentials, h = H theta + g.

    Args:
        sums: [K, 6], a round's.
        slope: of the version that graded it.
        intercepts: [K], likewise.
    """
    product: Array = sums[:, A : B + 1] * slope + sums[:, B : C + 1] * intercepts[:, None]
    return product
