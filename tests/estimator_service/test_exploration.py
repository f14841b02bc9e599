"""Exploration orders: who, how much, and when not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator_service.config import ExplorationConfig
from estimator_service.exploration import MIN_REACH, Exploration

CONFIG = ExplorationConfig()
STARVED = (np.array([[5000.0, 3000.0, 10.0, 0.0]]), np.array([[4000.0, 2400.0, 8.0, 0.0]]))


@given(st.integers(1, 300))
def test_the_fleet_pays_its_share_and_no_replica_more_than_its_own(count: int) -> None:
    exploration = Exploration(CONFIG)
    replicas = [f"r{i}" for i in range(count)]
    exploration.plan(*STARVED, replicas)
    shares = [order.share for order in exploration.orders.values()]
    assert shares
    assert max(shares) <= CONFIG.replica_share
    # A fleet of one pays at least this, or it would take for ever to see anything.
    assert sum(shares) <= max(CONFIG.fleet_share * count, MIN_REACH) * (1 + 1e-9)
    assert sum(shares) >= CONFIG.fleet_share * count * (1 - 1e-9)


def test_replicas_take_turns() -> None:
    exploration = Exploration(CONFIG)
    replicas = [f"r{i}" for i in range(5)]
    turns: list[str] = []
    for _ in range(10):
        exploration.plan(*STARVED, replicas)
        turns.extend(exploration.orders)
    assert turns == replicas * 2


@pytest.mark.parametrize(
    ("labels", "accepted", "starved"),
    [
        ([500, 300, 10, 0], [400, 240, 8, 0], True),
        ([500, 300, 200, 150], [400, 240, 160, 100], False),
        # Hardly any traffic at all: nothing is being withheld.
        ([20, 10, 5, 0], [15, 8, 3, 0], False),
        # Hardly any draft is accepted so far: the labels are not to be had.
        ([5000, 2000, 10, 0], [2000, 10, 0, 0], False),
    ],
)
def test_a_stratum_is_starved_if_labels_that_could_be_had_are_missing(
    labels: list[float], accepted: list[float], starved: bool
) -> None:
    found = Exploration(CONFIG).starved(np.array([labels]), np.array([accepted]))
    assert found is starved


def test_any_stratum_can_be_the_starved_one() -> None:
    plenty = [500.0, 400.0, 300.0, 200.0]
    labels = np.array([plenty, STARVED[0][0]])
    accepted = np.array([plenty, STARVED[1][0]])
    assert Exploration(CONFIG).starved(labels, accepted)


def test_orders_end_when_the_floor_is_reached_or_nobody_is_live() -> None:
    exploration = Exploration(CONFIG)
    exploration.plan(*STARVED, ["r0"])
    assert exploration.orders
    full = np.full((1, 4), 1000.0)
    exploration.plan(full, full, ["r0"])
    assert not exploration.orders
    exploration.plan(*STARVED, [])
    assert not exploration.orders


def test_a_floor_of_zero_switches_exploration_off() -> None:
    exploration = Exploration(ExplorationConfig(label_floor=0.0))
    exploration.plan(*STARVED, ["r0"])
    assert not exploration.orders
