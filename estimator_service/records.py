"""What the store holds, as plain frozen records: the estimator makes them, the store keeps them."""

from __future__ import annotations

import enum

from msgspec import Struct

from estimator_service.delivery import Source
from estimator_service.messages import CoefficientSet, PairKey, Scores, Version


class PairRecord(Struct, frozen=True):
    """A pair and its state apart from evidence and history."""

    key: PairKey
    state: bytes
    """`pair_state.PairState` as JSON: coefficients, override, policy, freeze, counters, drift."""


class EvidenceRecord(Struct, frozen=True):
    """One stratum's merged evidence."""

    pair: str
    stratum: str
    quadratic: bytes
    """[K, 6] float64: `statistics.Quadratic.sums`."""
    sketch: bytes
    """[3, K, BINS] float64: `sketch.Sketch.cells`, discounted."""


class VersionRecord(Struct, frozen=True):
    """One coefficient version of a pair's history."""

    pair: str
    coefficients: CoefficientSet
    at: float
    """Unix time, seconds."""
    reason: str
    scores: Scores | None
    """Calibration on what was held when it was made; None if nothing was."""


class Action(enum.StrEnum):
    """What an operator did, or what befell an operator's order."""

    OVERRIDE = "override"
    RELEASE = "release"
    EXPIRE = "expire"
    FREEZE = "freeze"
    UNFREEZE = "unfreeze"
    ROLLBACK = "rollback"
    POLICY = "policy"
    HOLD = "hold"
    CLEAR = "clear"


class AuditRecord(Struct, frozen=True):
    """One line of the audit log."""

    pair: str
    at: float
    """Unix time, seconds."""
    actor: str
    action: Action
    reason: str
    before: Version
    """In force before the action."""
    after: Version
    """In force after it; the same if the action made no version."""
    detail: str
    """The order's content as JSON."""
    serial: int
    """Number of the entry within the epoch, from 1."""


class Gathered(Struct, frozen=True):
    """Evidence and the watermarks of what is counted in it: stored together or not at all."""

    evidence: tuple[EvidenceRecord, ...]
    """Every stratum of every pair named in `pairs`; strata of those pairs not listed are gone."""
    pairs: tuple[str, ...]
    sources: tuple[Source, ...]
    """Changed since the last checkpoint that was stored."""
    forgotten: tuple[tuple[str, int], ...]
    """(replica, incarnation) of sources that are no longer kept."""


class Checkpoint(Struct, frozen=True):
    """One transaction. `versions` and `audit` hold what is new, in order."""

    epoch: int
    pairs: tuple[PairRecord, ...]
    versions: tuple[VersionRecord, ...]
    audit: tuple[AuditRecord, ...]
    gathered: Gathered | None
    """None where only orders are stored: the watermarks then stay as they are."""


class Stored(Struct, frozen=True):
    """What a new incarnation of the estimator starts from."""

    pairs: tuple[PairRecord, ...]
    evidence: tuple[EvidenceRecord, ...]
    sources: tuple[Source, ...]
    versions: tuple[VersionRecord, ...]
    """The newest of each pair."""
