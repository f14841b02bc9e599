"""How long each request's verified prefix is: policy, exploration, budget."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from estimator_service.logistic import Array
from estimator_service.messages import ExplorationOrder, Policy, PolicyOrder
from workers.budget import Forecast, Lengths, admit, best_budget, survival
from workers.cost import StepCost

_log = logging.getLogger(__name__)
PATIENCE = 100
"""Steps without a cost table before it is worth a warning."""


@dataclass(frozen=True, eq=False)
class Admitted:
    """One step's choice."""

    lengths: Lengths
    """[R], draft tokens to verify."""
    advised: Lengths
    """[R], those that the budget would verify; the same under policy `adaptive`."""
    explored: bool = False
    """An exploration order made it verify whole drafts."""


class Admission:
    """Chooses lengths, under orders that may change between any two steps.

    Nothing here sees a draft token: lengths follow from distributions and from the past.
    """

    def __init__(
        self,
        positions: int,
        policy: PolicyOrder,
        cost: StepCost,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.policy = policy
        self.cost = cost
        self._positions = positions
        self._clock = clock
        self._rng = rng
        self._forecast = Forecast(positions)
        self._exploration: ExplorationOrder | None = None
        self._until = 0.0
        self._without_cost = 0

    def explore(self, order: ExplorationOrder) -> None:
        """Verify whole drafts for a share of the steps, from now on for the order's seconds."""
        self._exploration = order
        self._until = self._clock() + order.seconds

    @property
    def exploring(self) -> ExplorationOrder | None:
        """The exploration order in force."""
        if self._exploration is not None and self._clock() >= self._until:
            self._exploration = None
        return self._exploration

    def choose(self, probabilities: Array) -> Admitted:
        """Lengths for drafts of which `probabilities` [R, K] are the predicted acceptances.

        A row gets nothing from its first NaN on. Not nothing at all: that NaN may be a
        consequence of the tokens before it, which must not decide whether they are looked at.
        """
        requests = len(probabilities)
        survivals = survival(probabilities)
        full = np.full(requests, self._positions, dtype=np.intp)
        advised = self._advise(probabilities[:, 0], survivals, full)
        self._forecast.remember(survivals)
        order = self.exploring
        if order is not None and self._rng.random() < order.share:
            return Admitted(full, advised, explored=True)
        if self.policy.policy is Policy.ADAPTIVE:
            return Admitted(advised, advised)
        length = self.policy.length if self.policy.policy is Policy.FIXED else None
        lengths = full if length is None else np.minimum(full, length)
        return Admitted(lengths, advised)

    def _advise(self, first: Array, survivals: Array, full: Lengths) -> Lengths:
        slots = survivals.size
        if self._rng.random() < self.cost.explore_share:
            return admit(survivals, self._rng.randint(0, slots))
        seconds = self.cost.seconds(len(survivals), slots)
        if seconds is None:
            self._without_cost += 1
            if self._without_cost == PATIENCE:
                _log.warning("no step was timed yet that a budget could follow: drafts are whole")
            return full
        return admit(survivals, best_budget(self._forecast.survivals(first), seconds))
