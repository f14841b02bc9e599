"""Time, passed in."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one that only goes forward, one that people share."""

    def monotonic(self) -> float:
        """Seconds since some start of this process's own."""

    def wall(self) -> float:
        """Unix time, seconds."""


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """`time.monotonic`."""
        return time.monotonic()

    def wall(self) -> float:
        """`time.time`."""
        return time.time()
