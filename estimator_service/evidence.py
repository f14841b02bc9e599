"""What a pair's labels amount to: merged and discounted, and what has arrived since.

Arrivals stay apart by replica until `fold`: only then is it known how much of the whole each
replica brought, which caps its influence, and until then a replica that turns out to be unsound
can be left out as if it had never sent anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimator_service.intake import CheckedRound
from estimator_service.logistic import Array
from estimator_service.sketch import ACCEPTED, BINS, COUNT
from estimator_service.statistics import G1, WIDTH, C, N, recentre
from estimator_service.trust import influence


@dataclass(eq=False)
class _Arrived:
    """One replica's rounds of one stratum since the last fold."""

    residuals: Array
    """[K, 3]: sum of y - p, sum of p (1 - p), labels."""
    quadratic: Array
    """[K, 6]."""
    cells: Array
    """[3, K, BINS]."""


@dataclass(frozen=True, eq=False)
class Folded:
    """What a fold brought in, replicas and versions together."""

    labels: float
    residuals: Array
    """[S, K, 3]: sum of y - p, sum of p (1 - p), labels; each at the version that graded it."""


class Evidence:
    """Merged evidence of one pair: per stratum a quadratic and a sketch."""

    def __init__(self, positions: int) -> None:
        self.strata: list[str] = []
        self.quadratics: Array = np.zeros((0, positions, WIDTH))
        """[S, K, 6], `statistics.Quadratic.sums`."""
        self.sketches: Array = np.zeros((0, 3, positions, BINS))
        """[S, 3, K, BINS], `sketch.Sketch.cells`."""
        self._positions = positions
        self._index: dict[str, int] = {}
        self._arrived: dict[str, dict[str, _Arrived]] = {}

    @property
    def labels(self) -> Array:
        """[S, K], labels held."""
        return self.quadratics[:, :, N]

    @property
    def accepted(self) -> Array:
        """[S, K], accepted labels held."""
        accepted: Array = self.sketches[:, ACCEPTED].sum(axis=-1)
        return accepted

    def knows(self, stratum: str) -> bool:
        """Whether the stratum has a place."""
        return stratum in self._index

    def add_stratum(self, stratum: str) -> None:
        """Give a new stratum a place, last."""
        self._index[stratum] = len(self.strata)
        self.strata.append(stratum)
        shape = (1, self._positions)
        self.quadratics = np.concatenate([self.quadratics, np.zeros((*shape, WIDTH))])
        self.sketches = np.concatenate([self.sketches, np.zeros((1, 3, self._positions, BINS))])

    def put(self, stratum: str, quadratic: Array, cells: Array) -> None:
        """Replace what is held of a stratum, as a checkpoint says."""
        self.quadratics[self._index[stratum]] = quadratic
        self.sketches[self._index[stratum]] = cells

    def arrive(self, replica: str, part: CheckedRound, slope: float) -> None:
        """Take a round graded at `slope`. Its stratum must have a place."""
        of_replica = self._arrived.setdefault(replica, {})
        arrived = of_replica.get(part.stratum)
        if arrived is None:
            k = self._positions
            arrived = _Arrived(np.zeros((k, 3)), np.zeros((k, WIDTH)), np.zeros((3, k, BINS)))
            of_replica[part.stratum] = arrived
        sums = part.statistics.copy()
        arrived.residuals += sums[:, [G1, C, N]]
        recentre(sums, slope, part.intercepts)
        arrived.quadratic += sums
        arrived.cells.reshape(3, -1)[:, part.cells.cell] += part.cells.columns

    def reject(self, replica: str) -> float:
        """Drop what a replica sent since the last fold; returns how many labels that was."""
        arrived = self._arrived.pop(replica, {})
        return float(sum(part.quadratic[:, N].sum() for part in arrived.values()))

    def fold(self, discount: float, share: float, keep: float = np.inf) -> Folded:
        """Fade what is held by `discount`, then merge what arrived, capped by `influence`.

        While a drift is being caught up with, no more of the old labels is kept than `keep` or as
        many as are new, whichever is more. (A shorter half-life in seconds would do as well where
        traffic is heavy, and leave a pair with little traffic without any evidence.)
        """
        residuals = np.zeros((len(self.strata), self._positions, 3))
        replicas = list(self._arrived.values())
        brought = np.array(
            [sum(part.quadratic[:, N].sum() for part in parts.values()) for parts in replicas]
        )
        weights = influence(brought, share)
        fresh, held = float(brought @ weights), float(self.labels.sum())
        if held > 0.0:
            discount = min(discount, max(fresh, keep) / held)
        self.quadratics *= discount
        self.sketches *= discount
        for parts, weight in zip(replicas, weights, strict=True):
            for stratum, part in parts.items():
                s = self._index[stratum]
                self.quadratics[s] += weight * part.quadratic
                self.sketches[s] += weight * part.cells
                residuals[s] += weight * part.residuals
        self._arrived.clear()
        return Folded(fresh, residuals)

    def clear(self) -> None:
        """Forget every label, held or arrived; strata keep their places."""
        self.quadratics[:] = 0.0
        self.sketches[:] = 0.0
        self._arrived.clear()

    def faults(self) -> list[str]:
        """What is wrong with the sums; empty if nothing is."""
        found = []
        for name, s in self._index.items():
            quadratic, cells = self.quadratics[s], self.sketches[s]
            if not (np.isfinite(quadratic).all() and np.isfinite(cells).all()):
                found.append(f"stratum {name}: a sum is not finite")
            elif (quadratic[:, [0, C, N]] < 0.0).any():
                found.append(f"stratum {name}: a precision or a count is negative")
            elif (cells[ACCEPTED] > cells[COUNT] * (1.0 + 1e-9)).any():
                found.append(f"stratum {name}: more labels accepted than counted")
            elif not np.allclose(cells[COUNT].sum(axis=1), quadratic[:, N], rtol=1e-6, atol=1e-6):
                found.append(f"stratum {name}: sketch and quadratic hold different labels")
        return found
