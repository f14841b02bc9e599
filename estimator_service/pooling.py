"""Partial pooling over strata: one slope, one profile of intercepts, and offsets that are earned.

A stratum s of a pair has the effective intercepts alpha_{s,k} = b_k + delta_{s,k}. With the held
quadratics [a, b, c, h0, h1] of each cell (s, k), the fit minimizes

    sum_{s,k} a w^2/2 + b w alpha + c alpha^2/2 - h0 w - h1 alpha
        + rho/2 sum_k (b_k - b_{k-1})^2
        + sum_s tau/2 delta_{s,0}^2 + sigma/2 sum_k (delta_{s,k} - delta_{s,k-1})^2

so a stratum with little evidence uses the pair's intercepts and one with much its own. What sets a
stratum apart does so at every position, so its offsets walk from the level of the first: a stratum
known at shallow positions only is shifted as a whole. Offsets that were independent of each other
gave errors a tenth larger in the trial that `tests/estimator_service/test_pooling.py` repeats.

The walk's covariance is V_ij = 1/tau + min(i, j)/sigma; V = 0 is full pooling. With r = sqrt(c)
and R = (I + r V r)^-1, eliminating a stratum's offsets leaves of its c, b, h1 the parts r R r,
r R b/r, r R h1/r, and takes (b/r)(I - R)(b/r) and (b/r)(I - R)(h1/r) off a and h0. What remains are
the pair's equations in `irls`; the whole is O(S K^3) and K is at most 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimator_service.irls import (
    MAX_INTERCEPT,
    FitResult,
    NormalEquations,
    Outcome,
    SingularSystemError,
    borrowed,
    guarded,
    shrink,
)
from estimator_service.logistic import Array, softplus
from estimator_service.parameters import Parameters, Pins
from estimator_service.sketch import ACCEPTED, COUNT, mean_features
from estimator_service.statistics import N

MIN_PRECISION = 1e-9
"""Least precision of a label: one graded at a probability of 0 or 1 in floating point has none, and
if it went the other way, that must still move something."""


@dataclass(frozen=True)
class Priors:
    """The fit's regularization. Every default is in `config`, except "none at all" here."""

    ridge: float = 1e-3
    """Levenberg ridge on the step (slope and pair intercepts). vLLM uses the same."""
    smoothness: float = 0.0
    """rho: precision of the random walk of b over positions."""
    pooling: float = float("inf")
    """tau: precision of a stratum's offset at position 0."""
    offset_smoothness: float = float("inf")
    """sigma: precision of the random walk of a stratum's offsets over positions."""
    damping: float = 0.0
    """d: labels at which a coefficient takes half of its Newton step."""


def refit(
    quadratics: Array, sketches: Array, current: Parameters, priors: Priors, pins: Pins
) -> FitResult:
    """One damped, guarded Newton step on the held evidence.

    Args:
        quadratics: [S, K, 6], `statistics.Quadratic` sums per stratum.
        sketches: [S, 3, K, BINS], `sketch.Sketch` cells per stratum, of the same labels.
        current: where the step starts; the pins need not be applied to it yet.
        priors: see above.
        pins: kept exactly.
    """
    current = pins.apply(current)
    observations = quadratics[..., N].sum()
    if not observations > 0.0:
        return FitResult(Outcome.NO_EVIDENCE, current)
    try:
        proposed = newton_point(quadratics, current, priors, pins)
    except SingularSystemError:
        return FitResult(Outcome.SINGULAR, current)
    return guarded(current, proposed, Objective(sketches, priors))


def newton_point(quadratics: Array, current: Parameters, priors: Priors, pins: Pins) -> Parameters:
    """Where the damped step ends. Arguments as in `refit`; raises SingularSystemError."""
    if not np.isfinite(quadratics).all():
        raise SingularSystemError("the evidence is not finite")
    a, b, c, h0, h1, n = np.moveaxis(quadratics, -1, 0)
    free = np.isnan(pins.strata)
    held = np.where(free, 0.0, pins.strata)
    # A pinned cell tells the slope what is left once its intercept is known, and nobody else.
    slope_potential = float((h0 - b * held).sum())
    # The floor is a ridge on the step: it pulls to where the cell is, not to zero.
    floored = np.maximum(c, MIN_PRECISION * n)
    h1 = h1 + (floored - c) * current.strata
    c = np.where(free, floored, 0.0)
    root = np.sqrt(c)
    scale = np.divide(1.0, root, out=np.zeros_like(root), where=root > 0.0)
    b, h1 = b * scale * free, h1 * scale * free

    covariance = _offset_covariance(len(current.intercepts), priors)
    kept = np.linalg.inv(np.eye(c.shape[1]) + root[:, :, None] * covariance * root[:, None, :])
    kept_b, kept_h = (kept @ b[:, :, None])[:, :, 0], (kept @ h1[:, :, None])[:, :, 0]
    system = NormalEquations(
        slope_precision=float(a.sum() - (b * (b - kept_b)).sum()),
        coupling=(root * kept_b).sum(axis=0),
        precision=(root[:, :, None] * kept * root[:, None, :]).sum(axis=0),
        slope_potential=slope_potential - float((b * (h1 - kept_h)).sum()),
        potential=(root * kept_h).sum(axis=0),
        observations=(n * free).sum(axis=0),
        slope_observations=float(n.sum()),
    )
    slope, intercepts = system.solve(
        current.slope,
        current.intercepts,
        ridge=priors.ridge,
        smoothness=priors.smoothness,
        damping=priors.damping,
        slope_pin=pins.slope,
        pins=pins.intercepts,
    )

    # delta = V r R (h1/r - b/r w - r b_k), damped by the stratum's own labels: one that falls
    # silent keeps its offsets and moves with the pair.
    rest = (h1 - b * slope - root * intercepts)[:, :, None]
    best = (root * (kept @ rest)[:, :, 0]) @ covariance
    delta = current.strata - current.intercepts
    evidence = borrowed(n * free, priors.offset_smoothness)
    delta = delta + shrink(evidence, priors.damping) * (best - delta)
    strata = np.clip(intercepts + delta, -MAX_INTERCEPT, MAX_INTERCEPT)
    if not np.isfinite(strata).all():
        raise SingularSystemError("the offsets of a stratum have no finite solution")
    return Parameters(slope, intercepts, np.where(free, strata, held))


def _offset_covariance(positions: int, priors: Priors) -> Array:
    """[K, K], V of the module's docstring."""
    k = np.arange(positions)
    walked: Array = np.minimum.outer(k, k) / priors.offset_smoothness
    return 1.0 / priors.pooling + walked


def penalty(at: Parameters, priors: Priors) -> float:
    """The priors' part of the objective, nats in all."""
    steps, offsets = np.diff(at.intercepts), at.strata - at.intercepts
    total = 0.5 * priors.smoothness * float(steps @ steps)
    # Full pooling has infinite precision, and no offsets: nothing to weigh.
    if np.isfinite(priors.pooling):
        total += 0.5 * priors.pooling * float(offsets[:, 0] @ offsets[:, 0])
    if np.isfinite(priors.offset_smoothness):
        total += 0.5 * priors.offset_smoothness * float((np.diff(offsets, axis=1) ** 2).sum())
    return total


class Objective:
    """What a refit lowers: log-loss on the sketch plus the priors, in nats per label."""

    def __init__(self, sketches: Array, priors: Priors) -> None:
        cells = np.moveaxis(sketches, 1, 0)
        self._count, self._accepted = cells[COUNT], cells[ACCEPTED]
        self._features = mean_features(cells)
        self._total = max(float(self._count.sum()), 1.0)
        self._priors = priors

    def __call__(self, at: Parameters) -> float:
        """The objective at `at`."""
        z = at.slope * self._features + at.strata[:, :, None]
        # Not BLAS: for a dot of this length it starts threads, which cost more than they save.
        loss = np.einsum("skb,skb->", self._count, softplus(z))
        loss -= np.einsum("skb,skb->", self._accepted, z)
        return (float(loss) + penalty(at, self._priors)) / self._total
