"""What the labels of a trace say to a Newton step: `offline` takes the steps."""

from dataclasses import replace

import numpy as np

from estimator_service.irls import MAX_INTERCEPT, MAX_SLOPE
from estimator_service.logistic import (
    INITIAL_INTERCEPT,
    INITIAL_SLOPE,
    Array,
    predict,
    softplus,
)
from estimator_service.parameters import Parameters, Pins
from estimator_service.pooling import Priors, newton_point, penalty
from estimator_service.statistics import Quadratic, Statistics
from estimator_service.trace import Labels

MIN_SPREAD = 1e-12
"""Share of the features' mean square that must be variance, or rounding makes up the slope."""
MIN_PRECISION = 1e-4
"""Of a coefficient that the labels determine: a standard error of 100 logits says nothing."""


def predictions(at: Parameters, labels: Labels) -> Array:
    """[M], the probability of each label's acceptance, by its own stratum's intercepts."""
    return predict(at.slope, at.strata[labels.stratum, labels.position], labels.feature)


class Evidence:
    """Labels that are fitted, their features within +-MAX_LOG_ODDS."""

    def __init__(self, labels: Labels, priors: Priors) -> None:
        self._labels = labels
        self._priors = priors
        self._shape = (len(labels.strata), labels.positions)
        self._cell = labels.stratum * labels.positions + labels.position

    def start(self) -> tuple[Parameters, Pins]:
        """Where each position's mean prediction is about right, and what is pinned.

        Not the cold start: with features around 30 it predicts 1 for every label, there the
        log-loss is no parabola at all, and the first step is of no use.
        """
        position, f, y = self._labels.position, self._labels.feature, self._labels.accepted
        n, accepted, total = (
            np.bincount(position, x, self._shape[1]) for x in (np.ones_like(f), y, f)
        )
        mean = total / np.maximum(n, 1.0)
        # What the intercepts cannot explain. A prior over positions lets them explain less.
        alone = self._priors.smoothness == 0.0
        rest = f - (mean[position] if alone else total.sum() / max(len(f), 1))
        pins = Pins.none(*self._shape)
        slope = 0.0
        if rest @ rest <= MIN_SPREAD * (f @ f):
            slope = INITIAL_SLOPE
            pins = replace(pins, slope=slope)
        log_odds = np.log((accepted + 0.5) / (n - accepted + 0.5)) - slope * mean
        intercepts = np.clip(log_odds, -MAX_INTERCEPT, MAX_INTERCEPT)
        intercepts = np.where(n > 0.0, intercepts, INITIAL_INTERCEPT)
        return Parameters(slope, intercepts, np.tile(intercepts, (self._shape[0], 1))), pins

    def newton(self, at: Parameters, pins: Pins) -> Parameters:
        """The step's end, with the slope fitted to intercepts that the step took to a bound."""
        quadratics = self._quadratics(at)
        end = newton_point(quadratics, at, self._priors, pins)
        intercepts, strata = (
            np.where(np.abs(x) < MAX_INTERCEPT, np.nan, x) for x in (end.intercepts, end.strata)
        )
        if np.isnan(intercepts).all() and np.isnan(strata).all():
            return end
        return newton_point(quadratics, at, self._priors, Pins(pins.slope, intercepts, strata))

    def objective(self, at: Parameters) -> float:
        """What the fit lowers, in nats per label: `pooling.Objective`, exactly."""
        z = at.slope * self._labels.feature + at.strata.ravel()[self._cell]
        loss = float(softplus(z).sum() - self._labels.accepted @ z)
        return (loss + penalty(at, self._priors)) / max(len(z), 1)

    def weaknesses(self, at: Parameters) -> list[str]:
        """Coefficients at a bound, or that the labels say next to nothing about."""
        a, b, c, _, _, n = self._quadratics(at).sum(axis=0).T
        if self._priors.smoothness > 0.0:
            # No position stands alone: only all of them can lack what determines them.
            a, b, c, n = (np.full_like(x, x.sum()) for x in (a, b, c, n))
        known = c > 0.0
        slope_precision = (a[known] - b[known] ** 2 / c[known]).sum()
        found = []
        if at.slope in (0.0, MAX_SLOPE):
            found.append(f"the slope is at its bound of {at.slope:g}")
        elif slope_precision < MIN_PRECISION:
            found.append(f"the slope is left at {at.slope:.3g}: the labels do not determine it")
        found += [
            f"intercept {k} is left at {at.intercepts[k]:.3g}: the labels do not determine it"
            for k in np.flatnonzero((n > 0.0) & (c < MIN_PRECISION))
        ]
        for s, k in np.argwhere(np.abs(at.strata) >= MAX_INTERCEPT):
            of = f" of {self._labels.strata[s]}" if len(self._labels.strata) > 1 else ""
            found.append(f"intercept {k}{of} is at its bound of {at.strata[s, k]:g}")
        return found

    def _quadratics(self, at: Parameters) -> Array:
        """[S, K, 6], of all labels graded at `at`."""
        sums = Statistics.of(
            at.strata.size,
            self._cell,
            self._labels.feature,
            self._labels.accepted,
            predictions(at, self._labels),
        )
        quadratic = Quadratic.of(sums, at.slope, at.strata.ravel())
        return quadratic.sums.reshape(*self._shape, -1)
