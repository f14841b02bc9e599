"""What a pair remembers: of its replicas while it runs, and of itself across restarts."""

from __future__ import annotations

from msgspec import Struct

from estimator_service.drift.monitor import MonitorState
from estimator_service.messages import (
    CoefficientSet,
    DriftEvent,
    FitReport,
    Override,
    PolicyOrder,
    Version,
)
from estimator_service.tally import Tally


class Replica(Struct):
    """What a replica last said."""

    incarnation: int
    applied: Version
    heard_at: float
    """Monotonic clock."""
    labels: float = 0.0
    """Labels taken from it since the estimator started."""


class PairState(Struct):
    """What of a pair outlives the process, besides evidence and history."""

    in_force: CoefficientSet
    fitted: CoefficientSet
    """What the labels say, operators apart; its version says nothing."""
    tally: Tally
    strata: list[str] = []
    """All that have a place, in order."""
    override: Override | None = None
    policy: PolicyOrder = PolicyOrder()
    frozen: bool = False
    quarantined: list[str] = []
    held: list[str] = []
    monitor: MonitorState = MonitorState()
    events: list[DriftEvent] = []
    last_fit: FitReport | None = None
    voided: tuple[Version, Version] | None = None
    """Rounds graded above the first version and below the second were rolled back."""
    grace_until: float = 0.0
    """Unix time until which a rollback holds refits."""
