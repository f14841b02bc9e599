"""A closed loop: so many requests are always under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from control_plane.load.outcome import Failed, Outcome, Results
from control_plane.load.prompts import Prompt

PAUSE = 0.05
"""Seconds that a place in the loop rests after a failure, doubled after each further one ..."""
LONGEST_PAUSE = 1.0
"""... up to this. A server that refuses at once would otherwise be asked thousands of times."""


class Send(Protocol):
    """Sends one prompt. Raises nothing."""

    async def __call__(self, prompt: Prompt) -> Outcome:
        """What became of it."""


@dataclass
class Stop:
    """Ends a loop: when so many requests were sent, at a time, or by a word from outside."""

    requests: int | None = None
    until: float | None = None
    """By the loop's clock."""
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it to send no more and to cancel what is under way."""


async def closed_loop(
    send: Send,
    prompts: Iterator[Prompt],
    *,
    concurrency: int,
    stop: Stop,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Results:
    """Keep `concurrency` requests under way until `stop`, and wait for the last ones."""
    results, sent, start = Results(), 0, clock()

    async def place() -> None:
        nonlocal sent
        pause = PAUSE
        while not stop.told.is_set():
            if stop.requests is not None and sent >= stop.requests:
                return
            if stop.until is not None and clock() >= stop.until:
                return
            sent += 1
            outcome = await send(next(prompts))
            results.add(outcome)
            on_outcome(outcome)
            if isinstance(outcome, Failed):
                await asyncio.sleep(pause)
                pause = min(2.0 * pause, LONGEST_PAUSE)
            else:
                pause = PAUSE

    places = {asyncio.create_task(place()) for _ in range(concurrency)}
    told = asyncio.create_task(stop.told.wait())
    try:
        left = places
        while left and not told.done():
            await asyncio.wait({*left, told}, return_when=asyncio.FIRST_COMPLETED)
            left = {task for task in left if not task.done()}
        results.cancelled = len(left)
    finally:
        for task in (told, *places):
            task.cancel()
        ended = await asyncio.gather(*places, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    results.seconds = clock() - start
    return results
