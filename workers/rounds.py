"""What a replica gathers between two drains: labels, and counts of what it did.

A draft may be dispatched under one set of coefficients and come back under the next. Its labels
belong to those that predicted them, so the sums are kept apart, and a drain hands out one round for
each set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from estimator_service.logistic import predict
from estimator_service.messages import CoefficientSet, Version
from estimator_service.sketch import Sketch
from estimator_service.statistics import Statistics

FOLD_AT = 8192
"""Labels that wait to be summed: summing many at once costs little more than summing one."""
MAX_LABELS = 2_000_000
"""Labels of one stratum and version that nobody drains, beyond which they are forgotten. A sketch
holds 2.4 million in one cell, and by then they are days old or the drain is broken."""


class Label(NamedTuple):
    """One observed draft position."""

    position: int
    feature: float
    accepted: int
    """1 or 0."""


@dataclass(frozen=True, eq=False)
class StratumSums:
    """One stratum's part of a round, as arrays."""

    intercepts: tuple[float, ...]
    """[K], the effective ones that graded it."""
    statistics: Statistics
    sketch: Sketch

    @classmethod
    def of(cls, coefficients: CoefficientSet, stratum: str, labels: Iterable[Label]) -> StratumSums:
        """The sums of labels that `coefficients` graded."""
        intercepts = coefficients.intercepts_of(stratum)
        positions = len(intercepts)
        columns = np.array(list(labels), dtype=np.float64).reshape(-1, 3)
        k, f, y = columns[:, 0].astype(np.intp), columns[:, 1], columns[:, 2]
        p = predict(coefficients.slope, np.array(intercepts)[k], f)
        return cls(intercepts, Statistics.of(positions, k, f, y, p), Sketch.of(positions, k, f, y))

    def merge(self, other: StratumSums) -> StratumSums:
        """The sum of both. Raises ValueError if other coefficients graded them."""
        if self.intercepts != other.intercepts:
            raise ValueError(f"intercepts {self.intercepts} and {other.intercepts} graded these")
        return StratumSums(
            self.intercepts,
            self.statistics.merge(other.statistics),
            self.sketch.merge(other.sketch),
        )


@dataclass(frozen=True, eq=False)
class Round:
    """All that was gathered under one set of coefficients."""

    graded: Version
    slope: float
    strata: dict[str, StratumSums] = field(default_factory=dict)
    admitted: tuple[int, ...] = ()
    """[K], draft tokens sent to verification at each position; empty means none."""
    steps: int = 0
    """Verification steps."""
    explored_steps: int = 0
    """Those of them that an exploration order made verify in full."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Requests verified but not observed, by reason."""

    @property
    def labels(self) -> int:
        """How many it holds."""
        return int(sum(sums.statistics.observations.sum() for sums in self.strata.values()))


class _Open:
    """A round that is still being gathered."""

    def __init__(self, coefficients: CoefficientSet) -> None:
        self.coefficients = coefficients
        self.waiting: dict[str, list[Label]] = {}
        self.sums: dict[str, StratumSums] = {}
        self.admitted = np.zeros(len(coefficients.intercepts), dtype=np.int64)
        self.steps = 0
        self.explored_steps = 0
        self.skipped: Counter[str] = Counter()

    def fold(self, stratum: str) -> int:
        """Sum what waits; returns how many labels were forgotten."""
        folded = StratumSums.of(self.coefficients, stratum, self.waiting.pop(stratum))
        held = self.sums.get(stratum)
        if held is None:
            self.sums[stratum] = folded
            return 0
        labels = int(held.statistics.observations.max())
        if labels > MAX_LABELS:
            self.sums[stratum] = folded
            return int(held.statistics.observations.sum())
        self.sums[stratum] = held.merge(folded)
        return 0

    def close(self) -> Round:
        for stratum in list(self.waiting):
            self.fold(stratum)
        return Round(
            graded=self.coefficients.version,
            slope=self.coefficients.slope,
            strata=self.sums,
            admitted=tuple(int(n) for n in self.admitted) if self.admitted.any() else (),
            steps=self.steps,
            explored_steps=self.explored_steps,
            skipped=dict(self.skipped),
        )


class Rounds:
    """The rounds of one worker, from drain to drain."""

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self.observed = 0
        """Labels in all, those forgotten included."""
        self.forgotten = 0
        """Labels dropped because nobody drained them."""

    def observe(self, coefficients: CoefficientSet, stratum: str, labels: list[Label]) -> None:
        """Add labels of drafts that `coefficients` predicted; one without a finite feature is
        left out of every sum.
        """
        gathering = self._at(coefficients)
        waiting = gathering.waiting.setdefault(stratum, [])
        waiting.extend(labels)
        self.observed += len(labels)
        if len(waiting) >= FOLD_AT:
            self.forgotten += gathering.fold(stratum)

    def step(self, coefficients: CoefficientSet, lengths: Iterable[int], *, explored: bool) -> None:
        """Count a verification step, dispatched under `coefficients`.

        Args:
            coefficients: those in force when the lengths were chosen.
            lengths: for each request with a draft, how many of its tokens were admitted.
            explored: an exploration order chose them.
        """
        gathering = self._at(coefficients)
        gathering.steps += 1
        gathering.explored_steps += explored
        for length in lengths:
            gathering.admitted[:length] += 1

    def skip(self, coefficients: CoefficientSet, reason: str) -> None:
        """Count a request that is verified but not observed."""
        self._at(coefficients).skipped[reason] += 1

    def drain(self) -> list[Round]:
        """What was gathered, oldest version first; and start anew."""
        closed = [gathering.close() for gathering in self._open]
        self._open = []
        return sorted(closed, key=lambda round_: round_.graded)

    def _at(self, coefficients: CoefficientSet) -> _Open:
        # By identity: what a worker fits by itself has the version 0.0 each time.
        for gathering in self._open:
            if gathering.coefficients is coefficients:
                return gathering
        gathering = _Open(coefficients)
        self._open.append(gathering)
        return gathering
