"""Everything that crosses a process, as frozen msgspec structs.

Encoded with MessagePack. A reader ignores fields that it does not know, and fields that it misses
take their default, so old and new processes understand each other within one `SCHEMA`; a message
of another schema is refused with `UnknownSchemaError`. Arrays travel as little-endian bytes:
`statistics.Statistics`, `sketch.Sketch` and `encode_array` say which.
"""

from __future__ import annotations

import enum
import hashlib
import re
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import ArrayLike

from estimator_service.logistic import INITIAL_INTERCEPT, INITIAL_SLOPE, Array

SCHEMA = 1
MAX_FRAME_BYTES = 256 * 1024
"""More is refused unread. A second's frame takes 2 to 15 KiB at K = 16; a round with very many
strata is sent as several frames."""
MAX_POSITIONS = 64
"""The largest K."""
MAX_STRATA = 256
"""The most strata that one message may name; `config` sets what a pair may have."""

Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+\Z")]
Stratum = Annotated[
    str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*\Z")
]
Count = Annotated[int, Meta(ge=0)]
Serial = Annotated[int, Meta(ge=1, le=2**62)]


class MalformedMessageError(ValueError):
    """Bytes that are not the message they are read as."""


class UnknownSchemaError(ValueError):
    """A message written by a version of SpecFleet whose schema this one cannot read."""


class Version(Struct, frozen=True, order=True):
    """Totally ordered: `epoch` grows with each incarnation of the estimator, `number` within it."""

    epoch: Count = 0
    number: Count = 0

    def __str__(self) -> str:
        """As people write it.

        >>> str(Version(3, 14))
        '3.14'
        """
        return f"{self.epoch}.{self.number}"


class PairKey(Struct, frozen=True):
    """What coefficients belong to. They are never shared across pairs."""

    target: Name
    drafter: Name
    method: Name
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]
    """K."""
    draft_sample_method: Name = "probabilistic"

    @property
    def id(self) -> str:
        """A name for URLs, labels and tables: readable, and distinct for distinct keys.

        >>> PairKey("org/Target-8B", "org/Draft", "eagle3", 7).id
        'target-8b-eagle3-k7-3d3c7db0'
        """
        slug = re.sub(r"[^a-z0-9.]+", "-", self.target.rsplit("/", 1)[-1].lower()).strip("-")
        method = re.sub(r"[^a-z0-9]+", "-", self.method.lower()).strip("-")
        digest = hashlib.blake2b(msgspec.json.encode(self), digest_size=4).hexdigest()
        return f"{slug[:40]}-{method[:20]}-k{self.num_speculative_tokens}-{digest}"


class Source(enum.StrEnum):
    """What made a coefficient set."""

    INITIAL = "initial"
    FITTED = "fitted"
    OVERRIDE = "override"
    ROLLBACK = "rollback"


class CoefficientSet(Struct, frozen=True):
    """One version of a pair's coefficients."""

    version: Version
    source: Source
    slope: float
    intercepts: tuple[float, ...]
    """[K]; for a stratum that is not in `strata`."""
    strata: dict[Stratum, tuple[float, ...]] = {}
    """Effective intercepts [K] of strata that have their own."""

    @classmethod
    def initial(cls, positions: int) -> CoefficientSet:
        """The cold start of a pair with K = `positions`."""
        intercepts = (INITIAL_INTERCEPT,) * positions
        return cls(Version(), Source.INITIAL, INITIAL_SLOPE, intercepts)

    def intercepts_of(self, stratum: str) -> tuple[float, ...]:
        """[K], those that the stratum's drafts are graded with."""
        return self.strata.get(stratum, self.intercepts)


class StratumRound(Struct, frozen=True):
    """One stratum's part of a round."""

    intercepts: bytes
    """[K] float64: the effective intercepts that graded it."""
    statistics: bytes
    """[K, 6] float64: `Statistics.sums`."""
    sketch: bytes
    """`Sketch.pack()`."""


class Frame(Struct, frozen=True, kw_only=True):
    """One round, or the strata of it that fit in, from a replica to the estimator.

    It names the coefficients that graded it by value, so it can be merged whatever became of that
    version meanwhile: superseded, fitted by the replica itself while it was cut off, or published
    by an estimator that died before it stored it. A frame without strata is a sign of life.
    """

    schema: int = SCHEMA
    pair: Name
    """`PairKey.id`."""
    replica: Name
    incarnation: Serial
    """One life of the replica's process; a later life has a larger number."""
    seq: Serial
    """1, 2, 3, ... within the incarnation."""
    oldest: Serial
    """The lowest seq that the sender still holds: what is below and never came, never will."""
    applied: Version
    """The version in force at the replica now."""
    graded: Version
    """The version that graded this round; all of it."""
    slope: float
    """That version's slope."""
    strata: Annotated[dict[Stratum, StratumRound], Meta(max_length=MAX_STRATA)] = {}
    admitted: tuple[Count, ...] = ()
    """[K], draft tokens sent to verification at each position; empty means none."""
    steps: Count = 0
    """Verification steps in the round."""
    explored_steps: Count = 0
    """Those of them that an exploration order made verify in full."""
    skipped: dict[Name, Count] = {}
    """Requests verified but not observed, by reason."""
    heard: Count = 0
    """The newest epoch that the sender has heard of: it believes no estimator of an older one."""


class Policy(enum.StrEnum):
    """What replicas do with the predictions."""

    ADAPTIVE = "adaptive"
    """Verify the prefix that the budget chooses."""
    FIXED = "fixed"
    """Verify a fixed length."""
    FULL = "full"
    """Verify whole drafts."""
    ADVISORY = "advisory"
    """Choose and export, but verify whole drafts."""


class PolicyOrder(Struct, frozen=True):
    """How a pair's replicas verify."""

    policy: Policy = Policy.ADAPTIVE
    length: Annotated[int, Meta(ge=0, le=MAX_POSITIONS)] | None = None
    """Draft tokens to verify; with `Policy.FIXED` only."""


class ExplorationOrder(Struct, frozen=True):
    """Asks one replica to verify whole drafts for a share of its steps, to gather deep labels."""

    share: Annotated[float, Meta(ge=0.0, le=1.0)]
    seconds: Annotated[float, Meta(gt=0.0)]
    """How long the order holds after it arrives, if no other comes."""


class FrameStatus(enum.StrEnum):
    """What the estimator did with a frame. In every case the sender need not change the frame."""

    MERGED = "merged"
    DUPLICATE = "duplicate"
    """Counted before; not again."""
    QUARANTINED = "quarantined"
    """Kept out of the merge: the replica's residuals stand outside the fleet's."""
    DISCARDED = "discarded"
    """Graded under a version that was rolled back."""
    REFUSED = "refused"
    """`Reply.reason` says which rule it broke."""


class Refusal(enum.StrEnum):
    """Why a frame was refused."""

    MALFORMED = "malformed"
    UNKNOWN_SCHEMA = "unknown_schema"
    UNKNOWN_PAIR = "unknown_pair"
    OUT_OF_WINDOW = "out_of_window"
    WRONG_LENGTH = "wrong_length"
    NOT_FINITE = "not_finite"
    OUT_OF_RANGE = "out_of_range"
    IMPOSSIBLE = "impossible"
    TOO_MANY_STRATA = "too_many_strata"


class Reply(Struct, frozen=True, kw_only=True):
    """The estimator's answer to a frame."""

    schema: int = SCHEMA
    epoch: Count
    """Of the estimator's incarnation: when it changes, resend what is above `durable_seq`."""
    status: FrameStatus
    reason: Refusal | None = None
    detail: str = ""
    """For people: the rule and the value that broke it."""
    settled: bool = True
    """Whether the frame's seq counts as arrived. If not, it was refused before anybody looked at
    it, and may be sent again: when its pair is known, say."""
    durable_seq: Count = 0
    """Every seq up to here is stored, or was given up by the sender: forget it."""
    coefficients: CoefficientSet | None = None
    """The set in force, if newer than the frame's `applied`."""
    policy: PolicyOrder = PolicyOrder()
    exploration: ExplorationOrder | None = None


class Pinned(Struct, frozen=True):
    """Coefficients that an operator holds at a value. What is not named keeps fitting."""

    slope: float | None = None
    intercepts: dict[int, float] = {}
    """By position: the pair's, and so every stratum's."""
    strata: dict[Stratum, dict[int, float]] = {}
    """By stratum and position: one stratum's effective intercepts."""


class Override(Struct, frozen=True, kw_only=True):
    """Pins in force, and whose they are."""

    pins: Pinned
    actor: Name
    reason: Annotated[str, Meta(min_length=1, max_length=1000)]
    created_at: float
    """Unix time, seconds."""
    expires_at: float
    """Unix time, seconds."""


class Scores(Struct, frozen=True):
    """`calibration.Calibration` on the wire; None where nothing says anything."""

    observations: float
    log_loss: float | None
    brier: float | None
    ece: float | None
    auc: float | None
    observed: float | None
    predicted: float | None


class DriftEvent(Struct, frozen=True):
    """One detection."""

    at: float
    """Unix time, seconds."""
    stratum: Stratum
    position: Count
    detector: Name
    residual: float
    """The standardized residual that tipped it."""


class FitReport(Struct, frozen=True):
    """`irls.FitResult` on the wire, without its coefficients."""

    at: float
    outcome: Name
    halvings: Count
    step: float
    published: Version | None
    """The version that it made, if any."""


class StratumSnapshot(Struct, frozen=True):
    """What is held of one stratum, and how the coefficients in force do on it."""

    intercepts: tuple[float, ...]
    scores: Scores
    positions: tuple[Scores, ...]
    """[K]."""
    expected_accepted_length: tuple[float | None, ...]
    """[K], when 1..K positions are verified."""


class ReplicaSnapshot(Struct, frozen=True):
    """One replica as the estimator knows it."""

    replica: Name
    incarnation: Count
    applied: Version
    age: float
    """Seconds since its last frame."""
    labels: float
    """Labels merged from it, in all."""
    residual: float | None
    """Its mean residual y - p, of late; None without labels."""
    quarantined: bool
    held: bool
    """Quarantined by an operator, until an operator clears it."""


class PairSnapshot(Struct, frozen=True, kw_only=True):
    """One pair, as of `Snapshot.taken_at`."""

    id: Name
    key: PairKey
    coefficients: CoefficientSet
    """In force."""
    scores: Scores
    first_guess: Scores | None = None
    """What the scores would be with the coefficients that every pair starts from."""
    strata: dict[Stratum, StratumSnapshot]
    replicas: tuple[ReplicaSnapshot, ...]
    frozen: bool
    policy: PolicyOrder
    override: Override | None
    drifting: bool
    """A drift was detected and has not been caught up with: old evidence is being dropped."""
    exploring: tuple[Name, ...]
    """Replicas that hold an exploration order."""
    last_fit: FitReport | None
    drift: tuple[DriftEvent, ...]
    """The latest detections, oldest first."""
    counters: dict[Name, float]
    """Monotonic over the pair's life, estimator restarts included: see `snapshot`."""
    skipped: dict[Name, float]
    """Requests verified but not observed, by reason; likewise."""
    admitted: tuple[float, ...]
    """[K], draft tokens verified in all."""
    labels: tuple[float, ...]
    """[K], labels merged in all."""
    accepted: tuple[float, ...]
    """[K], accepted labels merged in all."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """The estimator, for metrics, the API and people."""

    schema: int = SCHEMA
    epoch: Count
    taken_at: float
    """Unix time, seconds."""
    pairs: tuple[PairSnapshot, ...]
    unattributed: dict[Name, float]
    """Refused frames that belong to no known pair, by reason."""


class _Header(Struct):
    schema: int


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Frame, Reply, Snapshot)
}
_header = msgspec.msgpack.Decoder(_Header)
_UNREADABLE = (msgspec.DecodeError, RecursionError)
"""What msgspec raises; the second for an unknown field nested a thousand deep."""


Message = TypeVar("Message", Frame, Reply, Snapshot)


def encode(message: Frame | Reply | Snapshot) -> bytes:
    """MessagePack of a message."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """Read a message.

    Raises:
        UnknownSchemaError: written under another schema.
        MalformedMessageError: anything else that is not a `kind`.
    """
    try:
        message: Message = _decoders[kind].decode(data)
    except _UNREADABLE as error:
        _check_schema(data)
        raise MalformedMessageError(f"not a {kind.__name__}: {error}") from error
    if message.schema != SCHEMA:
        _check_schema(data)
    return message


def _check_schema(data: bytes) -> None:
    try:
        schema = _header.decode(data).schema
    except _UNREADABLE:
        return
    if schema != SCHEMA:
        raise UnknownSchemaError(f"schema {schema} is not {SCHEMA}, the one read here")


def encode_array(values: ArrayLike) -> bytes:
    """Float64, little-endian, in C order.

    >>> decode_array(encode_array([1.5, 2.5])).tolist()
    [1.5, 2.5]
    """
    return np.ascontiguousarray(values, dtype="<f8").tobytes()


def decode_array(data: bytes) -> Array:
    """The flat, read-only inverse of `encode_array`. Raises ValueError on a broken length."""
    return np.frombuffer(data, dtype="<f8")
