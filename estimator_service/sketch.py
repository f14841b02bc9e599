"""A histogram over the feature, from which any coefficients can be judged.

Per position and bin it holds how many labels fell there, how many of them were accepted, and
where in the bin their features lay. None of that depends on the coefficients, so the log-loss,
calibration and expected accepted length of today's coefficients, of last week's and of a proposed
override are all read from the same sketch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from estimator_service.calibration import Calibration, ReliabilityBin, calibrate, reliability
from estimator_service.logistic import MAX_LOG_ODDS, Array, predict
from estimator_service.messages import MAX_POSITIONS

EDGES: Array = np.concatenate(
    [
        [-MAX_LOG_ODDS, -12.0, -8.0, -6.0, -5.0, -4.0],
        # Most rows of a language model's drafter lie here; a step of the probability across one
        # bin is at most slope / 16.
        np.arange(-3.0, 6.0, 0.25),
        [6.0, 7.0, 8.0, 10.0, 13.0, 20.0, MAX_LOG_ODDS],
    ]
)
"""[BINS + 1], in logits. Part of the wire format: changing them changes the schema."""
BINS = len(EDGES) - 1
COUNT, ACCEPTED, OFFSET = range(3)

UNITS_PER_LOGIT = 64.0
"""Of `OFFSET`; part of the wire format."""
_WIDTH_OF_CELL = np.tile(np.diff(EDGES) * UNITS_PER_LOGIT, MAX_POSITIONS)
_WIRE_LIMIT = 2**32 - 1
_TYPES = {width: np.dtype(f"<u{width}") for width in (1, 2, 4)}
"""Of a packed column, by its bytes."""
_WIDTHS = frozenset(_TYPES)


class SketchFormatError(ValueError):
    """A packed sketch that no `Sketch.pack` can have made."""


@dataclass(frozen=True, eq=False)
class Sketch:
    """Labels by position and feature bin.

    `cells` is [3, K, BINS]: labels, accepted labels, and the sum of the features' distances from
    their bin's lower edge in units of 1/64 logit. A round's cells are whole numbers, exact in
    float64 up to 2**53, so merging rounds in any order gives the same bits.
    """

    cells: Array

    @classmethod
    def empty(cls, positions: int) -> Self:
        """The identity of `merge` for a pair with K = `positions`."""
        return cls(np.zeros((3, positions, BINS)))

    @classmethod
    def of(
        cls, positions: int, position: ArrayLike, features: ArrayLike, accepted: ArrayLike
    ) -> Self:
        """Sketch of M labels: position [M] in 0..K-1, features [M], accepted [M] of 1 or 0.

        A label whose feature is not finite is left out.

        >>> Sketch.of(1, [0, 0, 0], [0.0, 50.0, float("nan")], [1, 0, 1]).observations.tolist()
        [2.0]
        """
        k = np.asarray(position, dtype=np.intp)
        f = np.asarray(features, dtype=np.float64)
        y = np.asarray(accepted, dtype=np.float64)
        if k.size and not (k.min() >= 0 and k.max() < positions):
            raise ValueError(f"positions must be in 0..{positions - 1}, got {k.min()}..{k.max()}")
        known = np.isfinite(f)
        k, f, y = k[known], np.clip(f[known], -MAX_LOG_ODDS, MAX_LOG_ODDS), y[known]
        bin_ = np.minimum(np.searchsorted(EDGES, f, side="right") - 1, BINS - 1)
        offset = np.rint((f - EDGES[bin_]) * UNITS_PER_LOGIT)
        cell = k * BINS + bin_
        size = positions * BINS
        sums = [np.bincount(cell, x, size) for x in (np.ones_like(y), y, offset)]
        return cls(np.stack(sums).astype(np.float64).reshape(3, positions, BINS))

    @property
    def positions(self) -> int:
        """K."""
        return int(self.cells.shape[1])

    @property
    def observations(self) -> Array:
        """[K], labels per position."""
        labels: Array = self.cells[COUNT].sum(axis=1)
        return labels

    @property
    def accepted(self) -> Array:
        """[K], accepted labels per position."""
        accepted: Array = self.cells[ACCEPTED].sum(axis=1)
        return accepted

    def merge(self, other: Self) -> Self:
        """The sketch of both. Raises ValueError if they have different K."""
        if self.positions != other.positions:
            raise ValueError(f"cannot merge K={self.positions} with K={other.positions}")
        return type(self)(self.cells + other.cells)

    def calibration(self, slope: float, intercepts: ArrayLike) -> Calibration:
        """Scores over all positions of the coefficients slope, intercepts [K]."""
        p = self._predictions(slope, intercepts)
        return calibrate(p, self.cells[COUNT], accepted=self.cells[ACCEPTED])

    def position_calibrations(self, slope: float, intercepts: ArrayLike) -> list[Calibration]:
        """[K], scores of each position by itself."""
        p = self._predictions(slope, intercepts)
        counts, accepted = self.cells[COUNT], self.cells[ACCEPTED]
        return [calibrate(p[k], counts[k], accepted=accepted[k]) for k in range(self.positions)]

    def reliability(self, slope: float, intercepts: ArrayLike) -> list[ReliabilityBin]:
        """Reliability diagram over all positions."""
        p = self._predictions(slope, intercepts)
        return reliability(p, self.cells[COUNT], accepted=self.cells[ACCEPTED])

    def expected_accepted_length(self, slope: float, intercepts: ArrayLike) -> Array:
        """[K], mean accepted draft tokens when the first 1..K positions are verified.

        A position's labels are those of drafts accepted up to it, so the mean prediction there
        estimates P(accepted | all before it accepted), and the chain rule gives the survival.
        NaN from the first position that has no label on.
        """
        p = self._predictions(slope, intercepts)
        counts = self.cells[COUNT]
        with np.errstate(invalid="ignore"):
            mean = (p * counts).sum(axis=1) / counts.sum(axis=1)
        return np.cumsum(np.cumprod(mean))

    def _predictions(self, slope: float, intercepts: ArrayLike) -> Array:
        """[K, BINS], the probability at each cell's mean feature."""
        at = mean_features(self.cells)
        return predict(slope, np.asarray(intercepts, dtype=np.float64)[:, None], at)

    def pack(self) -> bytes:
        """A bitmap of the cells that hold labels, then each of their columns at its narrowest.

        Bytes: the bitmap, K * BINS bits; the widths of the three columns, 1, 2 or 4; the columns
        in little-endian unsigned integers. At K = 16 a second's labels take 1 to 3 KiB and, with
        every cell in use, 65,535 labels in each take 6.1 KiB.

        Raises OverflowError beyond 2.4 million labels in one cell: drain more often.
        """
        flat = self.cells.reshape(3, -1)
        live = flat[COUNT] > 0.0
        columns = flat[:, live]
        largest = columns.max(axis=1, initial=0.0)
        if largest.max() > _WIRE_LIMIT:
            raise OverflowError(f"a sketch cell holds {largest.max():.0f}, above {_WIRE_LIMIT}")
        widths = [next(w for w in _TYPES if x < 256.0**w) for x in largest]
        packed = (column.astype(_TYPES[w]) for column, w in zip(columns, widths, strict=True))
        return b"".join(
            [np.packbits(live).tobytes(), bytes(widths), *(column.tobytes() for column in packed)]
        )

    @classmethod
    def unpack(cls, positions: int, data: bytes) -> Self:
        """The inverse of `pack`. Raises SketchFormatError if `data` is not what it makes."""
        sketch = cls.empty(positions)
        packed = read_packed(positions, data)
        for sums, column in zip(sketch.cells.reshape(3, -1), packed.columns, strict=True):
            sums[packed.cell] = column
        return sketch


class PackedCells(NamedTuple):
    """The checked content of a packed sketch, its columns as narrow as they came."""

    cell: NDArray[np.intp]
    """[M], ascending: position * BINS + bin."""
    columns: list[NDArray[np.unsignedinteger[Any]]]
    """Labels, accepted labels and offsets, each [M]."""


def read_packed(positions: int, data: bytes) -> PackedCells:
    """What `Sketch.pack` made for K = `positions`. Raises SketchFormatError if it is not that."""
    start = positions * BINS // 8
    if len(data) < start + 3:
        raise SketchFormatError(f"{len(data)} bytes cannot hold a sketch at K={positions}")
    bitmap = np.unpackbits(np.frombuffer(data, np.uint8, start))
    cell = bitmap.view(np.bool_).nonzero()[0]
    widths = data[start : start + 3]
    if not _WIDTHS.issuperset(widths) or len(data) != start + 3 + len(cell) * sum(widths):
        raise SketchFormatError(
            f"{len(data)} bytes do not hold {len(cell)} cells of widths {list(widths)}"
        )
    columns, at = [], start + 3
    for width in widths:
        columns.append(np.frombuffer(data, _TYPES[width], len(cell), at))
        at += len(cell) * width
    counts = columns[COUNT]
    if not (counts.all() and (columns[ACCEPTED] <= counts).all()):
        raise SketchFormatError("a cell holds no label, or accepts more than it counts")
    if not (columns[OFFSET] <= counts * _WIDTH_OF_CELL[cell]).all():
        raise SketchFormatError("the features of a cell lie outside its bin")
    return PackedCells(cell, columns)


def mean_features(cells: Array) -> Array:
    """[..., BINS], mean feature of the labels in each cell of [3, ..., BINS].

    An empty cell stands at its lower edge, where no sum will see it.
    """
    counts = np.maximum(cells[COUNT], np.finfo(np.float64).tiny)
    mean: Array = EDGES[:-1] + cells[OFFSET] / counts / UNITS_PER_LOGIT
    return mean
