import asyncio

import pytest

from control_plane.load.pairs import PairsError, Totals, of_target, operator_url, read_pairs
from control_plane.load.settle import AT_MOST, QUIET, settled
from tests.control_plane.load.broken_server import broken_server


def pair(target: str, scale: float = 1.0) -> dict[str, object]:
    return {
        "key": {"target": target},
        "counters": {
            "steps": 10.0 * scale,
            "admitted": [8.0 * scale, 4.0 * scale],
            "observed": [8.0 * scale, 3.0 * scale],
            "accepted": [3.0 * scale, 1.0 * scale],
        },
    }


def test_a_draft_emits_what_was_accepted_and_the_targets_own_token() -> None:
    before = Totals.of([pair("a")])
    grown = Totals.of([pair("a", 3.0)]).plus(before, -1.0)
    assert grown == Totals(20.0, 16.0, 8.0, 22.0, 24.0, 16.0)
    assert grown.emitted_per_draft == 1.5
    assert grown.admitted_per_draft == 1.5
    assert (Totals().emitted_per_draft, Totals().admitted_per_draft) == (None, None)


def test_counters_are_those_of_one_target_whatever_its_drafter() -> None:
    pairs = [pair("a"), pair("b", 5.0), pair("a", 2.0)]
    assert Totals.of(of_target(pairs, "a")) == Totals.of([pair("a", 3.0)])
    assert Totals.of(of_target(pairs, "c")) == Totals()


def test_the_document_is_read_from_the_operators_api() -> None:
    with broken_server() as server:
        url = operator_url(server.url)
        with pytest.raises(PairsError, match="HTTP 503"):
            read_pairs(url)
        server.pairs = [pair("a")]
        assert read_pairs(url) == server.pairs
        server.pairs = [{"key": {}}]
        with pytest.raises(PairsError, match="not the pairs of a fleet"):
            read_pairs(url)
    with pytest.raises(PairsError, match="refused"):
        read_pairs(url)


class Counting:
    """A fleet whose counters stop moving at some time, and a clock that sleep moves."""

    def __init__(self, stops: float) -> None:
        self.now = 0.0
        self._stops = stops

    async def read(self) -> Totals:
        return Totals(steps=min(self.now, self._stops))

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("stops", "ends"), [(0.0, QUIET), (4.0, 4.0 + QUIET), (99.0, AT_MOST)])
def test_counters_are_read_when_they_have_been_quiet(stops: float, ends: float) -> None:
    fleet = Counting(stops)
    totals = asyncio.run(settled(fleet.read, clock=lambda: fleet.now, sleep=fleet.sleep))
    assert totals == Totals(steps=min(stops, ends))
    assert fleet.now == ends
