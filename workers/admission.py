"""How long each request's verified prefix is: policy, exploration, budget."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from estimator_service.logistic import Array
from estimator_service.messages import ExplorationOrder, Policy, PolicyOrder
from workers.budget import Forecast, Lengths, admit, best_budget, best_depth, survival
from workers.cost import StepCost

_log = logging.getLogger(__name__)
DEPTH_STEPS = 8
"""Steps that a chosen depth holds, unless the number of requests changes: what it is chosen from
moves slowly, and choosing takes time."""
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


@dataclass(frozen=True)
class Plan:
    """What was decided before anything was drafted."""

    depth: int
    """Positions to draft."""
    length: int
    """Of them, those to verify if the budget does not say less."""
    explored: bool = False
    """An exploration order wants whole drafts verified."""


class Admission:
    """Chooses lengths, under orders that may change between any two steps.

    Nothing here sees a draft token: depths follow from the past alone, and lengths from the past
    and from distributions.
    """

    def __init__(
        self,
        positions: int,
        policy: PolicyOrder,
        cost: StepCost,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        draft_depth: bool = True,
        vary_depth: bool = True,
    ) -> None:
        """Chooses for K = `positions`.

        Args:
            positions: K.
            policy: until it is set to another.
            cost: of a step; learned by who holds this.
            clock: seconds, for the end of an exploration order.
            rng: of the budgets and depths that are tried.
            draft_depth: choose, under policy `adaptive`, how many positions are drafted too.
            vary_depth: False drafts K positions in every step, whatever else is said: several ranks
                that draft together must agree, and each has a clock and costs of its own.
        """
        self.policy = policy
        self.cost = cost
        self.draft_depth = draft_depth
        self._positions = positions
        self._vary_depth = vary_depth
        self._clock = clock
        self._rng = rng
        self._forecast = Forecast(positions)
        self._exploration: ExplorationOrder | None = None
        self._until = 0.0
        self._without_cost = 0
        self._depth: tuple[int, int] = (positions, 0)
        """The chosen one, and for how many requests."""
        self._depth_age = DEPTH_STEPS
        self._plan: Plan | None = None

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

    def plan(self, requests: int) -> int:
        """How many positions to draft for each of `requests`, in the step that begins."""
        order = self.exploring
        explored = order is not None and self._rng.random() < order.share
        depth = length = self._positions
        if not explored and self.policy.length is not None:
            depth = length = min(self.policy.length, self._positions)
        elif not explored and self.policy.policy is Policy.ADAPTIVE and self.draft_depth:
            depth = length = self._best_depth(requests)
        if not self._vary_depth:
            depth = self._positions
        self._plan = Plan(depth, length, explored)
        return depth

    def choose(self, probabilities: Array) -> Admitted:
        """Lengths for drafts of which `probabilities` [R, K] are the predicted acceptances.

        A row gets nothing from its first NaN on. Not nothing at all: that NaN may be a
        consequence of the tokens before it, which must not decide whether they are looked at.
        """
        requests = len(probabilities)
        if self._plan is None:
            self.plan(requests)
        plan, self._plan = self._plan, None
        assert plan is not None
        survivals = survival(probabilities)
        full = np.full(requests, plan.length, dtype=np.intp)
        adaptive = self.policy.policy is Policy.ADAPTIVE and not plan.explored
        if adaptive and self._rng.random() < self.cost.explore_share:
            self.cost.tried()
            advised = admit(survivals, self._rng.randint(0, survivals.size))
        else:
            advised = self._advise(probabilities[:, 0], survivals, full)
        self._forecast.remember(survivals, plan.depth)
        return Admitted(advised if adaptive else full, advised, plan.explored)

    def _best_depth(self, requests: int) -> int:
        """The floor: for the share that tries random budgets, drafts are whole."""
        if self._rng.random() < self.cost.explore_share:
            return self._positions
        depth, chosen_for = self._depth
        self._depth_age += 1
        if requests == chosen_for and self._depth_age < DEPTH_STEPS:
            return depth
        survivals = self._forecast.typical(requests)
        verify = self.cost.verify(requests, requests * self._positions)
        if survivals is None or verify is None:
            return self._positions
        draft = [self.cost.draft(requests, d) for d in range(self._positions + 1)]
        depth = best_depth(survivals, verify, draft)
        self._depth, self._depth_age = (depth, requests), 0
        return depth

    def _advise(self, first: Array, survivals: Array, full: Lengths) -> Lengths:
        requests, slots = len(survivals), survivals.size
        verify = self.cost.verify(requests, slots)
        if verify is None:
            self._without_cost += 1
            if self._without_cost == PATIENCE and self.policy.policy is Policy.ADAPTIVE:
                _log.warning("no step was timed yet that a budget could follow: drafts are whole")
            return full
        expected = self._forecast.survivals(first)
        # What is not drafted cannot be verified.
        depth = int(full[0])
        expected[:, :, depth:] = 0.0
        return admit(survivals, best_budget(expected, verify + self.cost.draft(requests, depth)))
