"""What trimming does to the emitted text, computed exactly on drafters small enough for it."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator_service.logistic import Array, feature, predict
from estimator_service.messages import PolicyOrder
from workers.admission import Admission
from workers.budget import admit, best_budget, survival
from workers.config import CostConfig
from workers.cost import StepCost

HALF = Fraction(1, 2)


def first_token(
    p: list[Fraction], q: list[Fraction], is_verified: Callable[[int], bool]
) -> list[Fraction]:
    """Distribution of the first emitted token if the drafted one is verified or not, as told.

    Verified: accepted with min(1, p/q), else drawn from what is left of p. Not: drawn from p.
    """
    emitted = [Fraction(0)] * len(p)
    left = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    for x, q_x in enumerate(q):
        if not is_verified(x):
            for y, p_y in enumerate(p):
                emitted[y] += q_x * p_y
            continue
        accepted = min(Fraction(1), p[x] / q_x)
        emitted[x] += q_x * accepted
        for y, rest in enumerate(left):
            if sum(left):
                emitted[y] += q_x * (1 - accepted) * rest / sum(left)
    return emitted


def test_trimming_by_the_drawn_tokens_probability_biases_the_output() -> None:
    p, q = [HALF, HALF], [Fraction(1, 5), Fraction(4, 5)]
    assert first_token(p, q, lambda x: q[x] >= HALF) == [Fraction(2, 5), Fraction(3, 5)]
    assert first_token(p, q, lambda _: True) == p
    assert first_token(p, q, lambda _: False) == p


# A drafter whose first token makes the continuation certain or hopeless, and costs that make
# two verified tokens pay and one not.
TARGET = [Fraction(4, 5), Fraction(1, 5)]
DRAFTER = [HALF, HALF]
PROMISING = np.array([0.5, 0.999])
HOPELESS = np.array([0.5, 0.001])
SECONDS = np.array([1.0, 1.6, 1.6])


class KnownCost(StepCost):
    """That does not have to be learned."""

    def __init__(self, seconds: Array, share: float) -> None:
        super().__init__(CostConfig(share=share, warmup_tries=0))
        self._seconds = seconds

    def verify(self, requests: int, slots: int) -> Array:
        return self._seconds[: slots + 1]


def admission(positions: int, seconds: Array, *, seed: int = 0, share: float = 0.0) -> Admission:
    return Admission(
        positions,
        PolicyOrder(),
        KnownCost(seconds, share),
        clock=lambda: 0.0,
        rng=random.Random(seed),
    )


def test_a_budget_that_sees_the_draws_biases_the_output() -> None:
    def naive(x: int) -> bool:
        survivals = survival([[PROMISING, HOPELESS][x]])
        return bool(admit(survivals, best_budget(survivals, SECONDS))[0] > 0)

    assert first_token(TARGET, DRAFTER, naive) == [Fraction(9, 10), Fraction(1, 10)]


def test_our_budget_does_not_see_the_draws_and_the_output_is_exact() -> None:
    mine = admission(2, SECONDS)
    rng = random.Random(1)
    budgets = set()
    for _ in range(200):
        # What it would choose after either draw, from the same past.
        chosen = [
            int(copy.deepcopy(mine).choose(row[None]).lengths[0]) for row in (PROMISING, HOPELESS)
        ]
        budgets.add(chosen[0])
        assert first_token(TARGET, DRAFTER, [n > 0 for n in chosen].__getitem__) == TARGET
        mine.choose([PROMISING, HOPELESS][rng.random() < 0.5][None])
    # Both answers occur: the past makes whole drafts look worth it at one time and not at another.
    assert budgets == {0, 2}


@st.composite
def trees(draw: st.DrawFn) -> list[dict[tuple[int, ...], float]]:
    """For each of two requests, the drafter's certainty after every prefix of its draws."""
    certainty = st.floats(-3.0, 3.0)
    prefixes = [x for n in range(POSITIONS) for x in itertools.product((0, 1), repeat=n)]
    return [{x: draw(certainty) for x in prefixes} for _ in range(2)]


POSITIONS = 3
pasts = st.lists(
    st.lists(st.floats(0.01, 1.0), min_size=POSITIONS, max_size=POSITIONS), min_size=1, max_size=12
)
costs = st.lists(st.floats(0.5, 3.0), min_size=2 * POSITIONS + 1, max_size=2 * POSITIONS + 1)


@settings(max_examples=50)
@given(trees(), pasts, costs, st.integers(0, 9), st.sampled_from([0.0, 0.5]))
def test_whether_a_token_is_verified_never_depends_on_it_or_on_what_follows(
    requests: list[dict[tuple[int, ...], float]],
    past: list[list[float]],
    seconds: list[float],
    seed: int,
    share: float,
) -> None:
    mine = admission(POSITIONS, np.array(seconds), seed=seed, share=share)
    mine._forecast.remember(survival(past), POSITIONS)
    draws = list(itertools.product((0, 1), repeat=POSITIONS))
    verified: dict[tuple[object, ...], bool] = {}
    for drawn in itertools.product(draws, repeat=2):
        pairs = list(zip(requests, drawn, strict=True))
        z = [[[tree[x[:k]], 0.0] for k in range(POSITIONS)] for tree, x in pairs]
        p = predict(1.0, 0.0, feature(np.array(z)))
        lengths = copy.deepcopy(mine).choose(p).lengths
        for r, k in itertools.product(range(2), range(POSITIONS)):
            # All that may matter: the request's own earlier draws, and the other's.
            known = (r, k, drawn[r][:k], drawn[1 - r])
            admitted = bool(lengths[r] > k)
            assert verified.setdefault(known, admitted) == admitted


def test_the_property_above_is_broken_by_a_budget_that_sees_the_draws() -> None:
    lengths = [
        admit(survival(row[None]), best_budget(survival(row[None]), SECONDS)).tolist()
        for row in (PROMISING, HOPELESS)
    ]
    assert lengths == [[2], [0]]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_two_equal_workers_choose_alike(share: float) -> None:
    rows = np.random.default_rng(0).uniform(0.1, 1.0, (20, 3, POSITIONS))
    cost = np.linspace(1.0, 3.0, 3 * POSITIONS + 1)
    one, two = (admission(POSITIONS, cost, seed=4, share=share) for _ in range(2))
    for p in rows:
        assert one.choose(p).lengths.tolist() == two.choose(p).lengths.tolist()
