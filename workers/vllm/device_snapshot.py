"""Device tensors that arrive on the host by themselves.

Reading a tensor of the device waits for everything that was asked of it before, and the engine with
it. So a snapshot is only asked for, into pinned memory, and is read when it has arrived: at the
next exchange, a second later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = dict[str, NDArray[Any]]
Label = TypeVar("Label")


class Event(Protocol):
    """A point in the device's stream of work: `torch.cuda.Event`, as far as it is used."""

    def record(self) -> None:
        """Put it behind all the work asked for so far."""

    def query(self) -> bool:
        """Whether that work is done."""


class Snapshots(Generic[Label]):
    """Copies of the same tensors at different times, oldest first.

    >>> tensor = torch.zeros(2)
    >>> snapshots = Snapshots[str]({"x": tensor})
    >>> snapshots.take("before"), tensor.add_(1.0).tolist()
    (True, [1.0, 1.0])
    >>> snapshots.arrived()
    [('before', {'x': array([0., 0.], dtype=float32)})]
    """

    def __init__(
        self,
        sources: Mapping[str, Tensor],
        depth: int = 4,
        event: Callable[[], Event] | None = None,
    ) -> None:
        """
        Args:
            sources: the tensors, by name.
            depth: how many snapshots may be on their way.
            event: makes an event of the sources' device; None where copying waits for nothing,
                and a snapshot has arrived when it is taken.
        """
        self.immediate = event is None
        self._sources = dict(sources)
        # All of it now: pinned memory can cost a synchronization when it is allocated.
        self._free = [
            (
                {
                    name: torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                    for name, source in self._sources.items()
                },
                event() if event is not None else None,
            )
            for _ in range(depth)
        ]
        self._coming: deque[tuple[Label, dict[str, Tensor], Event | None]] = deque()

    def take(self, label: Label) -> bool:
        """Ask for a snapshot of what the tensors hold when the work before it is done.

        Returns False, and does nothing, if `depth` of them have not been fetched.
        """
        if not self._free:
            return False
        copies, event = self._free.pop()
        for name, source in self._sources.items():
            copies[name].copy_(source, non_blocking=True)
        if event is not None:
            event.record()
        self._coming.append((label, copies, event))
        return True

    def arrived(self) -> list[tuple[Label, Arrays]]:
        """Fetch what has arrived; the rest stays on its way, whatever is behind it."""
        fetched = []
        while self._coming and ((event := self._coming[0][2]) is None or event.query()):
            label, copies, event = self._coming.popleft()
            arrays = {name: np.array(copy.numpy()) for name, copy in copies.items()}
            fetched.append((label, arrays))
            self._free.append((copies, event))
        return fetched


def event_of(device: torch.device) -> Callable[[], Event] | None:
    """What `Snapshots` takes for a device: None for the CPU."""
    return torch.cuda.Event if device.type == "cuda" else None
