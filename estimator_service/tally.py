"""What a pair's frames added up to, over its whole life: counters that survive restarts."""

from __future__ import annotations

from msgspec import Struct, field

from estimator_service.logistic import Array
from estimator_service.messages import Frame

MAX_SKIP_REASONS = 32
"""Distinct reasons counted by name; a sender cannot make more series than this."""


class Tally(Struct):
    """Monotonic sums. `counters` are named as `snapshot` documents."""

    counters: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, float] = field(default_factory=dict)
    """Requests verified but not observed, by reason."""
    admitted: list[float] = field(default_factory=list)
    """[K], draft tokens sent to verification."""
    labels: list[float] = field(default_factory=list)
    """[K], labels in frames that were merged, before any influence cap."""
    accepted: list[float] = field(default_factory=list)
    """[K], accepted ones among them."""

    @classmethod
    def empty(cls, positions: int) -> Tally:
        """Nothing yet, for K = `positions`."""
        zeros = [0.0] * positions
        return cls(admitted=zeros[:], labels=zeros[:], accepted=zeros[:])

    def count(self, counter: str, by: float = 1.0) -> None:
        """Add to one counter."""
        self.counters[counter] = self.counters.get(counter, 0.0) + by

    def take_traffic(self, frame: Frame) -> None:
        """Add what a frame says of its replica's traffic, whether its labels are merged or not."""
        self.count("steps", frame.steps)
        self.count("explored_steps", frame.explored_steps)
        for k, n in enumerate(frame.admitted):
            self.admitted[k] += n
        for reason, n in frame.skipped.items():
            known = reason in self.skipped or len(self.skipped) < MAX_SKIP_REASONS
            name = reason if known else "other"
            self.skipped[name] = self.skipped.get(name, 0.0) + n

    def take_labels(self, labels: Array, accepted: Array) -> None:
        """Add merged labels, both [K]."""
        self.labels = (labels + self.labels).tolist()
        self.accepted = (accepted + self.accepted).tolist()
