"""Reading a frame: everything about it is checked before anything of it is kept.

Besides being finite and of the right length, a round's sums must be possible. With p in [0, 1],
|f| <= F and n labels of which y were accepted: 0 <= c <= n/4, a <= F^2 c, b^2 <= a c
(Cauchy-Schwarz), y - n <= g1 <= y and |g0| <= F n, and the sketch counts the same n labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from estimator_service.irls import MAX_INTERCEPT, MAX_SLOPE
from estimator_service.logistic import MAX_LOG_ODDS as F
from estimator_service.logistic import Array
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
"""Labels of one position in one frame, and the largest count of anything. Sums of such frames keep
every count exact in float64."""
_ROUNDING = 1e-2
"""For sums that were taken in float32, as a device does: after 100,000 labels with one and the same
feature, b^2 was found 0.4% above a c."""
_UNDERFLOW = 1e-30
"""For what a device rounds to anything or nothing: squares of features below 1e-15, weights of
predictions that are nearly certain."""
_ABOVE = 1.0 + _ROUNDING
_RULES = (
    # Each is a linear form in (a, b, c, g0, g1, n, y, 1) that must not be negative, so that all
    # of them together are one small matrix product: this runs for every frame.
    (f"0 <= n <= {MAX_LABELS:g}", {"n": 1.0}),
    (f"0 <= n <= {MAX_LABELS:g}", {"1": MAX_LABELS, "n": -1.0}),
    ("0 <= c <= n/4", {"c": 1.0}),
    ("0 <= c <= n/4", {"n": 0.25 * _ABOVE, "c": -1.0}),
    ("0 <= a <= F^2 c", {"a": 1.0}),
    ("0 <= a <= F^2 c", {"c": F * F * _ABOVE, "n": _UNDERFLOW, "a": -1.0}),
    ("y - n <= g1 <= y", {"y": 1.0, "n": _ROUNDING, "g1": -1.0}),
    ("y - n <= g1 <= y", {"g1": 1.0, "n": _ABOVE, "y": -1.0}),
    ("|g0| <= F n", {"n": F * _ABOVE, "g0": -1.0}),
    ("|g0| <= F n", {"n": F * _ABOVE, "g0": 1.0}),
)
_TERMS = ("a", "b", "c", "g0", "g1", "n", "y", "1")
_FORMS = np.array([[form.get(term, 0.0) for _, form in _RULES] for term in _TERMS])
"""[8, rules]."""


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


def check_frame(frame: Frame, positions: int) -> list[CheckedRound]:
    """The rounds of a frame for a pair with K = `positions`. Raises FrameRefused."""
    if not 0.0 <= frame.slope <= MAX_SLOPE:
        _refuse(Refusal.OUT_OF_RANGE, f"slope must be in 0..{MAX_SLOPE:g}, got {frame.slope}")
    if frame.admitted and len(frame.admitted) != positions:
        _refuse(
            Refusal.WRONG_LENGTH, f"admitted has {len(frame.admitted)} positions, K={positions}"
        )
    counts = {"steps": [frame.steps], "admitted": frame.admitted, "skipped": frame.skipped.values()}
    for name, values in counts.items():
        if max(values, default=0) > MAX_LABELS:
            _refuse(Refusal.IMPOSSIBLE, f"{name} must be at most {MAX_LABELS:g}, got {max(values)}")
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
    # Written so that NaN fails, here and below: whether it was that is asked when something is.
    if not (intercepts.max() <= MAX_INTERCEPT and intercepts.min() >= -MAX_INTERCEPT):
        _check_finite(stratum, "intercepts", intercepts)
        _refuse(
            Refusal.OUT_OF_RANGE,
            f"stratum {stratum}: intercepts must be in -{MAX_INTERCEPT:g}..{MAX_INTERCEPT:g}, "
            f"got {intercepts.tolist()}",
        )
    try:
        cells = read_packed(positions, part.sketch)
    except SketchFormatError as error:
        raise FrameRefused(Refusal.MALFORMED, f"stratum {stratum}: {error}") from error
    position = cells.cell // BINS
    accepted = np.bincount(position, cells.columns[ACCEPTED], positions)
    _check_sums(stratum, sums, accepted)
    counted = np.bincount(position, cells.columns[COUNT], positions)
    if not (counted == sums[:, N]).all():
        _refuse(
            Refusal.IMPOSSIBLE,
            f"stratum {stratum}: the sketch counts {counted.tolist()} labels, "
            f"the statistics {sums[:, N].tolist()}",
        )
    return CheckedRound(stratum, sums, intercepts, cells)


def _check_sums(stratum: str, sums: Array, accepted: NDArray[Any]) -> None:
    terms = np.ones((len(sums), len(_TERMS)))
    terms[:, :WIDTH] = sums
    terms[:, WIDTH] = accepted
    a, b, c, n = sums[:, A], sums[:, B], sums[:, C], sums[:, N]
    with np.errstate(invalid="ignore", over="ignore"):
        forms = terms @ _FORMS
        # Cauchy-Schwarz: b^2 <= a c.
        spread = _ABOVE * a * c + _UNDERFLOW * n * n - b * b
    if forms.min() >= 0.0 and spread.min() >= 0.0:
        return
    _check_finite(stratum, "sums", sums)
    rules = [(rule, form >= 0.0) for (rule, _), form in zip(_RULES, forms.T, strict=True)]
    for rule, holds in [*rules, ("b^2 <= a c", spread >= 0.0)]:
        if not holds.all():
            k = int(np.argmin(holds))
            _refuse(
                Refusal.IMPOSSIBLE,
                f"stratum {stratum}, position {k}: {rule} is broken by a={sums[k, A]:g} "
                f"b={sums[k, B]:g} c={sums[k, C]:g} g0={sums[k, G0]:g} g1={sums[k, G1]:g} "
                f"n={sums[k, N]:g} y={accepted[k]:g}, with F={F:g}",
            )


def _check_finite(stratum: str, what: str, values: Array) -> None:
    if not np.isfinite(values).all():
        _refuse(
            Refusal.NOT_FINITE, f"stratum {stratum}: {what} must be finite, got {values.tolist()}"
        )


def _refuse(reason: Refusal, detail: str) -> NoReturn:
    raise FrameRefused(reason, detail)
