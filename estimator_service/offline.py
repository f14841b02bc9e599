"""Fits a pair's coefficients to labels that are all there at once: a trace, not a stream.

The estimator's own Newton step, taken again and again from sums that are graded anew at the
coefficients it has reached. Without a prior over positions, and with one stratum, its limit is the
maximum-likelihood logistic regression on the feature and one-hot positions,

    max  sum_i y_i z_i - softplus(z_i)        z_i = slope f_i + intercepts[k_i]

and with several strata the same less the prior on their offsets (`pooling`). Every step is guarded
by the labels' exact log-loss, where the estimator has a sketch's.

A position whose labels are all alike has no optimum: its intercept would run off for ever and in
the limit leave the others alone. So it is fitted without them, and put at its bound.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from estimator_service.calibration import Calibration, ReliabilityBin, calibrate, reliability
from estimator_service.config import FitConfig
from estimator_service.irls import MAX_INTERCEPT, Outcome, SingularSystemError, guarded
from estimator_service.logistic import MAX_LOG_ODDS, Array
from estimator_service.offline_evidence import Evidence, predictions
from estimator_service.parameters import Parameters
from estimator_service.pooling import Priors
from estimator_service.trace import Labels

POOLING = FitConfig().pooling
OFFSET_SMOOTHNESS = FitConfig().offset_smoothness
TOLERANCE = 1e-10
"""Logits. A step below it ends the fit."""
ROUNDING = 1e-7
"""Logits. Below it the next Newton step is far smaller, or there is nothing left but rounding."""
MAX_ITERATIONS = 100
"""A fit takes about 6."""
RIDGE = 1e-10
"""On the step, for what has no labels."""


class NoLabelsError(ValueError):
    """Nothing to fit."""


@dataclass(frozen=True, eq=False)
class StratumFit:
    """One stratum's share of a fit."""

    intercepts: Array
    """[K], effective."""
    observations: NDArray[np.int64]
    """[K], labels."""
    calibration: Calibration


@dataclass(frozen=True, eq=False)
class OfflineFit:
    """Coefficients, the evidence behind them, and how well they predict the labels themselves."""

    slope: float
    intercepts: Array
    """[K], the pair's. One without labels is where it started, unless smoothness moved it."""
    observations: NDArray[np.int64]
    """[K], labels."""
    strata: dict[str, StratumFit]
    calibration: Calibration
    per_position: list[Calibration]
    """[K]."""
    reliability: list[ReliabilityBin]
    iterations: int
    problems: list[str]
    """Why the coefficients are no optimum; empty if they are one."""

    @property
    def converged(self) -> bool:
        """Whether the coefficients are the optimum, and lie within their bounds."""
        return not self.problems


def fit_labels(
    labels: Labels,
    *,
    smoothness: float = 0.0,
    pooling: float = POOLING,
    on_step: Callable[[int, float], None] | None = None,
) -> OfflineFit:
    """Fit slope and intercepts to M labels. Takes time and memory linear in M.

    Args:
        labels: features beyond +-MAX_LOG_ODDS are clamped.
        smoothness: precision of the random walk of intercepts over positions; 0 is none.
        pooling: precision, above 0, of a stratum's offset from the pair; inf is no offset.
        on_step: told after each step its number and its size in logits.

    Raises:
        NoLabelsError: there is no label.
        ValueError: a feature that is not finite.

    >>> position, feature = np.zeros(4, dtype=int), np.array([0.0, 0.0, 2.0, 2.0])
    >>> labels = Labels(1, position, feature, np.array([1.0, 0.0, 1.0, 1.0]), position, ("all",))
    >>> fit_labels(labels).problems[-1]
    'the slope is left at 14.7: the labels do not determine it'
    """
    if not len(labels):
        raise NoLabelsError("no draft position was observed, so there is nothing to fit")
    if not np.isfinite(labels.feature).all():
        raise ValueError("every feature must be finite")
    labels = replace(labels, feature=np.clip(labels.feature, -MAX_LOG_ODDS, MAX_LOG_ODDS))
    priors = Priors(ridge=RIDGE, smoothness=smoothness)
    if len(labels.strata) > 1 and np.isfinite(pooling):
        priors = replace(priors, pooling=pooling, offset_smoothness=OFFSET_SMOOTHNESS)

    bound = _separated(labels, smoothness)
    free = np.isnan(bound)
    evidence = Evidence(labels.select(free[labels.position]), priors)
    at, iterations, problems = _maximize(evidence, on_step)
    problems += evidence.weaknesses(at)
    problems += [
        f"intercept {k} is left at {bound[k]:g}: every label there was "
        + ("accepted" if bound[k] > 0.0 else "rejected")
        for k in np.flatnonzero(~free)
    ]
    at = Parameters(
        at.slope,
        np.where(free, at.intercepts, bound),
        np.where(free, at.strata, bound),
    )
    return _report(labels, at, iterations, problems)


def _separated(labels: Labels, smoothness: float) -> Array:
    """[K], the bound that the intercept runs to; NaN where the labels differ or there are none.

    A prior over positions keeps it from running as long as any two labels differ anywhere.
    """
    n = np.bincount(labels.position, minlength=labels.positions)
    y = np.bincount(labels.position, labels.accepted, labels.positions)
    all_n, all_y = (n, y) if smoothness == 0.0 else (n.sum(), y.sum())
    bound = np.where(all_y == all_n, MAX_INTERCEPT, np.where(all_y == 0.0, -MAX_INTERCEPT, np.nan))
    return np.where(n > 0, bound, np.nan)


def _maximize(
    evidence: Evidence, on_step: Callable[[int, float], None] | None
) -> tuple[Parameters, int, list[str]]:
    """Where the steps ended, after how many, and what kept them from the optimum."""
    at, pins = evidence.start()
    size = float("inf")
    for iteration in range(1, MAX_ITERATIONS + 1):
        try:
            proposed = evidence.newton(at, pins)
        except SingularSystemError as error:
            return at, iteration, [str(error)]
        result = guarded(at, proposed, evidence.objective, TOLERANCE)
        at, last, size = result.coefficients, size, result.step
        if on_step:
            on_step(iteration, size)
        if result.outcome is Outcome.REFUSED:
            return at, iteration, ["no part of the last step lowered the log-loss"]
        if result.outcome is Outcome.CONVERGED or last / 2 < size < ROUNDING:
            return at, iteration, []
    return at, iteration, [f"the last of {MAX_ITERATIONS} steps was still {size:.1e} logits"]


def _report(labels: Labels, at: Parameters, iterations: int, problems: list[str]) -> OfflineFit:
    p, y = predictions(at, labels), labels.accepted
    counts = np.zeros(at.strata.shape, dtype=np.int64)
    np.add.at(counts, (labels.stratum, labels.position), 1)

    def judge(chosen: NDArray[np.bool_]) -> Calibration:
        return calibrate(p[chosen], accepted=y[chosen])

    return OfflineFit(
        slope=at.slope,
        intercepts=at.intercepts,
        observations=counts.sum(axis=0),
        strata={
            name: StratumFit(at.strata[s], counts[s], judge(labels.stratum == s))
            for s, name in enumerate(labels.strata)
        },
        calibration=calibrate(p, accepted=y),
        per_position=[judge(labels.position == k) for k in range(labels.positions)],
        reliability=reliability(p, accepted=y),
        iterations=iterations,
        problems=problems,
    )
