"""Who verifies whole drafts for a while, so that every position keeps a floor of labels.

A pessimistic intercept makes sure that its position is never admitted, and so never learns that
it was wrong. The remedy costs verification that the budget would not have spent, so it is bounded
(a share of the fleet's steps), shared (a few replicas at a time, taking turns) and only for what
can be had: the labels of a position that hardly any draft reaches are not worth their price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from estimator_service.config import ExplorationConfig
from estimator_service.logistic import Array
from estimator_service.messages import ExplorationOrder

MIN_REACH = 0.02
"""Share of drafts accepted up to a position, below which its labels are not worth exploring for."""


class Exploration:
    """Exploration orders of one pair."""

    def __init__(self, config: ExplorationConfig) -> None:
        self._config = config
        self._turn = 0
        self._orders: dict[str, ExplorationOrder] = {}

    @property
    def orders(self) -> dict[str, ExplorationOrder]:
        """By replica; who is not in it explores nothing."""
        return self._orders

    def plan(self, labels: Array, accepted: Array, replicas: Sequence[str]) -> None:
        """Renew the orders.

        Args:
            labels: [S, K], labels held per stratum and position.
            accepted: [S, K], accepted ones among them.
            replicas: those live, in a stable order.
        """
        self._orders = {}
        if not replicas or not self.starved(labels, accepted):
            return
        # So many replicas that none of them pays more than its share.
        steps = self._config.fleet_share * len(replicas)
        count = min(len(replicas), max(1, math.ceil(steps / self._config.replica_share)))
        # A fleet too small to share the price pays what one replica may.
        share = min(max(steps / count, MIN_REACH), self._config.replica_share)
        order = ExplorationOrder(share, self._config.order_seconds)
        for i in range(count):
            self._orders[replicas[(self._turn + i) % len(replicas)]] = order
        self._turn = (self._turn + count) % len(replicas)

    def starved(self, labels: Array, accepted: Array) -> bool:
        """Whether some position lacks labels that exploring could bring.

        Labels nest: a position has no more of them than the one before. So only each stratum's
        first position below the floor matters, and how many drafts are accepted up to it.
        """
        below = labels < self._config.label_floor
        for n, y, lacking in zip(labels, accepted, below, strict=True):
            first = int(np.argmax(lacking))
            # Lacking at position 0: the stratum has hardly any traffic, nothing is withheld.
            if lacking[first] and first > 0 and np.prod(y[:first] / n[:first]) >= MIN_REACH:
                return True
        return False
