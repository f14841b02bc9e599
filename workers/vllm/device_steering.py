"""What the verification policy does to vLLM's adaptive verification on the device.

vLLM chooses how many draft tokens to verify from confidences, the predictions handed to
`record_confidences`, and tables of what a step costs. A policy acts on these two and never on the
coefficients: predictions stay true, and learning goes on.

    adaptive            both as they are
    full, advisory      confidence 1 everywhere, and every token count costs the same
    fixed, length L     confidence 1 before position L and 0 from there on, and costs likewise
    an exploring step   costs likewise, for the one step that follows

With equal costs the budget takes whatever is expected to bring anything: confidences of 1 alone
would leave it to the costs. (`advisory` is `full` here; what the budget would have been is not
exported on this path.)

Which steps explore is counted, not drawn, and how long an order to explore holds is told by
exchanges, one a second: every rank must verify the same.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from estimator_service.messages import ExplorationOrder, Policy, PolicyOrder

logger = logging.getLogger(__name__)

EXCHANGE_SECONDS = 1.0
"""Between two exchanges."""

CostTables = tuple[NDArray[np.float64], NDArray[np.float64]]
"""vLLM's: milliseconds to draft for 0, 1, ... requests, and to verify 0, 1, ... tokens."""


class Steering:
    """The orders in force."""

    def __init__(self, positions: int, policy: PolicyOrder | None = None) -> None:
        self._positions = positions
        self.policy = policy or PolicyOrder()
        self.fault: str | None = None
        """Why steering has given up, if it has."""
        self.exploring = False
        """Whether the coming step verifies in full because of an order to explore."""
        self._exploration: ExplorationOrder | None = None
        self._exchanges_left = 0
        self._owed = 0.0
        self._costs: CostTables | None = None
        self._equal: CostTables | None = None

    @property
    def explores(self) -> bool:
        """Whether an order to explore is in force."""
        return self._exploration is not None

    def explore(self, order: ExplorationOrder) -> None:
        """Take an order to explore; it replaces the one before."""
        self._exploration = order
        self._exchanges_left = math.ceil(order.seconds / EXCHANGE_SECONDS)

    def exchanged(self) -> None:
        """Count an exchange: an order to explore ends with its time."""
        self._exchanges_left -= 1
        if self._exchanges_left <= 0:
            self._exploration = None

    def abandon(self) -> None:
        """The fleet is out of reach: explore no more. The policy is an operator's, and stays."""
        self._exploration = None

    def advance(self) -> None:
        """Decide about the coming step."""
        self.exploring = False
        if self._exploration is None or self.policy.policy is not Policy.ADAPTIVE:
            return
        self._owed += self._exploration.share
        if self._owed >= 1.0:
            self._owed -= 1.0
            self.exploring = True

    def fail(self, error: Exception) -> None:
        """Give up: what is not understood is not steered."""
        self.fault = f"steering: {error!r}"
        self.exploring = False
        logger.exception("vLLM verifies by itself from now on, without policies")

    def confidences(self, predictions: Tensor) -> Tensor:
        """What to hand to vLLM for predictions [R, K]. A NaN gets no draft: it predicts nothing."""
        match self.policy.policy:
            case Policy.ADAPTIVE:
                return torch.nan_to_num(predictions, nan=0.0)
            case Policy.FIXED:
                length = self.policy.length or 0
            case Policy.FULL | Policy.ADVISORY:
                length = self._positions
        confidences = torch.ones_like(predictions)
        confidences[:, length:] = 0.0
        return confidences

    def costs(self, tables: CostTables | None) -> CostTables | None:
        """What the coming step's budget reckons with, if it has `tables` now."""
        if tables is not None and tables is not self._equal:
            self._costs = tables
            self._equal = (tables[0], np.full_like(tables[1], tables[1].max()))
        plain = self.policy.policy is Policy.ADAPTIVE and not self.exploring
        return self._costs if plain else self._equal


def steer(manager: Any, steering: Steering) -> None:
    """Let `steering` decide for vLLM's `AdaptiveVerificationManager`, from its next step on.

    Its `record_confidences` ends a step, and the budget of the next one is read after it. Should
    steering fail, vLLM goes on by itself, and `Steering.fault` says why.
    """
    record = manager.record_confidences

    def record_steered(predictions: Tensor, input_batch: Any) -> None:
        confidences = predictions
        if steering.fault is None:
            try:
                confidences = steering.confidences(predictions)
                steering.advance()
                manager.cost_tables = steering.costs(manager.cost_tables)
            except Exception as error:
                steering.fail(error)
        record(confidences, input_batch)

    manager.record_confidences = record_steered
