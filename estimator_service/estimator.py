"""The fleet's estimator: frames in, coefficients out, and orders between.

A plain class without threads, sockets or sleeps; its shell calls it. Time comes from the clock,
and the store is touched by `open` and `checkpoint` only, so nothing here waits for a disk while a
replica waits for a reply. A shell that must not block saves by itself:

    checkpoint = estimator.prepare()      # on the loop, quick
    store.save(checkpoint, ...)           # elsewhere, may take its time
    estimator.confirm(checkpoint)         # on the loop again
"""

from __future__ import annotations

import msgspec

from estimator_service.clock import Clock, SystemClock
from estimator_service.config import EstimatorConfig
from estimator_service.delivery import Inbox, Verdict
from estimator_service.intake import FrameRefused
from estimator_service.irls import FitResult
from estimator_service.messages import (
    MAX_FRAME_BYTES,
    CoefficientSet,
    Frame,
    FrameStatus,
    MalformedMessageError,
    Override,
    PairKey,
    PairSnapshot,
    Pinned,
    PolicyOrder,
    Refusal,
    Reply,
    Snapshot,
    UnknownSchemaError,
    Version,
    decode,
)
from estimator_service.orders import (
    OrderError,
    UnknownPairError,
    UnknownReplicaError,
    UnknownVersionError,
    check_policy,
    check_seconds,
    check_words,
)
from estimator_service.pair import Pair
from estimator_service.pair_state import PairState
from estimator_service.records import Action, AuditRecord, Checkpoint, Gathered
from estimator_service.snapshot import pair_snapshot
from estimator_service.store import Store

SYSTEM = "specfleet"
"""The actor of what happens by itself."""
MAX_LEAP = 2**20
"""How far ahead an epoch may be for a sender to be believed that it heard of it: one restart a
minute for two years. Above that it is garbage, and may not use up the epochs."""


class IntegrityError(AssertionError):
    """The estimator's state contradicts itself; `check_integrity` lists how."""


class Estimator:
    """Coefficients of every pair of a fleet, learned from its frames.

    Args:
        store: where state outlives the process. Opening an estimator on it begins a new epoch,
            which fences every estimator that was opened on it before.
        config: settings.
        clock: time.
        above: an epoch that this one's must be newer than; `heard` of the estimator before.
    """

    def __init__(
        self,
        store: Store,
        config: EstimatorConfig | None = None,
        clock: Clock | None = None,
        above: int = 0,
    ) -> None:
        self._store = store
        self._config = config or EstimatorConfig()
        self._clock = clock or SystemClock()
        self.epoch = store.begin_epoch(above)
        self.heard = self.epoch
        """The newest epoch that a sender has heard of. Above `epoch`, the store has lost what it
        held: senders believe no older epoch, so the shell has to open an estimator above it."""
        stored = store.load()
        self._inbox = Inbox(stored.sources)
        self._pairs: dict[str, Pair] = {}
        self._unattributed: dict[str, float] = {}
        self._audit: list[AuditRecord] = []
        self._audited = 0
        self._gathered: Gathered | None = None
        now, wall = self._clock.monotonic(), self._clock.wall()
        for record in stored.pairs:
            state = msgspec.json.decode(record.state, type=PairState)
            mine = tuple(e for e in stored.evidence if e.pair == record.key.id)
            pair = Pair(record.key, self._config, self.epoch, now, wall, state, mine)
            pair.restate(wall)
            self._pairs[pair.id] = pair

    # -- frames ---------------------------------------------------------------------------------

    def register(self, key: PairKey) -> str:
        """Make a pair known, if it is not; returns its id.

        Raises OrderError if there are too many, or if another pair's key has the same id.
        """
        known = self._pairs.get(key.id)
        if known is not None and known.key != key:
            raise OrderError(f"{key} and {known.key} share the id {key.id}")
        if known is None:
            if len(self._pairs) >= self._config.max_pairs:
                raise OrderError(f"there are {len(self._pairs)} pairs already, the most allowed")
            now, wall = self._clock.monotonic(), self._clock.wall()
            self._pairs[key.id] = Pair(key, self._config, self.epoch, now, wall)
        return key.id

    def receive(self, data: bytes) -> Reply:
        """`submit` of an encoded frame; bytes that are none are refused, never raised."""
        if len(data) > MAX_FRAME_BYTES:
            detail = f"{len(data)} bytes, above {MAX_FRAME_BYTES}"
            return self._unattributable(Refusal.MALFORMED, detail)
        try:
            return self.submit(decode(data, Frame))
        except UnknownSchemaError as error:
            return self._unattributable(Refusal.UNKNOWN_SCHEMA, str(error))
        except MalformedMessageError as error:
            return self._unattributable(Refusal.MALFORMED, str(error))

    def submit(self, frame: Frame) -> Reply:
        """Take a frame and answer it. A frame that was counted before is not counted again."""
        pair = self._pairs.get(frame.pair)
        if pair is None:
            return self._unattributable(Refusal.UNKNOWN_PAIR, f"no pair {frame.pair!r}")
        source = (frame.replica, frame.incarnation)
        arrival = self._inbox.accept(source, frame.seq, frame.oldest, self._clock.wall())
        pair.tally.count("frames_lost", arrival.lost)
        reason, detail = None, ""
        if arrival.verdict is Verdict.NEW:
            try:
                status = pair.take(frame, self._clock.monotonic())
            except FrameRefused as refused:
                status, reason, detail = FrameStatus.REFUSED, refused.reason, refused.detail
        elif arrival.verdict is Verdict.DUPLICATE:
            status = FrameStatus.DUPLICATE
        else:
            status, reason = FrameStatus.REFUSED, Refusal.OUT_OF_WINDOW
            detail = f"seq {frame.seq} is too far ahead of {frame.oldest}"
        pair.tally.count(f"frames_{status}")
        if reason is not None:
            pair.tally.count(f"refused_{reason}")
        elif max(frame.heard, frame.applied.epoch) <= self.epoch + MAX_LEAP:
            self.heard = max(self.heard, frame.heard, frame.applied.epoch)
        newer = pair.in_force.version > frame.applied
        return Reply(
            epoch=self.epoch,
            status=status,
            reason=reason,
            detail=detail,
            durable_seq=self._inbox.durable_seq(source),
            coefficients=pair.in_force if newer else None,
            policy=pair.policy,
            exploration=pair.exploration.orders.get(frame.replica),
        )

    def _unattributable(self, reason: Refusal, detail: str) -> Reply:
        self._unattributed[reason] = self._unattributed.get(reason, 0.0) + 1.0
        return Reply(
            epoch=self.epoch,
            status=FrameStatus.REFUSED,
            reason=reason,
            detail=detail,
            settled=False,
        )

    # -- learning -------------------------------------------------------------------------------

    @property
    def waiting(self) -> float:
        """Labels that arrived since the last refit."""
        return sum(pair.evidence.waiting for pair in self._pairs.values())

    def refit(self) -> dict[str, FitResult]:
        """Fold in what arrived, end overrides whose time is up, and refit; results by pair."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        results = {}
        for pair in self._pairs.values():
            if pair.override_expired(now):
                before = pair.in_force.version
                pair.end_override("override expired", wall)
                self._note(pair, SYSTEM, Action.EXPIRE, "its time was up", before)
            results[pair.id] = pair.refit(now, wall)
        self._inbox.forget_before(wall - self._config.source_retention)
        # Sums and the watermarks of what is in them, as of one moment: stored together.
        self._gathered = Gathered(
            evidence=tuple(e for pair in self._pairs.values() for e in pair.evidence_records()),
            pairs=tuple(self._pairs),
            sources=self._inbox.changes(),
            forgotten=self._inbox.forgotten(),
        )
        return results

    # -- storing --------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Store everything up to the last refit, and every order. Raises StoreError.

        Raises FencedError if another estimator was opened on the store since: this one can
        change nothing any more and should end.
        """
        checkpoint = self.prepare()
        self._store.save(checkpoint, keep_versions=self._config.history)
        self.confirm(checkpoint)

    def prepare(self) -> Checkpoint:
        """What the store lacks. Saving it twice, or a later one instead, does no harm."""
        return Checkpoint(
            epoch=self.epoch,
            pairs=tuple(pair.record() for pair in self._pairs.values()),
            versions=tuple(v for pair in self._pairs.values() for v in pair.new_versions),
            audit=tuple(self._audit),
            gathered=self._gathered,
        )

    def confirm(self, checkpoint: Checkpoint) -> None:
        """Take note that a checkpoint was stored: replies say so from now on."""
        stored = {(v.pair, v.coefficients.version) for v in checkpoint.versions}
        for pair in self._pairs.values():
            pair.new_versions = [
                v for v in pair.new_versions if (v.pair, v.coefficients.version) not in stored
            ]
        noted = {entry.serial for entry in checkpoint.audit}
        self._audit = [entry for entry in self._audit if entry.serial not in noted]
        if checkpoint.gathered is not None:
            self._inbox.confirm(checkpoint.gathered.sources, checkpoint.gathered.forgotten)
            if self._gathered is checkpoint.gathered:
                self._gathered = None

    # -- orders ---------------------------------------------------------------------------------
    # Each takes effect at once, raises OrderError with nothing changed, and is stored by the
    # next checkpoint: a shell acknowledges it after that.

    def override(
        self, pair_id: str, pins: Pinned, *, actor: str, reason: str, ttl_seconds: float
    ) -> CoefficientSet:
        """Hold some coefficients at given values for a time; the rest keep fitting."""
        check_words(actor, reason)
        check_seconds("ttl_seconds", ttl_seconds, self._config.max_override_seconds)
        pair, before = self._ordered(pair_id)
        wall = self._clock.wall()
        override = Override(
            pins=pins,
            actor=actor,
            reason=reason,
            created_at=wall,
            expires_at=wall + ttl_seconds,
        )
        pair.start_override(override, self._clock.monotonic())
        self._note(pair, actor, Action.OVERRIDE, reason, before, msgspec.json.encode(override))
        return pair.in_force

    def release(self, pair_id: str, *, actor: str, reason: str) -> CoefficientSet:
        """End the override; the fitted coefficients return."""
        check_words(actor, reason)
        pair, before = self._ordered(pair_id)
        if pair.override is None:
            raise OrderError(f"pair {pair_id!r} has no override")
        pair.end_override(reason, self._clock.wall())
        self._note(pair, actor, Action.RELEASE, reason, before)
        return pair.in_force

    def freeze(self, pair_id: str, frozen: bool, *, actor: str, reason: str) -> None:
        """Stop refits, or let them go on. Evidence is gathered all the same."""
        check_words(actor, reason)
        pair, before = self._ordered(pair_id)
        pair.frozen = frozen
        self._note(pair, actor, Action.FREEZE if frozen else Action.UNFREEZE, reason, before)

    def rollback(
        self, pair_id: str, version: Version, *, actor: str, reason: str
    ) -> CoefficientSet:
        """Put an old version's content in force as a new version; see `Pair.roll_back`."""
        check_words(actor, reason)
        pair, before = self._ordered(pair_id)
        content = self._find(pair, version)
        pair.roll_back(content, reason, self._clock.monotonic(), self._clock.wall())
        self._gathered = _without(self._gathered, pair)
        self._note(pair, actor, Action.ROLLBACK, reason, before, msgspec.json.encode(version))
        return pair.in_force

    def policy(self, pair_id: str, policy: PolicyOrder, *, actor: str, reason: str) -> None:
        """Set how the pair's replicas verify."""
        check_words(actor, reason)
        pair, before = self._ordered(pair_id)
        check_policy(policy, pair.positions)
        pair.policy = policy
        self._note(pair, actor, Action.POLICY, reason, before, msgspec.json.encode(policy))

    def hold(self, pair_id: str, replica: str, *, actor: str, reason: str) -> None:
        """Keep a replica's labels out until it is cleared, whatever they say."""
        self._quarantine(pair_id, replica, Action.HOLD, actor, reason)

    def clear(self, pair_id: str, replica: str, *, actor: str, reason: str) -> None:
        """Trust a replica again; its labels are judged afresh."""
        self._quarantine(pair_id, replica, Action.CLEAR, actor, reason)

    def _quarantine(
        self, pair_id: str, replica: str, action: Action, actor: str, reason: str
    ) -> None:
        check_words(actor, reason)
        pair, before = self._ordered(pair_id)
        if replica not in pair.trust.standings:
            raise UnknownReplicaError(pair_id, replica)
        if action is Action.HOLD:
            pair.trust.hold(replica)
        else:
            pair.trust.clear(replica)
        self._note(pair, actor, action, reason, before, msgspec.json.encode(replica))

    def _ordered(self, pair_id: str) -> tuple[Pair, Version]:
        pair = self.pair(pair_id)
        return pair, pair.in_force.version

    def _find(self, pair: Pair, version: Version) -> CoefficientSet:
        if version == Version():
            return CoefficientSet.initial(pair.positions)
        known = [v.coefficients for v in pair.new_versions]
        for coefficients in [pair.in_force, *known]:
            if coefficients.version == version:
                return coefficients
        record = self._store.version(pair.id, version)
        if record is None:
            raise UnknownVersionError(pair.id, version)
        return record.coefficients

    def _note(
        self,
        pair: Pair,
        actor: str,
        action: Action,
        reason: str,
        before: Version,
        detail: bytes = b"{}",
    ) -> None:
        self._audited += 1
        self._audit.append(
            AuditRecord(
                pair=pair.id,
                at=self._clock.wall(),
                actor=actor,
                action=action,
                reason=reason,
                before=before,
                after=pair.in_force.version,
                detail=detail.decode(),
                serial=self._audited,
            )
        )

    # -- reading --------------------------------------------------------------------------------

    def pair(self, pair_id: str) -> Pair:
        """One pair. Raises UnknownPairError."""
        if pair_id not in self._pairs:
            raise UnknownPairError(pair_id)
        return self._pairs[pair_id]

    def coefficients(self, pair_id: str) -> CoefficientSet:
        """In force. Raises UnknownPairError."""
        return self.pair(pair_id).in_force

    def snapshot(self) -> Snapshot:
        """Everything that metrics, the API and people want to know, as of now."""
        now = self._clock.monotonic()
        pairs: tuple[PairSnapshot, ...] = tuple(
            pair_snapshot(pair, now) for pair in self._pairs.values()
        )
        return Snapshot(
            epoch=self.epoch,
            taken_at=self._clock.wall(),
            pairs=pairs,
            unattributed=dict(self._unattributed),
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError, with every contradiction found, if the state has any."""
        faults = [fault for pair in self._pairs.values() for fault in pair.faults()]
        faults += self._inbox.faults()
        if faults:
            raise IntegrityError("; ".join(faults))


def _without(gathered: Gathered | None, pair: Pair) -> Gathered:
    """What is to be stored, with the evidence of one pair as it is now: forgotten.

    The watermarks stay as of the last refit. Rounds that came since are sent again to whoever
    starts from the store, and are discarded there as they were here.
    """
    others = gathered or Gathered(evidence=(), pairs=(), sources=(), forgotten=())
    return Gathered(
        evidence=(*(e for e in others.evidence if e.pair != pair.id), *pair.evidence_records()),
        pairs=(*(name for name in others.pairs if name != pair.id), pair.id),
        sources=others.sources,
        forgotten=others.forgotten,
    )
