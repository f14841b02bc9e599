"""Coefficients from a worker's own labels, for as long as nobody else fits them.

The arithmetic is the estimator's. Its clock is not: ranks that compute together must fit the same
at the same step, and clocks differ between them, so time counts in refits.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from estimator_service.config import EstimatorConfig, ExplorationConfig, FitConfig
from estimator_service.messages import MAX_STRATA, CoefficientSet, PairKey, Source, Version
from estimator_service.pair import Pair
from estimator_service.pair_state import PairState
from estimator_service.tally import Tally
from workers.frames import frames_of
from workers.rounds import Round

HALF_LIFE = 30.0
"""Refits until a label counts half."""
CONFIG = EstimatorConfig(
    fit=FitConfig(half_life=HALF_LIFE),
    # Nobody is there to give the orders to.
    exploration=ExplorationConfig(label_floor=0.0),
    max_strata=MAX_STRATA,
)
SELF = "self"


class LocalFit:
    """One worker's fits, from the coefficients that were in force when the fleet went away."""

    def __init__(self, start: CoefficientSet) -> None:
        positions = len(start.intercepts)
        self._refits = 0
        self._pair = Pair(
            PairKey(SELF, SELF, SELF, positions),
            CONFIG,
            epoch=0,
            now=0.0,
            wall=0.0,
            state=PairState(start, start, Tally.empty(positions), strata=list(start.strata)),
        )

    def refit(self, rounds: Iterable[Round]) -> CoefficientSet | None:
        """What the rounds make of the coefficients; None if they hardly move them.

        Its version is 0.0, below all that a fleet publishes.
        """
        self._refits += 1
        now = float(self._refits)
        before = self._pair.in_force
        for round_ in rounds:
            for frame in frames_of(round_, pair=self._pair.id, replica=SELF, incarnation=1):
                self._pair.take(frame, now)
        self._pair.refit(now, now)
        self._pair.new_versions.clear()
        fitted = self._pair.in_force
        if fitted is before:
            return None
        return structs.replace(fitted, version=Version(), source=Source.FITTED)
