"""Whether the fleet is in charge, told in a way that all ranks of an engine tell alike.

A rank that went over to its own fits a step before the others would choose another budget, hence
other shapes, and the engine would hang. Clocks differ between ranks; steps and exchanges do not.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

EXCHANGES = 30
"""How many intervals between exchanges may pass without one: half a minute at one a second."""
LEAST_STEPS = 2000
"""A lease is at least so long, in steps. Until two exchanges have shown how many steps lie between
them nobody knows how long one takes; this is 10 s at 5 ms a step."""
REMEMBERED = 15
"""Gaps between exchanges whose median counts, so that one outage does not make the next lease
longer. Gaps without a step are left out: the engine was idle."""


class Lease:
    """Held from an exchange until it has been too long since.

    >>> lease = Lease(exchanges=2, least_steps=3)
    >>> lease.held
    False
    >>> lease.renew()
    >>> for _ in range(3): lease.step()
    >>> lease.held
    False
    """

    def __init__(self, exchanges: int = EXCHANGES, least_steps: int = LEAST_STEPS) -> None:
        self._exchanges = exchanges
        self._least = least_steps
        self._gaps: deque[int] = deque(maxlen=REMEMBERED)
        self._since: int | None = None
        """Steps since the last exchange; None if there has been none."""

    @property
    def steps(self) -> int:
        """Its length."""
        return max(self._least, self._exchanges * median_low(self._gaps or [0]))

    @property
    def held(self) -> bool:
        """Whether the fleet is in charge."""
        return self._since is not None and self._since < self.steps

    def renew(self) -> None:
        """An exchange."""
        if self._since:
            self._gaps.append(self._since)
        self._since = 0

    def step(self) -> None:
        """A step of the engine."""
        if self._since is not None:
            self._since += 1
