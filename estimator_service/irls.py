"""One Newton step of iteratively reweighted least squares, damped and guarded.

The pair's normal equations, with the strata already eliminated (see `pooling`), couple the slope
to every intercept, and a random-walk prior couples each intercept to its neighbours:

    | A + l    B^T               | | slope      |   | E0 + l slope_0      |
    | B        W + rho D^T D + l | | intercepts | = | E1 + l intercepts_0 |

with rho/2 sum_k (b_k - b_{k-1})^2 = rho/2 |D b|^2 the prior and l the Levenberg ridge on the step.
Where every round was graded at the present coefficients and nothing is pooled, W is diagonal and
this is the Newton step (H + l I) delta = g of the log-likelihood.

Without the prior a deep position never sees a label once a pessimistic intercept keeps it from
being admitted; with it, it follows the position before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike

from estimator_service.logistic import Array
from estimator_service.parameters import Parameters

MAX_INTERCEPT = 20.0
"""Bound on every intercept, in logits: a probability of 2e-9 says all there is to say."""
MAX_SLOPE = 20.0
"""Bound on the slope. A calibrated drafter has a slope of 1; fitted ones lie in 0.3 to 1."""
HALVINGS = 10
"""How often a step that does harm is halved before it is given up."""
LOSS_RESOLUTION = 1e-6
"""Rise of the objective, nats per label, that a sketch cannot tell from none.

The sketch knows a feature to a fraction of a bin, so its optimum lies a little beside that of the
labels; without this allowance the last digits of a converging fit would be refused.
"""


class Outcome(StrEnum):
    """What became of a refit."""

    MOVED = "moved"
    """Accepted, whole."""
    HALVED = "halved"
    """Accepted after halving: the full step would have raised the objective."""
    CONVERGED = "converged"
    """The step was below the tolerance; the coefficients stay."""
    NO_EVIDENCE = "no_evidence"
    """Nothing to fit; the coefficients stay."""
    HELD = "held"
    """No refit was wanted: frozen, or in the grace period after a rollback."""
    REFUSED = "refused"
    """Every halving raised the objective; the coefficients stay."""
    SINGULAR = "singular"
    """The system had no finite solution; the coefficients stay."""

    @property
    def ok(self) -> bool:
        """False for a fit that failed: to be counted, reported, and never published."""
        return self not in (Outcome.REFUSED, Outcome.SINGULAR)


@dataclass(frozen=True)
class FitResult:
    """A refit: what it found, and how it ended. `coefficients` are always safe to use."""

    outcome: Outcome
    coefficients: Parameters
    halvings: int = 0
    step: float = 0.0
    """Largest change of any coefficient."""
    objective_before: float = float("nan")
    """Nats per label, priors included, on the sketch."""
    objective_after: float = float("nan")


class SingularSystemError(ArithmeticError):
    """The normal equations have no finite solution."""


@dataclass(frozen=True, eq=False)
class NormalEquations:
    """A, B, W, E0, E1 of the module's docstring, and the labels behind each part."""

    slope_precision: float
    coupling: Array
    """[K]."""
    precision: Array
    """[K, K], symmetric, positive semidefinite."""
    slope_potential: float
    potential: Array
    """[K]."""
    observations: Array
    """[K], labels behind each intercept."""
    slope_observations: float
    """Labels behind the slope."""

    def solve(
        self,
        slope: float,
        intercepts: Array,
        *,
        ridge: float,
        smoothness: float,
        damping: float,
        slope_pin: float,
        pins: Array,
    ) -> tuple[float, Array]:
        """The damped step's end point, from `slope`, `intercepts` [K].

        The slope moves by N / (N + damping) of its step, N the labels behind it. The intercepts
        are then solved given that slope and move by n / (n + damping), with n the position's
        labels and those that the prior lends it (see `borrowed`).

        Args:
            ridge: l above. Holds a coefficient without evidence where it is.
            smoothness: rho above, in units of precision (a label is worth p(1-p), at most 1/4).
            damping: labels at which a coefficient takes half of its step.
            slope_pin: value the slope must keep, the intercepts being fitted given it; NaN if free.
            pins: [K], values intercepts must keep, NaN where free.

        Raises:
            SingularSystemError: no finite solution.
        """
        free = np.isnan(pins)
        pinned = np.where(free, 0.0, pins)
        walk = np.diff(np.eye(len(pins)), axis=0)
        matrix = self.precision + smoothness * walk.T @ walk + ridge * np.eye(len(pins))
        right = np.column_stack([self.coupling, self.potential + ridge * intercepts])
        # A pinned coordinate leaves the system: its row says "it is the pin, whatever the slope",
        # and what its column contributed to the others moves to the right-hand side.
        right[:, 1] -= matrix @ pinned
        right[~free] = 0.0
        matrix[~free], matrix[:, ~free] = 0.0, 0.0
        matrix[~free, ~free] = 1.0
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                x = np.linalg.solve(matrix, right)
        except np.linalg.LinAlgError as error:
            raise SingularSystemError(str(error)) from error
        x[:, 1] += pinned

        if np.isnan(slope_pin):
            potential = self.slope_potential + ridge * slope - self.coupling @ x[:, 1]
            precision = self.slope_precision + ridge - self.coupling @ x[:, 0]
            share = shrink(self.slope_observations, damping)
            new_slope = float(slope + share * (potential / precision - slope))
            # The constrained optimum: at the bound, with the intercepts solved given it.
            new_slope = min(max(new_slope, 0.0), MAX_SLOPE)
        else:
            new_slope = slope_pin
        best_intercepts = x[:, 1] - x[:, 0] * new_slope
        factor = shrink(borrowed(self.observations, smoothness), damping)
        new_intercepts = intercepts + factor * (best_intercepts - intercepts)
        new_intercepts = np.clip(new_intercepts, -MAX_INTERCEPT, MAX_INTERCEPT)
        if not (np.isfinite(new_slope) and np.isfinite(new_intercepts).all()):
            raise SingularSystemError("the normal equations have no finite solution")
        return new_slope, np.where(free, new_intercepts, pinned)


def shrink(observations: ArrayLike, damping: float) -> Array:
    """n / (n + damping): the share of its Newton step that a coefficient takes; 1 if undamped."""
    n = np.asarray(observations, dtype=np.float64)
    return n / (n + damping) if damping > 0.0 else np.ones_like(n)


def borrowed(observations: Array, smoothness: float) -> Array:
    """[..., K], each position's labels and those that a random walk lends it from the one before.

    Variances add along the link, so a neighbour's n labels are worth 1 / (1/n + 1/m) here, with
    m = 4 * smoothness the labels that carry as much precision as the prior does (a label carries
    at most 1/4). Only forward: labels thin out with depth, never the other way round.

    >>> borrowed(np.array([16.0, 0.0, 0.0]), 4.0)
    array([16.        ,  8.        ,  5.33333333])
    """
    out = observations.copy()
    rate = 0.25 / smoothness if smoothness > 0.0 else np.inf
    with np.errstate(divide="ignore", over="ignore"):
        for k in range(1, out.shape[-1]):
            out[..., k] += 1.0 / (1.0 / out[..., k - 1] + rate)
    return out


def guarded(
    current: Parameters,
    proposed: Parameters,
    objective: Callable[[Parameters], float],
    tolerance: float = 1e-9,
) -> FitResult:
    """Go to `proposed`, or as much of the way as does not raise the objective (nats per label)."""
    step = current.distance(proposed)
    if step <= tolerance:
        return FitResult(Outcome.CONVERGED, current, step=step)
    before = objective(current)
    candidate = proposed
    for halvings in range(HALVINGS + 1):
        after = objective(candidate)
        if after <= before + LOSS_RESOLUTION:
            outcome = Outcome.HALVED if halvings else Outcome.MOVED
            step = current.distance(candidate)
            return FitResult(outcome, candidate, halvings, step, before, after)
        candidate = current.toward(proposed, 0.5 ** (halvings + 1))
    return FitResult(Outcome.REFUSED, current, HALVINGS, 0.0, before, before)
