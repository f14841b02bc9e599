"""Partial pooling over strata: one slope, one profile of intercepts, and offsets that are earned.

A stratum s of a pair has the effective intercepts alpha_{s,k} = b_k + delta_{s,k}. With the held
quadratics [a, b, c, h0, h1] of each cell (s, k), the fit minimizes

    sum_{s,k} a w^2/2 + b w alpha + c alpha^2/2 - h0 w - h1 alpha
        + rho/2 sum_k (b_k - b_{k-1})^2 + tau/2 sum_{s,k} delta_{s,k}^2

so a stratum with little evidence uses the pair's intercepts and one with much its own. Each delta
appears in one cell only: eliminating it multiplies the cell's b, c, h1 by tau / (c + tau) and takes
b^2 / (c + tau) and b h1 / (c + tau) off a and h0. What is left is the bordered tridiagonal system
of `irls`; the whole is O(S K). tau = inf is full pooling.
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
    guarded,
    shrink,
)
from estimator_service.logistic import Array, softplus
from estimator_service.parameters import Parameters, Pins
from estimator_service.sketch import ACCEPTED, COUNT, mean_features
from estimator_service.statistics import N


@dataclass(frozen=True)
class Priors:
    """The fit's regularization. Every default is in `config`, except "none at all" here."""

    ridge: float = 1e-3
    """Levenberg ridge on the step (slope and pair intercepts). vLLM uses the same."""
    smoothness: float = 0.0
    """rho: precision of the random walk of b over positions."""
    pooling: float = float("inf")
    """tau: precision of a stratum's offsets around zero."""
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
    a, b, c, h0, h1, n = np.moveaxis(quadratics, -1, 0)
    free = np.isnan(pins.strata)
    held = np.where(free, 0.0, pins.strata)
    tau = priors.pooling
    if np.isinf(tau):
        kept, lost = np.ones_like(c), np.zeros_like(c)
    else:
        kept, lost = tau / (c + tau), 1.0 / (c + tau)
    kept, lost = kept * free, lost * free

    system = NormalEquations(
        slope_precision=float((a - b * b * lost).sum()),
        coupling=(kept * b).sum(axis=0),
        precision=(kept * c).sum(axis=0),
        # A pinned cell tells the slope what is left once its intercept is known.
        slope_potential=float((h0 - b * h1 * lost - b * held).sum()),
        potential=(kept * h1).sum(axis=0),
        observations=(n * free).sum(axis=0),
        slope_observations=float(n.sum()),
    )
    slope, intercepts = system.solve(
        current.slope,
        current.intercepts,
        ridge=priors.ridge,
        smoothness=priors.smoothness,
        damping=priors.damping,
        slope_pin=None if np.isnan(pins.slope) else pins.slope,
        pins=pins.intercepts,
    )

    # delta given the rest, (h1 - b w - c b_k) / (c + tau); damped by the cell's own labels, so a
    # stratum that falls silent keeps its offsets and moves with the pair.
    best = (h1 - b * slope - c * intercepts) * lost
    delta = current.strata - current.intercepts
    delta = delta + shrink(n, priors.damping) * (best - delta)
    strata = np.clip(intercepts + delta, -MAX_INTERCEPT, MAX_INTERCEPT)
    return Parameters(slope, intercepts, np.where(free, strata, held))


class Objective:
    """What a refit lowers: log-loss on the sketch plus the priors, in nats per label."""

    def __init__(self, sketches: Array, priors: Priors) -> None:
        # Contiguous, for BLAS dots: this runs twice or more in every refit.
        cells = np.ascontiguousarray(np.moveaxis(sketches, 1, 0))
        self._count, self._accepted = cells[COUNT], cells[ACCEPTED]
        self._features = mean_features(cells)
        self._total = max(float(self._count.sum()), 1.0)
        self._priors = priors

    def __call__(self, at: Parameters) -> float:
        """The objective at `at`."""
        z = at.slope * self._features + at.strata[:, :, None]
        loss = float(np.vdot(self._count, softplus(z)) - np.vdot(self._accepted, z))
        steps = np.diff(at.intercepts)
        penalty = 0.5 * self._priors.smoothness * float(steps @ steps)
        if np.isfinite(self._priors.pooling):
            delta = at.strata - at.intercepts
            penalty += 0.5 * self._priors.pooling * float(np.vdot(delta, delta))
        return (loss + penalty) / self._total
