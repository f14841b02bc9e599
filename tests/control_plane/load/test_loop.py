import asyncio
import itertools
from collections.abc import Awaitable, Callable

from control_plane.load.loop import Stop, closed_loop
from control_plane.load.outcome import Failed, Outcome, Results, Served
from control_plane.load.prompts import Prompt

PROMPTS = [Prompt("w", "p")]


class Sender:
    """Answers after some turns of the event loop, without a clock."""

    def __init__(self, before: Callable[[int], Awaitable[None]] | None = None) -> None:
        self.under_way = self.most = self.sent = 0
        self._before = before

    async def __call__(self, prompt: Prompt) -> Outcome:
        self.sent += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if self._before is not None:
                await self._before(self.sent)
            for _ in range(self.sent % 3):
                await asyncio.sleep(0)
        finally:
            self.under_way -= 1
        return Served(prompt.workload, 1.0, 1, 2)


def loop(sender: Sender, stop: Stop, concurrency: int) -> Results:
    return asyncio.run(
        closed_loop(sender, itertools.cycle(PROMPTS), concurrency=concurrency, stop=stop)
    )


def test_as_many_as_wanted_are_sent_and_so_many_at_a_time() -> None:
    sender = Sender()
    results = loop(sender, Stop(requests=50), concurrency=4)
    assert (sender.sent, len(results.served), results.tokens) == (50, 50, 100)
    assert (sender.most, results.cancelled) == (4, 0)


def test_fewer_requests_than_places_are_sent_once() -> None:
    sender = Sender()
    assert len(loop(sender, Stop(requests=2), concurrency=8).served) == 2


def test_nothing_is_sent_after_the_time_is_up_and_the_last_are_waited_for() -> None:
    now = 0.0

    async def later(sent: int) -> None:
        nonlocal now
        now = float(sent)

    sender = Sender(later)
    results = asyncio.run(
        closed_loop(
            sender,
            itertools.cycle(PROMPTS),
            concurrency=3,
            stop=Stop(until=10.0),
            clock=lambda: now,
        )
    )
    assert 10 <= sender.sent <= 12
    assert len(results.served) == sender.sent
    assert results.seconds == now


def test_a_word_from_outside_cancels_what_is_under_way() -> None:
    stop = Stop()

    async def hang_from_the_sixth_on(sent: int) -> None:
        if sent >= 6:
            if sent == 8:
                stop.told.set()
            await asyncio.Event().wait()

    sender = Sender(hang_from_the_sixth_on)
    results = loop(sender, stop, concurrency=3)
    assert (len(results.served), results.cancelled) == (5, 3)
    assert sender.under_way == 0


def test_a_place_rests_after_a_failure() -> None:
    """A server that refuses at once is not asked as fast as it can refuse."""
    asked = 0

    async def refuse(prompt: Prompt) -> Outcome:
        nonlocal asked
        asked += 1
        return Failed(prompt.workload, "connection refused")

    async def for_a_while() -> Results:
        stop = Stop()
        asyncio.get_running_loop().call_later(0.2, stop.told.set)
        return await closed_loop(refuse, itertools.cycle(PROMPTS), concurrency=2, stop=stop)

    results = asyncio.run(for_a_while())
    # At 0, .05 and .15 s; a slow machine asks less often, none asks more.
    assert 2 <= asked <= 6
    assert results.reasons == {"connection refused": asked}
