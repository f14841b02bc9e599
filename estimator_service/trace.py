"""A trace of verified drafts: its rows, the labels in them, and why a row gave none.

A trace has one row per draft position: which (request, step) drafted it, the drafter's feature,
whether it was admitted to verification and whether it was accepted. `labelling` makes labels of
the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from estimator_service.logistic import MAX_LOG_ODDS, Array
from estimator_service.messages import MAX_POSITIONS

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

DEFAULT_STRATUM = "default"
"""The one stratum of a trace that names none."""


class TraceError(ValueError):
    """A trace that cannot be read at all, or that holds nothing to fit."""


class Reason(StrEnum):
    """Why a row was rejected. Of several, the first in this order is given."""

    COLUMNS = "wrong number of columns"
    REQUEST = "request is missing or holds a line break"
    STEP = "step is not a whole number from 0 on"
    POSITION = "position is not a whole number from 0 on"
    DEPTH = f"position is beyond {MAX_POSITIONS - 1}"
    FEATURE = "feature is not a finite number"
    RANGE = f"feature is beyond {MAX_LOG_ODDS:g} logits"
    ADMITTED = "admitted is not 0 or 1"
    ACCEPTED = "accepted is not 0 or 1"
    UNVERIFIED = "accepted without being admitted"
    STRATUM = "stratum is not a valid name"
    DUPLICATE = "duplicate of an earlier row"
    PREFIX = "admitted behind a missing or unadmitted position"
    REJECTED = "accepted behind a rejected position"
    BEHIND = "behind a bad row of its draft: cannot be graded"


@dataclass(frozen=True, eq=False)
class Rows:
    """What a file said, row by row, in file order. NaN is a value that is missing or no number."""

    line: Ints
    """[n], what a person finds the row by."""
    request: Ints
    """[n], equal where the request is; -1 where there is none."""
    step: Array
    position: Array
    feature: Array
    admitted: Array
    accepted: Array
    stratum: Ints
    """[n], into `strata`; -1 where the name is missing."""
    strata: Sequence[str]
    malformed: Ints
    """[m], lines that were no row at all."""


@dataclass(frozen=True, eq=False)
class Labels:
    """M observed draft positions of one pair."""

    positions: int
    """K: one more than the largest position seen, observed or not."""
    position: NDArray[np.intp]
    """[M], in 0..K-1."""
    feature: Array
    """[M], logits."""
    accepted: Array
    """[M], 1 or 0."""
    stratum: NDArray[np.intp]
    """[M], into `strata`."""
    strata: tuple[str, ...]
    """[S], names in ascending order, each with at least one label."""

    def __len__(self) -> int:
        return len(self.position)

    def select(self, chosen: Flags) -> Labels:
        """Those for which `chosen` [M] is true, of the same strata and positions."""
        return replace(
            self,
            position=self.position[chosen],
            feature=self.feature[chosen],
            accepted=self.accepted[chosen],
            stratum=self.stratum[chosen],
        )


@dataclass(frozen=True)
class Rejection:
    """One row that was not used."""

    line: int
    reason: Reason


@dataclass(frozen=True, eq=False)
class Trace:
    """What a file of rows comes to."""

    rows: int
    """All rows, the rejected ones included."""
    labels: Labels
    rejections: list[Rejection]
    """The first of them, by line."""
    rejection_reasons: dict[Reason, int]
    """All of them, counted; the most frequent first."""

    @property
    def rejected_rows(self) -> int:
        """How many rows were not used."""
        return sum(self.rejection_reasons.values())
