"""What the detectors' tests share: streams, and the docstrings' tables of run lengths."""

import math
import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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


def false_alarm_interval(
    run_lengths: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    updates: int,
    seed: int,
    length: int = 10_000,
) -> tuple[float, float, int]:
    """Mean updates to a false alarm on N(0, 1), its standard error, and the alarms counted.

    `run_lengths` gives the updates until the first detection in each row, NaN where there is none.
    Rows of `length` updates are followed to their first alarm or their end: updates seen over
    alarms is the maximum-likelihood mean of the nearly geometric run length so censored.
    """
    rng = np.random.default_rng(seed)
    seen, alarms = 0.0, 0
    for _ in range(updates // (200 * length)):
        runs = run_lengths(rng.standard_normal((200, length)))
        alarms += int(np.isfinite(runs).sum())
        seen += float(np.where(np.isfinite(runs), runs, length).sum())
    return seen / alarms, seen / alarms**1.5, alarms
