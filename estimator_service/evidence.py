"""What a pair's labels amount to: merged and discounted, and what has arrived since.

Arrivals stay apart by replica until `fold`: only then is it known how much of the whole each
replica brought, which caps its influence, and until then a replica that turns out to be unsound
can be left out as if it had never sent anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from estimator_service.intake import CheckedRound
from estimator_service.logistic import Array
from estimator_service.sketch import ACCEPTED, BINS, COUNT
from estimator_service.statistics import G0, G1, WIDTH, A, C, N, hessian_times
from estimator_service.trust import influence


@dataclass(eq=False)
class _Arrived:
    """One replica's rounds of one stratum since the last fold."""

    statistics: Array
    """[K, 6], whichever versions graded them."""
    offsets: Array
    """[K, 2]: H theta of each round, what makes its gradient a potential."""
    cells: Array
    """[3, K * BINS]."""


@dataclass(frozen=True, eq=False)
class Folded:
    """What a fold brought in, replicas and versions together."""

    labels: float
    """Weighted by `influence`."""
    residuals: Array
    """[S, K, 3], weighted likewise: sum of y - p, sum of p (1 - p), labels."""
    counted: Array
    """[2, K]: labels and accepted labels, each counted once whatever its weight."""


class Evidence:
    """Merged evidence of one pair: per stratum a quadratic and a sketch."""

    def __init__(self, positions: int) -> None:
        self.strata: list[str] = []
        self.quadratics: Array = np.zeros((0, positions, WIDTH))
        """[S, K, 6], `statistics.Quadratic.sums`."""
        self.sketches: Array = np.zeros((0, 3, positions, BINS))
        """[S, 3, K, BINS], `sketch.Sketch.cells`."""
        self.waiting = 0.0
        """Labels that arrived since the last fold."""
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
            arrived = _Arrived(np.zeros((k, WIDTH)), np.zeros((k, 2)), np.zeros((3, k * BINS)))
            of_replica[part.stratum] = arrived
        arrived.statistics += part.statistics
        self.waiting += float(part.statistics[:, N].sum())
        arrived.offsets += hessian_times(part.statistics, slope, part.intercepts)
        for sums, column in zip(arrived.cells, part.cells.columns, strict=True):
            sums[part.cells.cell] += column

    def arrivals(self) -> dict[str, Array]:
        """By replica: its statistics [6] since the last fold, over strata and positions."""
        return {
            replica: np.sum([part.statistics.sum(axis=0) for part in parts.values()], axis=0)
            for replica, parts in self._arrived.items()
        }

    def fold(
        self, brought: Mapping[str, float], discount: float, share: float, keep: float = np.inf
    ) -> Folded:
        """Fade what is held by `discount`, then merge what arrived, capped by `influence`.

        `brought` names the replicas to merge and their labels, as `arrivals` has them. What others
        sent is dropped, as if they had never sent anything.

        While a drift is being caught up with, no more of the old labels is kept than `keep` or as
        many as are new, whichever is more. (A shorter half-life in seconds would do as well where
        traffic is heavy, and leave a pair with little traffic without any evidence.)
        """
        labels = np.array(list(brought.values()))
        weights = influence(labels, share)
        fresh, held = float(labels @ weights), float(self.labels.sum())
        if held > 0.0:
            discount = min(discount, max(fresh, keep) / held)
        self.quadratics *= discount
        self.sketches *= discount
        residuals = np.zeros((len(self.strata), self._positions, 3))
        counted = np.zeros((2, self._positions))
        for replica, weight in zip(brought, weights, strict=True):
            for stratum, part in self._arrived[replica].items():
                s = self._index[stratum]
                cells = part.cells.reshape(self.sketches.shape[1:])
                self.quadratics[s] += weight * part.statistics
                self.quadratics[s, :, G0 : G1 + 1] += weight * part.offsets
                self.sketches[s] += weight * cells
                residuals[s] += weight * part.statistics[:, [G1, C, N]]
                counted += cells[[COUNT, ACCEPTED]].sum(axis=-1)
        self._arrived.clear()
        self.waiting = 0.0
        return Folded(fresh, residuals, counted)

    def clear(self) -> None:
        """Forget every label, held or arrived; strata keep their places."""
        self.quadratics[:] = 0.0
        self.sketches[:] = 0.0
        self._arrived.clear()
        self.waiting = 0.0

    def faults(self) -> list[str]:
        """What is wrong with the sums; empty if nothing is."""
        found = []
        for name, s in self._index.items():
            quadratic, cells = self.quadratics[s], self.sketches[s]
            if not (np.isfinite(quadratic).all() and np.isfinite(cells).all()):
                found.append(f"stratum {name}: a sum is not finite")
            elif (quadratic[:, [A, C, N]] < 0.0).any():
                found.append(f"stratum {name}: a precision or a count is negative")
            elif (cells[ACCEPTED] > cells[COUNT] * (1.0 + 1e-9)).any():
                found.append(f"stratum {name}: more labels accepted than counted")
            elif not np.allclose(cells[COUNT].sum(axis=1), quadratic[:, N], rtol=1e-6, atol=1e-6):
                found.append(f"stratum {name}: sketch and quadratic hold different labels")
        return found
