"""Snapshots arrive in order, hold what was there when they were taken, and are not waited for."""

import torch

from workers.vllm.device_snapshot import Snapshots, event_of


class Event:
    def __init__(self) -> None:
        self.recorded = 0
        self.happened = False

    def record(self) -> None:
        self.recorded += 1
        self.happened = False

    def query(self) -> bool:
        return self.happened


class Device:
    """Makes events, and lets them happen."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


def test_a_snapshot_holds_what_was_there_and_not_what_came_after() -> None:
    tensor = torch.tensor([1.0, 2.0])
    snapshots = Snapshots[int]({"x": tensor}, depth=2)
    assert snapshots.immediate
    assert snapshots.take(1)
    tensor.zero_()
    assert snapshots.take(2)
    (first, a), (second, b) = snapshots.arrived()
    assert (first, second) == (1, 2)
    assert (a["x"].tolist(), b["x"].tolist()) == ([1.0, 2.0], [0.0, 0.0])
    assert snapshots.take(3)
    # What was fetched is not overwritten by what comes later.
    assert a["x"].tolist() == [1.0, 2.0]


def test_what_has_not_arrived_is_not_waited_for_and_nothing_overtakes() -> None:
    device = Device()
    snapshots = Snapshots[int]({"x": torch.zeros(1)}, depth=3, event=device)
    assert not snapshots.immediate
    assert snapshots.take(1)
    assert snapshots.take(2)
    # The list of free buffers is a stack.
    *_, second, first = device.events
    assert (first.recorded, second.recorded) == (1, 1)
    second.happened = True
    assert snapshots.arrived() == []
    first.happened = True
    assert [label for label, _ in snapshots.arrived()] == [1, 2]


def test_without_room_nothing_is_taken_and_nothing_lost() -> None:
    device = Device()
    snapshots = Snapshots[int]({"x": torch.zeros(1)}, depth=2, event=device)
    assert [snapshots.take(n) for n in (1, 2, 3)] == [True, True, False]
    for event in device.events:
        event.happened = True
    assert [label for label, _ in snapshots.arrived()] == [1, 2]
    assert snapshots.take(4)


def test_only_a_gpu_has_events_to_wait_for() -> None:
    assert event_of(torch.device("cpu")) is None
    assert event_of(torch.device("cuda")) is torch.cuda.Event
