"""How many draft tokens a step verifies, and which.

    survival_k = prod_{j <= k} p_j          of one request: the chance that position k is emitted
    budget     = argmax_B (requests + sum of the B largest survivals) / seconds(B)

and the B (request, position) slots of largest survival are admitted, ties by request, then by
position. Survival never increases along a request, so the winners are prefixes.

The budget must not see this step's draws. Whether position j is admitted may depend on the prefix
and on distributions, never on the token x_j itself; but the survivals behind j depend on x_j,
because the drafter went on from it. An argmax over this step's survivals therefore lets x_j decide,
through B, whether it is looked at, and the output is biased. Given B the ranking is safe: a
request's own later positions never outrank its earlier ones. So `Forecast` predicts the survivals
from what is known before anything is drawn, and B comes from those.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from estimator_service.logistic import Array

Lengths = NDArray[np.intp]

MEMORY = 256
"""Drafts whose tails a forecast remembers."""
NEIGHBOURS = 8
"""Remembered drafts, the most alike in their first position, that a forecast is made of."""


def survival(probabilities: ArrayLike) -> Array:
    """[..., K], the running product of the probabilities [..., K].

    0 from the first one that is no probability on: such a slot is never admitted.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    known = (p >= 0.0) & (p <= 1.0)
    product: Array = np.cumprod(np.where(known, p, 0.0), axis=-1)
    return product


def best_budget(survivals: ArrayLike, seconds: ArrayLike) -> int:
    """The B of the most tokens a second; of several, the smallest.

    Args:
        survivals: [R, K], or [M, R, K] of M equally likely cases, over which B must be the same.
        seconds: [R * K + 1], what a step costs that verifies 0, 1, ... R * K draft tokens.

    Raises:
        ValueError: a cost that is not finite and positive.

    >>> best_budget([[0.9, 0.1]], seconds=[1.0, 1.1, 1.2])
    1
    """
    s = np.asarray(survivals, dtype=np.float64)
    cost = np.asarray(seconds, dtype=np.float64)
    requests, positions = s.shape[-2:]
    if not (np.isfinite(cost) & (cost > 0.0)).all():
        raise ValueError(f"seconds must be finite and positive, got {cost.tolist()}")
    slots = -np.sort(-s.reshape(-1, requests * positions), axis=-1)
    gained = np.zeros(requests * positions + 1)
    np.cumsum(slots.mean(axis=0), out=gained[1:])
    return int(np.argmax((requests + gained) / cost))


def best_depth(survivals: ArrayLike, verify: ArrayLike, draft: ArrayLike) -> int:
    """How many positions to draft, if the best budget for them follows; of several, the fewest.

    Args:
        survivals: [M, R, K], M equally likely cases.
        verify: [R * K + 1], seconds to verify 0, 1, ... R * K draft tokens.
        draft: [K + 1], seconds to draft 0, 1, ... K positions for each request.

    >>> best_depth([[[0.9, 0.1]]], verify=[1.0, 1.1, 1.2], draft=[0.1, 0.2, 0.4])
    1
    """
    s = np.asarray(survivals, dtype=np.float64)
    cost, drafting = np.asarray(verify), np.asarray(draft)
    cases, requests, positions = s.shape
    rates = [requests / (cost[0] + drafting[0])]
    for depth in range(1, positions + 1):
        slots = -np.sort(-s[:, :, :depth].reshape(cases, -1), axis=-1)
        gained = np.cumsum(slots.mean(axis=0))
        seconds = cost[: requests * depth + 1] + drafting[depth]
        rates.append(max(requests / seconds[0], float(((requests + gained) / seconds[1:]).max())))
    return int(np.argmax(rates))


def admit(survivals: ArrayLike, budget: int) -> Lengths:
    """[R], how much of each draft is verified when `budget` slots of [R, K] are.

    A slot of survival 0 is not admitted, whatever the budget: nothing is lost with it.

    >>> admit([[0.9, 0.5], [0.5, 0.4]], 2).tolist()
    [2, 0]
    """
    s = np.asarray(survivals, dtype=np.float64)
    # A stable sort of the flat array breaks ties by request, then by position.
    chosen = np.argsort(-s, axis=None, kind="stable")[:budget]
    chosen = chosen[s.reshape(-1)[chosen] > 0.0]
    return np.bincount(chosen // s.shape[1], minlength=len(s))


class Forecast:
    """What survivals to expect of drafts of which only the first position is known.

    The first position's probability is a function of the prefix alone. Behind it, the tails of
    past drafts that began alike stand for this one's: as many cases as there are of them.
    """

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._first = np.zeros(0)
        self._tails = np.zeros((0, positions))

    def remember(self, survivals: Array, depth: int) -> None:
        """Learn from drafts [R, K] of `depth` positions; called after their budget was chosen.

        What lies behind `depth` is taken to go on as remembered drafts did.
        """
        usable = survivals[:, 0] > 0.0
        if depth == 0 or not usable.any():
            return
        seen = survivals[usable]
        if depth < self._positions:
            at = depth - 1
            whole = self._first[:, None] * self._tails
            mean = whole.mean(axis=0) if len(whole) else np.ones(self._positions)
            ratio = mean[depth:] / mean[at] if mean[at] > 0.0 else np.zeros(len(mean) - depth)
            seen = np.concatenate([seen[:, :depth], seen[:, at : at + 1] * ratio], axis=1)
        first = seen[:, 0]
        self._first = np.concatenate([first, self._first])[:MEMORY]
        self._tails = np.concatenate([seen / first[:, None], self._tails])[:MEMORY]

    def typical(self, requests: int) -> Array | None:
        """[M, R, K], M cases for drafts of which nothing is known; None if none is remembered."""
        if not len(self._first):
            return None
        cases = max(1, min(NEIGHBOURS, len(self._first) // requests))
        rows = np.arange(cases * requests) % len(self._first)
        whole: Array = (self._first[:, None] * self._tails)[rows]
        return whole.reshape(cases, requests, self._positions)

    def survivals(self, first: ArrayLike) -> Array:
        """[M, R, K], M cases for drafts whose first probabilities are `first` [R]."""
        p = np.asarray(first, dtype=np.float64)
        p = np.where((p >= 0.0) & (p <= 1.0), p, 0.0)
        if not len(self._first):
            # Nothing is known: as if every later position were like the first.
            alike: Array = np.power(p[:, None], np.arange(1, self._positions + 1))[None]
            return alike
        cases = min(NEIGHBOURS, len(self._first))
        distance = np.abs(self._first[None, :] - p[:, None])
        nearest = np.argpartition(distance, cases - 1, axis=1)[:, :cases]
        expected: Array = p[None, :, None] * self._tails[nearest].transpose(1, 0, 2)
        return expected
