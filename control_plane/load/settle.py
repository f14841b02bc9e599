"""What the fleet's counters say of a load, once they have caught up with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from control_plane.load.pairs import Totals

EVERY = 0.5
QUIET = 3.5
"""Seconds without change that mean that all has arrived: an exchange and a refit, and some."""
AT_MOST = 10.0


async def settled(
    read: Callable[[], Awaitable[Totals]],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Totals:
    """The counters, when they have stopped moving; as they are after 10 s, if they never do.

    Replicas hand over once a second, and their labels count when they are merged.
    """
    start = clock()
    totals, since = await read(), start
    while clock() - since < QUIET and clock() - start < AT_MOST:
        await sleep(EVERY)
        now = await read()
        if now != totals:
            totals, since = now, clock()
    return totals
