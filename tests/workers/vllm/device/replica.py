"""A replica without an engine: vLLM's estimator with our hook, made-up logits and verdicts.

What the hook should have counted is kept beside it, label by label.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from estimator_service.sketch import Sketch
from estimator_service.statistics import Statistics
from workers.lease import Lease
from workers.vllm.device_estimator import DeviceEstimator
from workers.vllm.device_steering import Steering

SLOTS, POSITIONS, VOCAB = 40, 3, 64
Labels = list[tuple[int, float, int, float]]
"""Position, feature, accepted, prediction."""


def vllm_estimator() -> Any:
    """A new `OnlineAcceptanceEstimator`."""
    module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.acceptance_estimator")
    return module.OnlineAcceptanceEstimator(SLOTS, POSITIONS, torch.device("cpu"))


class Replica:
    """One rank: `draft`, then `verify`, as vLLM's runner does."""

    def __init__(self, seed: int = 0, lease: Lease | None = None, **options: Any) -> None:
        self.kernels = vllm_estimator()
        self.steering = Steering(POSITIONS)
        self.fleet = DeviceEstimator(self.kernels, self.steering, lease or Lease(), **options)
        self.confidences = torch.zeros(SLOTS, POSITIONS)
        self._rng = np.random.default_rng(seed)
        self._temperature = torch.ones(SLOTS)

    def draft(self, slots: Sequence[int]) -> NDArray[Any]:
        """Predict a draft for each slot; returns the features [R, K]."""
        rows = torch.tensor(slots)
        for position in range(POSITIONS):
            logits = self._rng.normal(0.0, 2.0, (len(slots), VOCAB)).astype(np.float32)
            self.fleet.predict(
                torch.from_numpy(logits),
                rows,
                torch.tensor(position),
                self.confidences,
                self._temperature,
            )
        features: NDArray[Any] = self.kernels.features.numpy()[list(slots)].copy()
        return features

    def verify(
        self, slots: Sequence[int], admitted: Sequence[int], accepted: Sequence[int]
    ) -> Labels:
        """The target's verdict on the drafts; returns the labels that are in it."""
        features = self.kernels.features.numpy()
        predictions = self.kernels.predictions.numpy()
        labels = [
            (k, float(features[slot, k]), int(k < right), float(predictions[slot, k]))
            for slot, sent, right in zip(slots, admitted, accepted, strict=True)
            for k in range(min(sent, right + 1))
        ]
        sampled = np.array(accepted, dtype=np.int32) + 1
        rejected = np.array(admitted, dtype=np.int32) - np.array(accepted, dtype=np.int32)
        self.fleet.step(torch.tensor(slots), torch.from_numpy(sampled), torch.from_numpy(rejected))
        return labels

    def first_step(self, slots: Sequence[int]) -> None:
        """Requests that have no drafts yet, and get some."""
        self.verify(slots, [0] * len(slots), [0] * len(slots))
        self.draft(slots)

    def serve(self, slots: Sequence[int], steps: int) -> Labels:
        """Verify the drafts there are and draft anew, some steps long."""
        labels: Labels = []
        for _ in range(steps):
            admitted = self._rng.integers(0, POSITIONS + 1, len(slots))
            accepted = self._rng.integers(0, admitted + 1)
            labels += self.verify(slots, admitted.tolist(), accepted.tolist())
            self.draft(slots)
        return labels


def sums_of(labels: Labels) -> tuple[Statistics, Sketch]:
    """Statistics and sketch of labels, in float64."""
    k, f, y, p = (np.array(column) for column in zip(*labels, strict=True))
    return Statistics.of(POSITIONS, k, f, y, p), Sketch.of(POSITIONS, k, f, y)
