from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator_service.logistic import Array
from estimator_service.messages import PolicyOrder
from workers.admission import Admission
from workers.config import CostConfig
from workers.cost import CostTable, StepCost, bucket, isotonic

values = st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.5, 5.0)), min_size=1, max_size=12)


@given(values)
def test_isotonic_never_decreases_and_is_the_nearest(points: list[tuple[float, float]]) -> None:
    y, w = (list(column) for column in zip(*points, strict=True))
    fitted = isotonic(y, w)
    assert all(a <= b for a, b in pairwise(fitted))
    # The minimax formula (Robertson, Wright, Dykstra 1988), an independent way to the optimum.
    n = len(y)

    def mean(i: int, j: int) -> float:
        return float(np.average(y[i : j + 1], weights=w[i : j + 1]))

    exact = [max(min(mean(i, j) for j in range(k, n)) for i in range(k + 1)) for k in range(n)]
    np.testing.assert_allclose(fitted, exact, rtol=1e-9)


def test_buckets_are_in_order_and_each_count_to_32_has_its_own() -> None:
    numbers = [bucket(n) for n in range(1, 600)]
    assert numbers == sorted(numbers)
    assert numbers[:32] == list(range(1, 33))
    widest = max(numbers.count(b) / numbers.index(b) for b in set(numbers) if b > 40)
    assert widest < 0.12


def test_a_cost_is_the_median_of_the_recent_samples_and_never_decreases() -> None:
    table = CostTable(CostConfig(window=3))
    for seconds in (9.0, 1.0, 1.1, 6.0):
        assert table.observe(4, seconds)
    table.observe(8, 2.0)
    assert_costs(table, [1, 4, 6, 8, 16], [1.1, 1.1, 1.55, 2.0, 4.0])
    table.observe(6, 0.5)
    costs = table.seconds(np.arange(1, 20, dtype=np.float64))
    assert costs is not None
    assert (np.diff(costs) >= 0.0).all()


def assert_costs(table: CostTable, counts: list[int], seconds: list[float]) -> None:
    known = table.seconds(np.array(counts, dtype=np.float64))
    assert known is not None
    np.testing.assert_allclose(known, seconds)


@pytest.mark.parametrize("broken", [math.nan, math.inf, 0.0, -1.0])
def test_a_sample_that_is_none_changes_nothing(broken: float) -> None:
    table = CostTable(CostConfig())
    assert not table.observe(4, broken)
    assert not table.observe(0, 1.0)
    assert table.seconds(np.array([4.0])) is None


def test_a_sample_ages_out() -> None:
    table = CostTable(CostConfig(max_age=100))
    table.observe(8, 6.0)
    for _ in range(200):
        table.observe(4, 1.0)
    assert table.sizes == 1
    assert_costs(table, [4, 8], [1.0, 2.0])


def test_one_size_is_no_table() -> None:
    cost = StepCost(CostConfig())
    for _ in range(5):
        cost.observe(requests=1, tokens=8, verify=1.0, draft=0.5, depth=7)
    assert cost.verify(1, 7) is None
    cost.observe(requests=1, tokens=4, verify=0.5, draft=0.5, depth=7)
    seconds = cost.verify(1, 7)
    assert seconds is not None
    assert seconds[[3, 7]].tolist() == [0.5, 1.0]


def by_depth(cost: StepCost) -> list[float]:
    return [cost.draft(1, depth) for depth in range(5)]


def test_drafting_costs_what_its_depth_did_or_its_share_of_the_deepest() -> None:
    cost = StepCost(CostConfig())
    assert by_depth(cost) == [0.0] * 5
    cost.observe(requests=1, tokens=5, verify=1.0, draft=0.8, depth=4)
    np.testing.assert_allclose(by_depth(cost), [0.2, 0.2, 0.4, 0.6, 0.8])
    cost.observe(requests=1, tokens=5, verify=1.0, draft=0.3, depth=2)
    np.testing.assert_allclose(by_depth(cost), [0.2, 0.2, 0.3, 0.6, 0.8])


class Machine:
    """Serves R = 4 requests whose drafts are alike; a step costs what `seconds` says."""

    def __init__(self, seconds: Callable[[int], float], config: CostConfig) -> None:
        self.seconds = seconds
        self.cost = StepCost(config)
        self.rng = np.random.default_rng(0)
        self.admission = Admission(
            K, PolicyOrder(), self.cost, clock=lambda: 0.0, rng=random.Random(0)
        )

    def step(self, factor: float = 1.0) -> None:
        lengths = self.admission.choose(self.probabilities()).lengths
        tokens = R + int(lengths.sum())
        took = factor * self.seconds(tokens) * float(self.rng.uniform(0.95, 1.05))
        self.cost.observe(requests=R, tokens=tokens, verify=took, draft=0.02, depth=7)

    def probabilities(self) -> Array:
        return self.rng.uniform(0.5, 0.9, (R, K))

    def rates(self) -> Array:
        """[R K + 1], tokens per second of each budget, by the true costs."""
        drafts = np.cumprod(np.random.default_rng(1).uniform(0.5, 0.9, (50, R, K)), axis=-1)
        slots = np.sort(drafts.reshape(50, -1))[:, ::-1].mean(axis=0)
        self.gained = np.concatenate([[0.0], slots.cumsum()])
        true = 0.02 + np.array([self.seconds(R + b) for b in range(R * K + 1)])
        rates: Array = (R + self.gained) / true
        return rates

    def best(self) -> int:
        """Tokens of a step with the best budget."""
        return R + int(np.argmax(self.rates()))

    def regret(self) -> float:
        """Of the tokens per second that the true costs allow, the share that is missed."""
        rates = self.rates()
        known = self.cost.verify(R, R * K)
        if known is None:
            return 1.0
        known = known + self.cost.draft(R, K)
        return float(1.0 - rates[np.argmax((R + self.gained) / known)] / rates.max())

    def steps_until_good(self, limit: int) -> int:
        """Steps until the regret is below 3% and stays there for 50 steps."""
        good_since = 0
        for step in range(1, limit + 1):
            self.step()
            if self.regret() >= 0.03:
                good_since = step
            elif step - good_since >= 50:
                return good_since
        raise AssertionError(f"regret is {self.regret():.3f} after {limit} steps")


R, K = 4, 7


def smooth(tokens: int) -> float:
    return 0.03 + 0.002 * tokens


def stepped(tokens: int) -> float:
    """Padded to multiples of eight."""
    return 0.03 + 0.016 * math.ceil(tokens / 8)


@pytest.mark.parametrize("seconds", [smooth, stepped])
def test_costs_are_learned_and_recover(seconds: Callable[[int], float]) -> None:
    config = CostConfig()
    machine = Machine(seconds, config)
    cold = machine.steps_until_good(600)
    for _ in range(300):
        machine.step()

    machine.step(factor=6.0)
    slow = machine.steps_until_good(600)

    # The best size was tried once, and that sample was six times too slow.
    machine = Machine(seconds, config)
    for _ in range(20):
        for tokens in range(R, R + R * K + 1):
            took = seconds(tokens)
            if tokens != machine.best():
                machine.cost.observe(requests=R, tokens=tokens, verify=took, draft=0.02, depth=7)
    machine.cost.observe(
        requests=R,
        tokens=machine.best(),
        verify=6.0 * seconds(machine.best()),
        draft=0.02,
        depth=7,
    )
    once = machine.steps_until_good(3000)

    before = machine.seconds
    machine.seconds = lambda tokens: 2.5 * before(tokens)
    drifted = machine.steps_until_good(3000)

    machine = Machine(seconds, config)
    for _ in range(config.warmup_tries):
        machine.cost.observe(requests=R, tokens=R, verify=seconds(R), draft=0.02, depth=7)
        machine.cost.observe(requests=R, tokens=R + 1, verify=seconds(R + 1), draft=0.02, depth=7)
    never = machine.steps_until_good(3000)
    print(
        f"\n{seconds.__name__}: steps until within 3% of the best: from nothing {cold}, after one "
        f"sample six times too slow {slow}, after the only one of the best "
        f"size was {once}, after the "
        f"machine slowed 2.5 times {drifted}, sizes never tried {never}; exploring "
        f"{config.share:.0%} of the steps, {config.warmup_share:.0%} until "
        f"{config.warmup_tries} budgets were tried"
    )
