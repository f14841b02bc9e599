"""Tabular CUSUM: a stream whose mean and standard deviation are known has left its mean."""

import math
from collections.abc import Mapping

from estimator_service.drift.base import DriftDetector


class Cusum(DriftDetector):
    """Two-sided tabular CUSUM against mean 0 and standard deviation 1.

    Page's recurrence, started at upper = lower = 0 and restarted there after a detection:

        upper = max(0, upper + x - slack)       evidence that the mean has risen
        lower = max(0, lower - x - slack)       evidence that it has fallen
        statistic = max(upper, lower)           detection: statistic > threshold

    `slack` is the literature's reference value k, `threshold` its decision interval h, both in
    standard deviations of x. Nothing is learned from the stream, so a cell that was never
    calibrated is found as surely as one that drifted; `PageHinkley` compares a cell with its own
    past instead. river 0.26.1 has no CUSUM; a later river has one that first learns mean and
    standard deviation from 30 observations, which would take a wrong calibration for the norm.

    Defaults. A pair has up to 16 positions x 8 strata = 128 cells with a refit every 5 s, so one
    false alarm in 50,000 updates per cell would be one every 33 minutes per pair. The defaults
    make it one every 9 hours, and still find a shift of 2 in 38 s. The slack is half of the
    smallest shift to be found quickly, 1.5. At an equal false-alarm rate slack 0.5 needs threshold
    12.5 (a shift of 1 takes 25 updates, of 2 takes 9.0, of 5 takes 3.3) and slack 1 needs 6.4
    (57, 7.1, 2.1).

    Measured (seed 2026, by the tests' simulation) on N(shift, 1) from a fresh start; mean updates
    until a detection:

        shift   updates   standard error   runs
        0       858,400   12,600           4,633 false alarms in 4e9 updates
        1       30.79     0.04             200,000
        2       7.523     0.005            200,000
        5       2.507     0.001            200,000

    The integral equation of the run length gives 859,200, 30.75, 7.51, 2.51. Siegmund's
    approximation for one side, with b = threshold + 1.166 and m = slack - shift,

        (exp(2 m b) - 1 - 2 m b) / (2 m^2)

    gives 880,300 (halved, two sides) for shift 0. The rate depends on x being N(0, 1): one in
    98,000 when its standard deviation is 1.1, one in 267,000 (standard error 4,400) when z comes
    from 50 labels with p = 0.9.

    References: E. S. Page, "Continuous inspection schemes", Biometrika 41 (1954) 100-115.
    D. Siegmund, Sequential Analysis (Springer, 1985). The integral equation is Page's, solved by
    Gauss-Legendre quadrature in the tests, which also reproduce run lengths tabulated by J. M.
    Lucas and R. B. Crosier, "Fast initial response for CUSUM quality-control schemes",
    Technometrics 24 (1982) 199-205.

    >>> import random
    >>> rng = random.Random(7)
    >>> cusum = Cusum()
    >>> any(cusum.update(rng.gauss(0, 1)) for _ in range(1000))
    False
    >>> [update for update in range(1, 10) if cusum.update(rng.gauss(-2, 1))]
    [6]
    """

    def __init__(self, slack: float = 0.75, threshold: float = 8.5) -> None:
        super().__init__(threshold)
        if not 0 <= slack < math.inf:
            raise ValueError(f"slack must be finite and not negative, got {slack}")
        self.slack = slack
        self._restart()

    @property
    def upper(self) -> float:
        """Evidence for a risen mean; with z, for more acceptances than predicted."""
        return self._upper

    @property
    def lower(self) -> float:
        """Evidence for a fallen mean; with z, for fewer acceptances than predicted."""
        return self._lower

    @property
    def statistic(self) -> float:
        return max(self._upper, self._lower)

    def state(self) -> dict[str, float]:
        return {"upper": self._upper, "lower": self._lower, "detected": int(self._detected)}

    def restore(self, state: Mapping[str, float]) -> None:
        self._check(state)
        if state["upper"] < 0 or state["lower"] < 0:
            raise ValueError(f"upper and lower must not be negative, got {dict(state)}")
        self._upper = float(state["upper"])
        self._lower = float(state["lower"])
        self._detected = bool(state["detected"])

    def _absorb(self, x: float) -> None:
        self._upper = max(0.0, self._upper + x - self.slack)
        self._lower = max(0.0, self._lower - x - self.slack)

    def _restart(self) -> None:
        self._upper = 0.0
        self._lower = 0.0
