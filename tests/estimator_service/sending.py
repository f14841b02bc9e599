"""The sending half of a replica: observes, holds what is not stored, adopts what is newer."""

from __future__ import annotations

import msgspec
import numpy as np

from estimator_service.config import EstimatorConfig
from estimator_service.delivery import Outbox
from estimator_service.messages import CoefficientSet, Frame, FrameStatus, Reply, Version
from tests.estimator_service.fleet import Truth, frame_of

TRUTH = Truth(0.6, (0.6, 0.4, 0.3, 0.2, 0.1, 0.0, -0.1))
K = TRUTH.positions
# Evidence that is neither discounted nor capped nor judged: what is held can be counted.
EXACT = EstimatorConfig.model_validate(
    {
        "fit": {"half_life": 1e300},
        "trust": {"influence": 1.0, "min_labels": 1e300},
        "drift": {"min_labels": 1e300},
    }
)


class Sender:
    """One replica, as the estimator sees it; what it saw itself can be held against that."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name = name
        self.outbox = Outbox[Frame]()
        self.labels = np.zeros(K)
        """[K], observed in all."""
        self.versions = [Version()]
        """Adopted, in order."""
        self.epochs = [0]
        """Of those estimators that it believed, in order."""
        self._coefficients = CoefficientSet.initial(K)
        self._rng = np.random.default_rng(seed)

    def observe(self, drafts: int = 5) -> None:
        """A round of labels; of no drafts, a sign of life."""
        strata = {}
        if drafts:
            strata["sampled"] = TRUTH.drafts(self._rng, drafts)
            position = strata["sampled"].position.astype(np.intp)
            self.labels += np.bincount(position, minlength=K)
        self.outbox.put(frame_of(strata, self._coefficients, replica=self.name))

    def fit_alone(self) -> None:
        """What is in force here is no version of the estimator's any more."""
        self._coefficients = CoefficientSet.initial(K)

    def due(self, limit: int = 16) -> list[Frame]:
        """What is to be sent next."""
        now = {
            "oldest": self.outbox.oldest,
            "applied": self._coefficients.version,
            "heard": self.outbox.epoch,
        }
        return [
            msgspec.structs.replace(frame, seq=seq, **now)
            for seq, frame in self.outbox.due()[:limit]
        ]

    def hear(self, frames: list[Frame], replies: list[Reply]) -> None:
        """Take the answers to `frames`."""
        for frame, reply in zip(frames, replies, strict=True):
            assert reply.status in (FrameStatus.MERGED, FrameStatus.DUPLICATE), reply
            if reply.epoch >= self.outbox.epoch and reply.epoch != self.epochs[-1]:
                self.epochs.append(reply.epoch)
            self.outbox.answered(frame.seq, reply.epoch, reply.durable_seq, reply.settled)
            new = reply.coefficients
            if new is not None and new.version > self.versions[-1]:
                self._coefficients = new
                self.versions.append(new.version)

    def assert_never_went_back(self) -> None:
        assert self.versions == sorted(set(self.versions))
        assert self.epochs == sorted(set(self.epochs))


def assert_counted_once(senders: list[Sender], labels: tuple[float, ...]) -> None:
    """The estimator's labels [K] are all that were sent, each of them once."""
    sent = np.sum([sender.labels for sender in senders], axis=0)
    assert list(labels) == sent.tolist()
    assert sum(sender.outbox.dropped for sender in senders) == 0
