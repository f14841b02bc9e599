"""What the detectors' tests share: streams, and the docstrings' tables of run lengths."""

import math
import re

import numpy as np

from estimator_service.drift import DriftDetector


def documented(detector: type[DriftDetector]) -> dict[int, tuple[float, float]]:
    """Shift -> (mean updates, standard error), read from the docstring's table."""
    rows = re.findall(r"^ +(\d) +([\d,.]+) +([\d,.]+) ", detector.__doc__ or "", re.MULTILINE)
    return {
        int(shift): (float(mean.replace(",", "")), float(error.replace(",", "")))
        for shift, mean, error in rows
    }


def agree(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Whether two (mean, standard error) differ by less than four of their joint errors."""
    return abs(a[0] - b[0]) < 4 * math.hypot(a[1], b[1])


def detections(detector: DriftDetector, stream: list[float]) -> list[int]:
    return [i for i, x in enumerate(stream) if detector.update(x)]


def shifting_stream(size: float) -> list[float]:
    """A seeded stream that rises, falls and returns, with several detections."""
    levels = np.repeat([0.0, size, 0.0, -size, -size / 2, 0.0], 60)
    return [float(x) for x in np.random.default_rng(11).normal(levels, 1.0)]
