"""Drift of a pair: a detector of each kind on every position of every stratum.

A detector is fed the standardized residual z = sum(y - p) / sqrt(sum p (1 - p)) of its cell, once
enough labels stand behind it: idle is not drift. The monitor is either settled, and then watches;
or not, because it has just begun or has detected something, and then waits until every residual
is calm again. Only a settled monitor can detect, so one change of traffic is one detection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from estimator_service.config import DriftConfig
from estimator_service.drift.base import DriftDetector
from estimator_service.drift.cusum import Cusum
from estimator_service.drift.page_hinkley import PageHinkley
from estimator_service.logistic import Array

DETECTORS: Mapping[str, Callable[[], DriftDetector]] = {
    "cusum": Cusum,
    "page_hinkley": PageHinkley,
}


@dataclass(frozen=True)
class Detection:
    """One detector's alarm."""

    stratum: str
    position: int
    detector: str
    residual: float
    """The standardized residual that tipped it."""


class MonitorState(Struct, frozen=True):
    """A monitor, for a checkpoint: detectors start afresh, as after any catching up."""

    settled: bool = False
    drifting: bool = False


class DriftMonitor:
    """Watches the residuals of one pair with K = `positions`."""

    def __init__(
        self, config: DriftConfig, positions: int, state: MonitorState | None = None
    ) -> None:
        self._config = config
        self._positions = positions
        state = state or MonitorState()
        self.settled = state.settled
        self.drifting = state.drifting
        """A drift was detected and has not been caught up with."""
        self._calm = 0
        self._gathered: dict[str, Array] = {}
        self._detectors: dict[tuple[str, int, str], DriftDetector] = {}

    @property
    def state(self) -> MonitorState:
        """What a checkpoint needs."""
        return MonitorState(self.settled, self.drifting)

    def statistics(self) -> dict[tuple[str, int, str], float]:
        """Test statistics by (stratum, position, detector), each over its threshold."""
        return {key: d.statistic / d.threshold for key, d in self._detectors.items()}

    def observe(self, strata: Sequence[str], residuals: Array) -> list[Detection]:
        """Take what one fold brought in.

        Args:
            strata: [S] names.
            residuals: [S, K, 3], sum of y - p, sum of p (1 - p), labels.
        """
        scores = [
            (stratum, int(k), float(z[k]))
            for stratum, sums in zip(strata, residuals, strict=True)
            for z in [self._scores(stratum, sums)]
            for k in np.flatnonzero(np.isfinite(z))
        ]
        if not scores:
            return []
        if not self.settled:
            self._settle(all(abs(z) <= self._config.calm for _, _, z in scores))
            return []
        found = [
            Detection(stratum, k, name, z)
            for stratum, k, z in scores
            for name in DETECTORS
            if self._detector(stratum, k, name).update(z)
        ]
        if found:
            self.settled, self.drifting, self._calm = False, True, 0
        return found

    def restart(self) -> None:
        """Forget the residuals: other coefficients are in force, by somebody's order."""
        self.settled, self.drifting, self._calm = False, False, 0
        self._gathered.clear()
        self._detectors.clear()

    def _settle(self, calm: bool) -> None:
        self._calm = self._calm + 1 if calm else 0
        if self._calm >= self._config.calm_refits:
            self.settled, self.drifting = True, False
            self._detectors.clear()

    def _scores(self, stratum: str, sums: Array) -> Array:
        """[K], z of each position that has enough labels by now, and NaN of the others."""
        gathered = self._gathered.setdefault(stratum, np.zeros((self._positions, 3)))
        gathered += sums
        ready = gathered[:, 2] >= self._config.min_labels
        z = np.full(self._positions, np.nan)
        residual, variance, _ = gathered[ready].T
        # Labels graded at p = 0 or 1 have no variance; a floor of one label's worth of the
        # rarest event keeps z finite.
        z[ready] = residual / np.sqrt(np.maximum(variance, 1e-9))
        gathered[ready] = 0.0
        return z

    def _detector(self, stratum: str, position: int, name: str) -> DriftDetector:
        key = (stratum, position, name)
        if key not in self._detectors:
            self._detectors[key] = DETECTORS[name]()
        return self._detectors[key]
