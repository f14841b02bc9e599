"""Which replicas' evidence counts, and how much of it.

A replica is judged by what its own labels ask of the coefficients, beyond what the whole fleet's
ask: traffic that changes for everybody moves everybody's residuals and accuses nobody. Two
questions are asked, each a one-step estimate from sums over its positions:

    offset = g1 / n                             mean residual y - p
    slope  = (g0 - b g1 / c) / (a - b^2 / c)    how much steeper its labels are

The second finds what the first cannot: labels inverted where half of them are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from estimator_service.config import TrustConfig
from estimator_service.logistic import Array
from estimator_service.statistics import G0, G1, WIDTH, A, B, C, N


@dataclass(eq=False)
class Standing:
    """What is remembered of one replica's labels, and whether they are kept out."""

    recent: Array
    """[6], its statistics summed over positions and strata, old labels fading."""
    quarantined: bool = False
    held: bool = False
    """Kept out by an operator, whatever its labels say, until an operator clears it."""

    @property
    def trusted(self) -> bool:
        """Whether its labels are merged."""
        return not (self.quarantined or self.held)

    @property
    def residual(self) -> float | None:
        """Mean y - p of late; None without labels."""
        return float(self.recent[G1] / self.recent[N]) if self.recent[N] > 0.0 else None


class Trust:
    """Judges the replicas of one pair."""

    def __init__(self, config: TrustConfig) -> None:
        self._config = config
        self._standings: dict[str, Standing] = {}

    @property
    def standings(self) -> Mapping[str, Standing]:
        """By replica."""
        return self._standings

    def observe(self, replica: str, statistics: Array) -> Standing:
        """Remember statistics [6] that a replica sent, summed; returns its standing."""
        standing = self.standing(replica)
        standing.recent += statistics
        # Old labels fade as new ones come, not as time goes: silence is no evidence.
        standing.recent *= min(1.0, self._config.memory / max(standing.recent[N], 1.0))
        return standing

    def standing(self, replica: str) -> Standing:
        """The replica's standing; a new replica is trusted."""
        if replica not in self._standings:
            self._standings[replica] = Standing(np.zeros(WIDTH))
        return self._standings[replica]

    def hold(self, replica: str) -> None:
        """Keep a replica out until it is cleared."""
        self.standing(replica).held = True

    def clear(self, replica: str) -> None:
        """Trust a replica again, and forget what spoke against it."""
        self._standings[replica] = Standing(np.zeros(WIDTH))

    def forget(self, replica: str) -> None:
        """Drop what is remembered of a replica, unless it is kept out: silence clears nobody."""
        if replica in self._standings and self._standings[replica].trusted:
            del self._standings[replica]

    def judge(self) -> tuple[list[str], list[str]]:
        """Compare the replicas; returns who is quarantined from now on, and who is no longer.

        The fleet's part is the median over replicas and one vote for "nothing to ask": so of two
        replicas that disagree the one at odds with the coefficients is outside, and one replica
        alone is never judged.
        """
        names = [n for n, s in self._standings.items() if s.recent[N] >= self._config.min_labels]
        if len(names) < 2:
            return [], []
        estimates, errors = _one_step(np.stack([self._standings[n].recent for n in names]))
        distance = np.abs(estimates - np.median(np.vstack([estimates, [0.0, 0.0]]), axis=0))
        effects = np.array([self._config.effect, self._config.slope_effect])
        outside = (distance > np.maximum(effects, self._config.deviations * errors)).any(axis=1)
        # To come back it must agree clearly; else noise at the threshold would toggle it.
        inside = (distance < 0.5 * effects).all(axis=1)
        fallen, risen = [], []
        for name, is_outside, is_inside in zip(names, outside, inside, strict=True):
            standing = self._standings[name]
            if is_outside and not standing.quarantined:
                standing.quarantined = True
                fallen.append(name)
            elif is_inside and standing.quarantined:
                standing.quarantined = False
                risen.append(name)
        return fallen, risen


def _one_step(recent: Array) -> tuple[Array, Array]:
    """Estimates and standard errors, both [R, 2], from sums [R, 6]."""
    a, b, c, g0, g1, n = (recent[:, i] for i in (A, B, C, G0, G1, N))
    c = np.maximum(c, np.finfo(np.float64).tiny)
    spread = np.maximum(a - b * b / c, 1e-9 * n)
    estimates = np.stack([g1 / n, (g0 - b * g1 / c) / spread], axis=1)
    errors = np.stack([np.sqrt(c) / n, 1.0 / np.sqrt(spread)], axis=1)
    return estimates, errors


def influence(labels: Array, share: float) -> Array:
    """Weights in 0..1 that leave no replica more than `share` of the weighted labels.

    Args:
        labels: [R], what each replica brought to one refit.
        share: the cap. Never below twice an equal share: of two replicas, one may have it all,
            because a cap could only throw evidence away.

    Heavy replicas are cut to a common level m = share * sum_r min(labels_r, m). With the i most
    heavy ones cut, m = share * rest_i / (1 - share i); the first i whose next replica is not above
    its m is the answer, and there is one with share (i + 1) <= 1 or just after.

    >>> influence(np.array([100.0, 100.0, 100.0, 10_000.0]), share=0.5).tolist()
    [1.0, 1.0, 1.0, 0.03]
    """
    live = int((labels > 0.0).sum())
    share = max(share, 2.0 / max(live, 1))
    if share >= 1.0:
        return np.ones_like(labels)
    ordered = np.sort(labels)[::-1][: int(np.ceil(1.0 / share))]
    rest = labels.sum() - (np.cumsum(ordered) - ordered)
    levels = share * rest / (1.0 - share * np.arange(len(ordered)))
    level = levels[np.argmax(ordered <= levels * (1.0 + 1e-12))]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(labels > level, level / labels, 1.0)
