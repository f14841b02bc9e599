"""What a step costs, learned while serving.

A step's time is no straight line over its token count: kernels pad, caches overflow, threads
divide unevenly. So the cost is a table: per bucket of token counts the median of the recent
samples, made monotone by isotonic regression, and straight lines between.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

import numpy as np

from estimator_service.logistic import Array
from workers.config import CostConfig

EXACT = 32
"""Counts up to this have a bucket each; beyond, a bucket spans a tenth of its count."""
SWEEP = 64
"""Steps between two searches for samples that have aged out."""


def bucket(count: int) -> int:
    """The bucket of a count.

    >>> [bucket(n) for n in (1, 32, 33, 34, 36, 1000)]
    [1, 32, 32, 33, 33, 68]
    """
    if count <= EXACT:
        return count
    return EXACT + round(math.log(count / EXACT) / math.log(1.1))


def isotonic(values: list[float], weights: list[float]) -> list[float]:
    """The nearest sequence that never decreases, by weighted least squares.

    Pool adjacent violators (Barlow, Bartholomew, Bremner, Brunk 1972).

    >>> isotonic([1.0, 3.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    [1.0, 2.5, 2.5, 4.0]
    """
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            v, w, n = pools.pop()
            total = w + pool[1]
            pool = ((v * w + pool[0] * pool[1]) / total, total, n + pool[2])
        pools.append(pool)
    return [value for value, _, count in pools for _ in range(count)]


class _Sample(NamedTuple):
    step: int
    size: int
    seconds: float


class CostTable:
    """Seconds as a function of a count: tokens verified, or requests drafted for."""

    def __init__(self, config: CostConfig) -> None:
        self._config = config
        self._samples: dict[int, deque[_Sample]] = {}
        self._centres: dict[int, tuple[float, float]] = {}
        self._curve: tuple[Array, Array] | None = None
        self._step = 0

    @property
    def sizes(self) -> int:
        """Buckets that hold a sample."""
        return len(self._centres)

    def observe(self, count: int, seconds: float) -> bool:
        """Add a sample; returns False if it is none: not finite, or not positive."""
        self._step += 1
        if self._step % SWEEP == 0:
            self._age()
        if not (count > 0 and math.isfinite(seconds) and seconds > 0.0):
            return False
        key = bucket(count)
        samples = self._samples.setdefault(key, deque(maxlen=self._config.window))
        samples.append(_Sample(self._step, count, seconds))
        self._centre(key)
        return True

    def seconds(self, counts: Array | float) -> Array | None:
        """What counts [n] cost, or one of them; None as long as nothing is known.

        Below the smallest size that was seen it is as much as there; beyond the largest, it grows
        in proportion.
        """
        if not self._centres:
            return None
        if self._curve is None:
            keys = sorted(self._centres)
            at = [self._centres[key][0] for key in keys]
            medians = [self._centres[key][1] for key in keys]
            weights = [float(len(self._samples[key])) for key in keys]
            self._curve = np.array(at), np.array(isotonic(medians, weights))
        at_, cost = self._curve
        known: Array = np.interp(counts, at_, cost) * np.maximum(counts / at_[-1], 1.0)
        return known

    def _centre(self, key: int) -> None:
        samples = self._samples[key]
        at = sum(sample.size for sample in samples) / len(samples)
        self._centres[key] = at, median(sample.seconds for sample in samples)
        self._curve = None

    def _age(self) -> None:
        oldest = self._step - self._config.max_age
        for key in list(self._samples):
            samples = self._samples[key]
            if samples[0].step > oldest:
                continue
            while samples and samples[0].step <= oldest:
                samples.popleft()
            if samples:
                self._centre(key)
            else:
                del self._samples[key], self._centres[key]
                self._curve = None


class StepCost:
    """Seconds of a step that verifies, and then drafts for the next one."""

    def __init__(self, config: CostConfig) -> None:
        self._config = config
        self._verify = CostTable(config)
        self._draft: dict[int, CostTable] = {}
        """By depth, over requests."""
        self._tries = 0

    @property
    def explore_share(self) -> float:
        """Of the steps, those that should try a random budget."""
        warm = self._tries >= self._config.warmup_tries
        return self._config.share if warm else self._config.warmup_share

    def tried(self) -> None:
        """Count a step that tried a random budget."""
        self._tries += 1

    def observe(
        self, *, requests: int, tokens: int, verify: float, draft: float, depth: int
    ) -> None:
        """Add a step, in seconds: it verified `tokens`, and drafted `depth` positions for each of
        `requests`.
        """
        self._verify.observe(tokens, verify)
        self._draft.setdefault(depth, CostTable(self._config)).observe(requests, draft)

    def verify(self, requests: int, slots: int) -> Array | None:
        """[slots + 1], of verifying 0, 1, ... `slots` draft tokens beside one token for each
        request; None while fewer than two sizes are known, which is no table.
        """
        if self._verify.sizes < 2:
            return None
        return self._verify.seconds(requests + np.arange(slots + 1, dtype=np.float64))

    def draft(self, requests: int, depth: int) -> float:
        """Of drafting `depth` positions for each request; 0 while none is known.

        A depth that was never timed costs in proportion to the deepest one that was. Depth 0 costs
        one pass: the drafter has to read what was emitted.
        """
        known = self._timed(requests, depth)
        if known is not None:
            return known
        for deepest in sorted(self._draft, reverse=True):
            known = self._timed(requests, deepest)
            if known is not None:
                return max(depth, 1) * known / max(deepest, 1)
        return 0.0

    def _timed(self, requests: int, depth: int) -> float | None:
        table = self._draft.get(depth)
        seconds = None if table is None else table.seconds(float(requests))
        return None if seconds is None else float(seconds)
