"""Throughput of several verification policies, taken in turns under one load that goes on.

What else the machine does slows all of them alike only if they are measured close together: so
each round has every policy once, in an order that rotates, and ratios are taken within a round.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SPARE = 5.0
"""Seconds that a policy is ordered for beyond its turn, which may begin late."""


@dataclass(frozen=True)
class Arm:
    """One of the policies compared."""

    name: str
    policy: str
    """As `estimator_service.messages.Policy` names it."""
    length: int | None = None
    """Draft tokens to verify, of `fixed`."""


class Ratio(NamedTuple):
    """Of one arm's throughput to another's, over the rounds."""

    mean: float
    """Geometric."""
    low: float
    """The least of any round."""
    high: float


@dataclass
class Comparison:
    """What was measured."""

    arms: Sequence[Arm]
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Tokens per second by arm, of each round."""

    @property
    def rounds(self) -> int:
        """Complete ones."""
        return min((len(rates) for rates in self.rates.values()), default=0)

    def mean(self, arm: str) -> float:
        """An arm's throughput over all complete rounds."""
        return math.fsum(self.rates[arm][: self.rounds]) / self.rounds

    def ratio(self, arm: str, to: str) -> Ratio | None:
        """None if either emitted nothing in some round.

        >>> found = Comparison([], {"a": [4.0, 9.0], "b": [4.0, 4.0]}).ratio("a", "b")
        >>> found.mean, found.low, found.high
        (1.5, 1.0, 2.25)
        """
        pairs = list(zip(self.rates[arm], self.rates[to], strict=False))
        if not pairs or not all(a > 0.0 and b > 0.0 for a, b in pairs):
            return None
        ratios = [a / b for a, b in pairs]
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        return Ratio(mean, min(ratios), max(ratios))


async def compare(
    arms: Sequence[Arm],
    *,
    rounds: int,
    settling: float,
    seconds: float,
    order: Callable[[Arm, float], Awaitable[None]],
    tokens: Callable[[], float],
    on_turn: Callable[[int, Arm], None] = lambda done, arm: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Comparison:
    """Measure each of `arms` once a round, under a load that somebody else keeps up.

    Args:
        settling: seconds served under a policy before any are counted.
        seconds: those that are counted.
        order: puts a policy in force on every replica, for so many seconds.
        tokens: all that were emitted up to now.
        on_turn: told how many turns are done, and whose begins.
    """
    found = Comparison(arms, {arm.name: [] for arm in arms})
    turns = [arms[(r + i) % len(arms)] for r in range(rounds) for i in range(len(arms))]
    for done, arm in enumerate(turns):
        on_turn(done, arm)
        await order(arm, settling + seconds + SPARE)
        await sleep(settling)
        before, start = tokens(), clock()
        await sleep(seconds)
        found.rates[arm.name].append((tokens() - before) / (clock() - start))
    return found
