import asyncio

import pytest

from control_plane.load.comparison import Arm, Comparison, compare

ARMS = [Arm("adaptive", "adaptive"), Arm("full", "full"), Arm("2", "fixed", 2)]
RATE = {"adaptive": 30.0, "full": 20.0, "2": 25.0}


class Fleet:
    """Emits at the rate of the policy in force, and slower and slower."""

    def __init__(self) -> None:
        self.now = self.emitted = 0.0
        self.orders: list[str] = []

    async def order(self, arm: Arm, seconds: float) -> None:
        assert seconds > 3.0
        self.orders.append(arm.name)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.emitted += seconds * RATE[self.orders[-1]] / len(self.orders)


def run(fleet: Fleet, rounds: int) -> Comparison:
    return asyncio.run(
        compare(
            ARMS,
            rounds=rounds,
            settling=1.0,
            seconds=2.0,
            order=fleet.order,
            tokens=lambda: fleet.emitted,
            clock=lambda: fleet.now,
            sleep=fleet.sleep,
        )
    )


def test_every_round_has_every_arm_once_in_an_order_that_rotates() -> None:
    fleet = Fleet()
    found = run(fleet, rounds=3)
    rounds = [fleet.orders[i : i + 3] for i in range(0, 9, 3)]
    assert [sorted(r) for r in rounds] == [sorted(RATE)] * 3
    assert [r[0] for r in rounds] == ["adaptive", "full", "2"]
    assert found.rounds == 3


def test_rates_are_of_the_time_behind_the_settling() -> None:
    found = run(Fleet(), rounds=1)
    assert found.rates == {"adaptive": [30.0], "full": [10.0], "2": [pytest.approx(25.0 / 3)]}
    assert found.mean("adaptive") == 30.0


def test_ratios_are_taken_within_a_round() -> None:
    found = Comparison(ARMS, {"adaptive": [40.0, 10.0], "full": [20.0, 10.0], "2": [0.0, 1.0]})
    ratio = found.ratio("adaptive", "full")
    assert ratio is not None
    assert (ratio.low, ratio.high) == (1.0, 2.0)
    assert ratio.mean == pytest.approx(2.0**0.5)
    assert found.ratio("adaptive", "2") is None
