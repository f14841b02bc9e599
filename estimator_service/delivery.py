"""At-least-once delivery, exactly-once counting: both ends of it.

A sender numbers its frames and keeps each one until the estimator says that it is stored. A
receiver remembers which numbers it has counted, and stores that together with what it counted. So
a frame is sent again after a crash on either side, and is never counted twice.

    Outbox.put ----------frame (seq, oldest)---------> Inbox.accept -> count it
    Outbox.answered <----reply (epoch, durable_seq)--- Inbox.durable_seq <- commit of sums + marks
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from msgspec import Struct

WINDOW = 4096
"""How far a frame may be ahead of the lowest one that is missing before it."""

SourceKey = tuple[str, int]
"""(replica, incarnation)."""


class Watermark(Struct, frozen=True):
    """Which sequence numbers of a source are settled: all to `through`, and some beyond."""

    through: int = 0
    beyond: int = 0
    """Bit i: `through` + 1 + i is settled. Bit 0 is never set."""

    def __contains__(self, seq: int) -> bool:
        """Whether `seq` was counted, or given up.

        >>> 3 in Watermark().add(1).add(3), 2 in Watermark().add(1).add(3)
        (True, False)
        """
        return seq <= self.through or bool(self.beyond >> (seq - self.through - 1) & 1)

    def add(self, seq: int) -> Watermark:
        """With `seq` settled."""
        if seq <= self.through:
            return self
        return self._closed(self.through, self.beyond | 1 << (seq - self.through - 1))

    def give_up(self, oldest: int) -> tuple[Watermark, int]:
        """With everything below `oldest` settled, and how many of those had not come."""
        skip = oldest - 1 - self.through
        if skip <= 0:
            return self, 0
        # Not masked with (1 << skip) - 1: a sender may say 2**62, and there is no such number.
        rest = self.beyond >> skip
        came = self.beyond.bit_count() - rest.bit_count()
        return self._closed(self.through + skip, rest), skip - came

    @staticmethod
    def _closed(through: int, beyond: int) -> Watermark:
        """Move `through` over the run of settled numbers that follows it."""
        run = (~beyond & (beyond + 1)).bit_length() - 1
        return Watermark(through + run, beyond >> run)


class Source(Struct, frozen=True):
    """One incarnation of a replica, as the receiver knows it."""

    replica: str
    incarnation: int
    mark: Watermark
    heard_at: float
    """Unix time of its last frame, seconds."""

    @property
    def key(self) -> SourceKey:
        """(replica, incarnation)."""
        return self.replica, self.incarnation


class Verdict(Enum):
    """What the receiver makes of a frame's number."""

    NEW = auto()
    DUPLICATE = auto()
    OUT_OF_WINDOW = auto()


@dataclass(frozen=True)
class Arrival:
    """The verdict on one frame."""

    verdict: Verdict
    lost: int = 0
    """Earlier frames that, as this one's `oldest` says, were given up and never came."""


class Inbox:
    """The receiving end: watermarks of every source, the present ones and the stored ones."""

    def __init__(self, stored: Iterable[Source] = ()) -> None:
        self._sources = {source.key: source for source in stored}
        self._durable = {key: source.mark.through for key, source in self._sources.items()}
        self._changed: set[SourceKey] = set()
        self._forgotten: set[SourceKey] = set()

    def accept(self, key: SourceKey, seq: int, oldest: int, now: float) -> Arrival:
        """Settle a frame's number: `Verdict.NEW` once for each frame, however often it comes.

        Args:
            key: who sent it.
            seq: its number, from 1.
            oldest: the lowest number that the sender still holds.
            now: Unix time, seconds.
        """
        source = self._sources.get(key)
        # What a sender was done with before this receiver knew it is not this receiver's to miss.
        mark = Watermark(through=min(oldest, seq) - 1) if source is None else source.mark
        mark, lost = mark.give_up(min(oldest, seq))
        if seq > mark.through + WINDOW:
            return Arrival(Verdict.OUT_OF_WINDOW)
        verdict = Verdict.DUPLICATE if seq in mark else Verdict.NEW
        self._sources[key] = Source(*key, mark.add(seq), now)
        self._changed.add(key)
        self._forgotten.discard(key)
        return Arrival(verdict, lost)

    def durable_seq(self, key: SourceKey) -> int:
        """Everything up to here is stored, or was given up by its sender."""
        return self._durable.get(key, 0)

    def changes(self) -> tuple[Source, ...]:
        """Every source that differs from what is stored, as it is now."""
        return tuple(self._sources[key] for key in sorted(self._changed))

    def confirm(self, stored: Iterable[Source], forgotten: Iterable[SourceKey] = ()) -> None:
        """Take note that these changes were committed."""
        for source in stored:
            if source.key in self._sources:
                self._durable[source.key] = source.mark.through
                if self._sources[source.key] == source:
                    self._changed.discard(source.key)
        self._forgotten.difference_update(forgotten)

    def forget_before(self, heard_at: float) -> None:
        """Forget sources that were silent since. A frame resent by one would count again."""
        silent = [key for key, source in self._sources.items() if source.heard_at < heard_at]
        for key in silent:
            del self._sources[key]
            self._durable.pop(key, None)
            self._changed.discard(key)
            self._forgotten.add(key)

    def forgotten(self) -> tuple[SourceKey, ...]:
        """Sources forgotten since the last confirmed checkpoint."""
        return tuple(sorted(self._forgotten))

    def faults(self) -> list[str]:
        """What is wrong with the watermarks; empty if nothing is."""
        return [
            f"source {key}: stored up to {self._durable.get(key, 0)}, counted to {mark.through}"
            for key, mark in ((key, source.mark) for key, source in self._sources.items())
            if mark.through < self._durable.get(key, 0) or mark.beyond < 0 or mark.beyond & 1
        ]


Payload = TypeVar("Payload")


class Outbox(Generic[Payload]):
    """The sending end: what is not known to be stored, bounded.

    >>> box = Outbox[str](capacity=2)
    >>> [box.put(x) for x in "abc"], box.dropped
    ([1, 2, 3], 1)
    >>> box.answered(2, epoch=1, durable_seq=0)
    >>> box.due()
    [(3, 'c')]
    >>> box.answered(3, epoch=2, durable_seq=0)  # another estimator: it may not know 2
    >>> box.due(), box.oldest
    ([(2, 'b')], 2)
    """

    def __init__(self, capacity: int = 1024) -> None:
        if not 1 <= capacity <= WINDOW:
            raise ValueError(f"capacity must be in 1..{WINDOW}, got {capacity}")
        self._capacity = capacity
        self._held: dict[int, Payload] = {}
        self._answered: set[int] = set()
        self._last = 0
        self._epoch = 0
        self.dropped = 0
        """Payloads given up for want of room, the oldest first."""

    @property
    def epoch(self) -> int:
        """The newest that was heard of, 0 before the first reply: `Frame.heard`."""
        return self._epoch

    @property
    def oldest(self) -> int:
        """The lowest number still held, or the next one if none is: `Frame.oldest`."""
        return next(iter(self._held), self._last + 1)

    def put(self, payload: Payload) -> int:
        """Hold a payload until it is stored; returns its number."""
        self._last += 1
        self._held[self._last] = payload
        if len(self._held) > self._capacity:
            self._forget(self.oldest)
            self.dropped += 1
        return self._last

    def __len__(self) -> int:
        """How many payloads are held."""
        return len(self._held)

    def due(self) -> list[tuple[int, Payload]]:
        """What the present estimator has not answered yet, in order."""
        return [(seq, x) for seq, x in self._held.items() if seq not in self._answered]

    def answered(self, seq: int, epoch: int, durable_seq: int, settled: bool = True) -> None:
        """Take note of a reply; a payload that is not settled by it stays due.

        A reply of an older estimator than was heard says nothing.
        """
        if epoch < self._epoch:
            return
        if epoch > self._epoch:
            self._epoch = epoch
            self._answered.clear()
        if settled and seq in self._held:
            self._answered.add(seq)
        while self._held and self.oldest <= durable_seq:
            self._forget(self.oldest)

    def _forget(self, seq: int) -> None:
        del self._held[seq]
        self._answered.discard(seq)
