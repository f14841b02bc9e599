"""A simulated fleet: drafts with a known truth, graded and sent as real replicas do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator_service.estimator import Estimator
from estimator_service.logistic import Array, predict
from estimator_service.messages import (
    CoefficientSet,
    Frame,
    PairKey,
    Reply,
    StratumRound,
    encode_array,
)
from estimator_service.sketch import Sketch
from estimator_service.statistics import Statistics

PAIR = PairKey("org/target", "org/draft", "draft_model", 7)


@dataclass
class ManualClock:
    """A clock that stands still until it is told."""

    now: float = 1000.0
    offset: float = 1.7e9

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + self.offset

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Labels:
    """Observed draft positions."""

    position: Array
    features: Array
    accepted: Array

    def __len__(self) -> int:
        return len(self.position)

    def part(self, index: slice | NDArray[Any]) -> Labels:
        return Labels(self.position[index], self.features[index], self.accepted[index])

    def inverted(self) -> Labels:
        return Labels(self.position, self.features, 1.0 - self.accepted)

    def all_accepted(self) -> Labels:
        return Labels(self.position, self.features, np.ones_like(self.accepted))


@dataclass(frozen=True)
class Truth:
    """The coefficients that nature uses, and how its features are spread."""

    slope: float
    intercepts: tuple[float, ...]
    feature_mean: float = 2.0
    feature_sd: float = 2.0

    @property
    def positions(self) -> int:
        return len(self.intercepts)

    def features(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return np.clip(rng.normal(self.feature_mean, self.feature_sd, shape), -40.0, 40.0)

    def drafts(
        self, rng: np.random.Generator, count: int, admitted: Array | int | None = None
    ) -> Labels:
        """Labels of `count` drafts of which the first `admitted` positions were verified."""
        f = self.features(rng, (count, self.positions))
        p = predict(self.slope, np.array(self.intercepts), f)
        accepted = rng.random(f.shape) < p
        survived = np.cumprod(accepted, axis=1)
        reached = np.hstack([np.ones((count, 1)), survived[:, :-1]]) > 0
        limit = self.positions if admitted is None else admitted
        observed = reached & (np.arange(self.positions) < np.reshape(limit, (-1, 1)))
        draft, position = np.nonzero(observed)
        return Labels(
            position.astype(np.float64),
            f[draft, position],
            accepted[draft, position].astype(np.float64),
        )

    def labels(self, rng: np.random.Generator, per_position: int) -> Labels:
        """The same number of labels at every position, without survival."""
        position = np.repeat(np.arange(self.positions), per_position)
        f = self.features(rng, position.shape)
        p = predict(self.slope, np.array(self.intercepts)[position], f)
        return Labels(position.astype(np.float64), f, (rng.random(f.shape) < p).astype(np.float64))


def round_of(labels: Labels, coefficients: CoefficientSet, stratum: str) -> StratumRound:
    """Labels graded under `coefficients`."""
    intercepts = np.array(coefficients.intercepts_of(stratum))
    k = labels.position.astype(np.intp)
    p = predict(coefficients.slope, intercepts[k], labels.features)
    positions = len(intercepts)
    statistics = Statistics.of(positions, k, labels.features, labels.accepted, p)
    sketch = Sketch.of(positions, k, labels.features, labels.accepted)
    return StratumRound(encode_array(intercepts), encode_array(statistics.sums), sketch.pack())


def frame_of(
    strata: Mapping[str, Labels],
    coefficients: CoefficientSet,
    *,
    pair: str = PAIR.id,
    replica: str = "replica-0",
    incarnation: int = 1,
    seq: int = 1,
    oldest: int = 1,
    steps: int = 0,
    explored_steps: int = 0,
) -> Frame:
    """A frame of labels by stratum, graded under `coefficients`."""
    return Frame(
        pair=pair,
        replica=replica,
        incarnation=incarnation,
        seq=seq,
        oldest=oldest,
        applied=coefficients.version,
        graded=coefficients.version,
        slope=coefficients.slope,
        strata={name: round_of(part, coefficients, name) for name, part in strata.items()},
        steps=steps,
        explored_steps=explored_steps,
    )


@dataclass
class SimulatedReplica:
    """Drafts, admits what looks worth it, and reports, as a real one does."""

    name: str
    truth: Mapping[str, Truth]
    rng: np.random.Generator
    key: PairKey = PAIR
    min_survival: float = 0.25
    """Admits a position while the predicted survival up to it is above this."""
    tamper: str = ""
    """"inverted" or "all_accepted": how it lies about its labels."""
    coefficients: CoefficientSet = field(init=False)
    explore: float = 0.0
    seq: int = 0
    spent: int = 0
    """Drafts that were verified whole by an exploration order."""
    drafted: int = 0

    def __post_init__(self) -> None:
        self.coefficients = CoefficientSet.initial(self.key.num_speculative_tokens)

    def serve(self, drafts: int) -> Frame:
        """One round of `drafts` drafts in each stratum."""
        strata = {}
        for name, truth in self.truth.items():
            f = truth.features(self.rng, (drafts, truth.positions))
            p = predict(self.coefficients.slope, np.array(self.coefficients.intercepts_of(name)), f)
            # The length is decided on an independent draw of features: only the mean matters.
            admitted = (np.cumprod(p, axis=1) >= self.min_survival).sum(axis=1)
            exploring = self.rng.random(drafts) < self.explore
            admitted = np.where(exploring, truth.positions, admitted)
            self.spent += int(exploring.sum())
            self.drafted += drafts
            labels = truth.drafts(self.rng, drafts, admitted)
            if self.tamper == "inverted":
                labels = labels.inverted()
            elif self.tamper == "all_accepted":
                labels = labels.all_accepted()
            strata[name] = labels
        self.seq += 1
        return frame_of(
            strata,
            self.coefficients,
            pair=self.key.id,
            replica=self.name,
            seq=self.seq,
            oldest=self.seq,
            steps=drafts,
        )

    def report(self, estimator: Estimator, drafts: int) -> Reply:
        """Serve a round, send it, and adopt what comes back."""
        reply = estimator.submit(self.serve(drafts))
        if reply.coefficients is not None:
            self.coefficients = reply.coefficients
        self.explore = reply.exploration.share if reply.exploration else 0.0
        return reply


def mean_error(
    slope: float, intercepts: Array, truth: Truth, rng: np.random.Generator, draws: int = 20_000
) -> float:
    """Mean absolute difference of predicted and true acceptance over all positions."""
    f = truth.features(rng, (draws, truth.positions))
    true = predict(truth.slope, np.array(truth.intercepts), f)
    return float(np.abs(predict(slope, np.asarray(intercepts), f) - true).mean())
