"""What became of one request, and of all of them together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Served:
    """A request that was answered in full."""

    workload: str
    seconds: float
    """From sending it to the end of the answer."""
    prompt_tokens: int
    tokens: int
    """Of the answer, as the server counted them."""
    first_token: float | None = None
    """Seconds until the first of them; None unless streamed, or if there was none."""

    @property
    def per_token(self) -> float | None:
        """Seconds per token behind the first; None unless streamed, or if there is no second."""
        if self.first_token is None or self.tokens < 2:
            return None
        return (self.seconds - self.first_token) / (self.tokens - 1)


@dataclass(frozen=True)
class Failed:
    """A request that was not."""

    workload: str
    reason: str
    """In few words, the same for all that failed alike."""
    detail: str = ""
    """What the server or the network said."""


Outcome = Served | Failed


class Spread(NamedTuple):
    """Of some durations, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """None of nothing.

        >>> Spread.of([1.0, 2.0, 3.0]).p50
        2.0
        """
        if not seconds:
            return None
        percentiles = np.percentile(seconds, [50, 90, 99]).tolist()
        return cls(math.fsum(seconds) / len(seconds), *percentiles)


@dataclass
class Results:
    """All outcomes of a load, as they come in."""

    served: list[Served] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    cancelled: int = 0
    """Requests that were under way when the load was interrupted."""
    seconds: float = 0.0
    """From the first request to the end of the last."""

    def add(self, outcome: Outcome) -> None:
        """One more."""
        if isinstance(outcome, Served):
            self.served.append(outcome)
        else:
            self.failed.append(outcome)

    def of(self, workload: str) -> Results:
        """One workload's, over the same time."""
        return Results(
            [outcome for outcome in self.served if outcome.workload == workload],
            [outcome for outcome in self.failed if outcome.workload == workload],
            seconds=self.seconds,
        )

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(outcome.tokens for outcome in self.served)

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def latency(self) -> Spread | None:
        """From sending a request to the end of its answer."""
        return Spread.of([outcome.seconds for outcome in self.served])

    @property
    def first_token(self) -> Spread | None:
        """Time to the first token; None unless streamed."""
        return Spread.of(_known(outcome.first_token for outcome in self.served))

    @property
    def per_token(self) -> Spread | None:
        """Time per output token behind the first; None unless streamed."""
        return Spread.of(_known(outcome.per_token for outcome in self.served))

    @property
    def reasons(self) -> dict[str, int]:
        """Why requests failed, the most frequent reason first."""
        return dict(Counter(outcome.reason for outcome in self.failed).most_common())

    def example(self, reason: str) -> str:
        """What was said of the first that failed for `reason`."""
        return next((f.detail for f in self.failed if f.reason == reason and f.detail), "")


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
