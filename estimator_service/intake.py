"""Reading a frame: everything about it is checked before anything of it is kept.

Besides being finite and of the right length, a round's sums must be possible. With p in [0, 1],
|f| <= F and n labels: 0 <= c <= n/4, a <= F^2 c, b^2 <= a c (Cauchy-Schwarz), |g1| <= n and
|g0| <= F n, and the sketch counts the same n labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimator_service.irls import MAX_INTERCEPT, MAX_SLOPE
from estimator_service.logistic import MAX_LOG_ODDS, Array
from estimator_service.messages import Frame, Refusal, StratumRound, decode_array
from estimator_service.sketch import (
    ACCEPTED,
    BINS,
    COUNT,
    PackedCells,
    SketchFormatError,
    read_packed,
)
from estimator_service.statistics import G0, G1, WIDTH, A, B, C, N

MAX_LABELS = 1e12
"""Labels of one position in one frame. Sums of such frames keep every count exact in float64."""
_SLACK = 1.0 + 1e-6
"""For sums that were taken in float32, as a device does."""


class FrameRefused(ValueError):
    """A frame that breaks a rule: which, and the value that broke it."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, eq=False)
class CheckedRound:
    """One stratum's part of a frame, as arrays."""

    stratum: str
    statistics: Array
    """[K, 6], `Statistics.sums`."""
    intercepts: Array
    """[K], that graded it."""
    cells: PackedCells
    """Its sketch."""
    accepted: Array
    """[K], accepted labels."""

    @property
    def labels(self) -> Array:
        """[K]."""
        return self.statistics[:, N]


def check_frame(frame: Frame, positions: int) -> list[CheckedRound]:
    """The rounds of a frame for a pair with K = `positions`. Raises FrameRefused."""
    if not 0.0 <= frame.slope <= MAX_SLOPE:
        _refuse(Refusal.OUT_OF_RANGE, f"slope must be in 0..{MAX_SLOPE:g}, got {frame.slope}")
    if frame.admitted and len(frame.admitted) != positions:
        _refuse(
            Refusal.WRONG_LENGTH, f"admitted has {len(frame.admitted)} positions, K={positions}"
        )
    if frame.explored_steps > frame.steps:
        _refuse(Refusal.IMPOSSIBLE, f"{frame.explored_steps} of {frame.steps} steps explored")
    return [_check_round(name, part, positions) for name, part in frame.strata.items()]


def _check_round(stratum: str, part: StratumRound, positions: int) -> CheckedRound:
    if len(part.intercepts) != 8 * positions or len(part.statistics) != 8 * positions * WIDTH:
        _refuse(
            Refusal.WRONG_LENGTH,
            f"stratum {stratum}: {len(part.intercepts)} bytes of intercepts and "
            f"{len(part.statistics)} of statistics do not fit K={positions}",
        )
    intercepts = decode_array(part.intercepts)
    sums = decode_array(part.statistics).reshape(positions, WIDTH)
    if not (np.isfinite(intercepts).all() and np.isfinite(sums).all()):
        _refuse(Refusal.NOT_FINITE, f"stratum {stratum}: a sum or an intercept is not finite")
    if np.abs(intercepts).max() > MAX_INTERCEPT:
        _refuse(Refusal.OUT_OF_RANGE, f"stratum {stratum}: |intercept| above {MAX_INTERCEPT:g}")
    try:
        cells = read_packed(positions, part.sketch)
    except SketchFormatError as error:
        raise FrameRefused(Refusal.MALFORMED, f"stratum {stratum}: {error}") from error
    _check_sums(stratum, sums)
    position = cells.cell // BINS
    counted = np.bincount(position, cells.columns[COUNT], positions)
    if not np.array_equal(counted, sums[:, N]):
        _refuse(
            Refusal.IMPOSSIBLE,
            f"stratum {stratum}: the sketch counts {counted.tolist()} labels, "
            f"the statistics {sums[:, N].tolist()}",
        )
    accepted = np.bincount(position, cells.columns[ACCEPTED], positions).astype(np.float64)
    return CheckedRound(stratum, sums, intercepts, cells, accepted)


def _check_sums(stratum: str, sums: Array) -> None:
    a, b, c, g0, g1, n = sums.T
    possible = (
        (n >= 0.0)
        & (n <= MAX_LABELS)
        & (c >= 0.0)
        & (c <= 0.25 * _SLACK * n)
        & (a >= 0.0)
        & (a <= MAX_LOG_ODDS**2 * _SLACK * c)
        & (b * b <= _SLACK * a * c)
        & (np.abs(g1) <= _SLACK * n)
        & (np.abs(g0) <= MAX_LOG_ODDS * _SLACK * n)
    )
    if not possible.all():
        k = int(np.argmin(possible))
        _refuse(
            Refusal.IMPOSSIBLE,
            f"stratum {stratum}, position {k}: no labels have a={sums[k, A]:g} b={sums[k, B]:g} "
            f"c={sums[k, C]:g} g0={sums[k, G0]:g} g1={sums[k, G1]:g} n={sums[k, N]:g}",
        )


def _refuse(reason: Refusal, detail: str) -> None:
    raise FrameRefused(reason, detail)
