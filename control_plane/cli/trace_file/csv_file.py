"""A trace from a CSV file, every row with the line that it begins on.

Arrow splits the rows, which takes a tenth of a second per million, and knows the numbers of those
that it cannot split. It is asked for text, not numbers: a value that is no number would cost the
whole file. Numbers are read from the text in `columns`.
"""

from __future__ import annotations

import csv
from collections import deque
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from control_plane.cli.trace_file.columns import REQUIRED, STRATUM, Columns, Progress, check_names
from estimator_service.trace import Flags, Ints, Rows, TraceError

BLOCK_BYTES = 4 << 20
"""Read at a time. Also the longest row, which a prompt in a further column may make long."""


def read_csv(path: Path, progress: Progress) -> Rows:
    """The rows of a CSV file with a header. Line 1 is the file's first. Progress is in bytes."""
    header, header_lines = _read_header(path)
    check_names(header)
    known = (*REQUIRED, STRATUM)
    names = [name if name in known else f"further {i}" for i, name in enumerate(header)]
    columns, numbering = Columns(), _Numbering(header_lines)
    size = path.stat().st_size
    try:
        # Unbuffered: Arrow reads ahead in a thread, and only a bare file can say meanwhile how far.
        with path.open("rb", buffering=0) as file:
            for batch in _split(file, names, header_lines, numbering):
                columns.add(batch.filter(numbering.add(batch)))
                progress(file.tell(), size)
    except pa.ArrowInvalid as error:
        if "straddles two block boundaries" not in str(error):
            raise
        why = f"a row is longer than {BLOCK_BYTES} bytes; is a quote never closed?"
        raise TraceError(why) from error
    return columns.rows(*numbering.lines(path))


def _split(file: FileIO, names: list[str], header_lines: int, numbering: _Numbering) -> Any:
    """An iterator over record batches of text."""
    return pacsv.open_csv(
        file,
        pacsv.ReadOptions(
            # Several threads would not know the numbers of the rows that they skip.
            use_threads=False,
            block_size=BLOCK_BYTES,
            skip_rows=header_lines,
            column_names=names,
        ),
        pacsv.ParseOptions(
            newlines_in_values=True,
            ignore_empty_lines=False,
            invalid_row_handler=numbering.skip,
        ),
        pacsv.ConvertOptions(
            # A request's id need not be UTF-8, and what is a number is found out later.
            check_utf8=False,
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[],
        ),
    )


def _read_header(path: Path) -> tuple[list[str], int]:
    """The first line's names, and how many lines it and empty ones before it take."""
    # A byte order mark goes with "-sig"; newline="" is what the csv module asks for.
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as text:
        reader = csv.reader(text)
        header = next((row for row in reader if row), None)
        if header is None:
            raise TraceError("the file is empty")
        if not text.read(1):
            raise TraceError("the trace has no rows")
        return [name.strip() for name in header], reader.line_num


class _Numbering:
    """Which line each row begins on, though rows are skipped and values hold line breaks."""

    def __init__(self, header_lines: int) -> None:
        self._first = header_lines + 1
        self._full: list[Flags] = []
        self._breaks: list[Ints] = []
        self._skipped: list[int] = []
        self._skipped_breaks: list[int] = []

    def skip(self, row: Any) -> str:
        """Arrow's handler of rows that it cannot split: a `pyarrow.csv.InvalidRow`."""
        # Its number is the line where no value holds a line break.
        self._skipped.append(row.number - self._first)
        self._skipped_breaks.append(row.text.count("\n"))
        return "skip"

    def add(self, batch: Any) -> Any:
        """Count the rows of a batch; returns the mask of those that are not empty."""
        breaks, length = np.zeros((2, len(batch)), dtype=np.int64)
        for column in batch.columns:
            breaks += pc.count_substring(column, "\n").to_numpy(zero_copy_only=False)
            length += pc.binary_length(column).to_numpy(zero_copy_only=False)
        self._breaks.append(breaks)
        self._full.append(length > 0)
        return pa.array(length > 0)

    def lines(self, path: Path) -> tuple[Ints, Ints]:
        """Of the rows that were kept, and of what was no row.

        Raises:
            TraceError: a quote was never closed, so that the last row swallowed the rest.
        """
        full = np.concatenate([np.empty(0, dtype=bool), *self._full])
        skipped = np.zeros(len(full) + len(self._skipped), dtype=bool)
        skipped[self._skipped] = True
        breaks = np.zeros(len(skipped), dtype=np.int64)
        breaks[~skipped] = np.concatenate([np.empty(0, dtype=np.int64), *self._breaks])
        breaks[skipped] = self._skipped_breaks
        line = self._first + np.arange(len(breaks)) + np.cumsum(breaks) - breaks
        if len(breaks) and breaks[-1]:
            _check_closed(path, int(line[-1]))
        kept, empty = line[~skipped][full], line[~skipped][~full]
        # A row of commas alone is a bad row, and an empty line is none.
        blank = _blank_lines(path) if len(empty) else []
        malformed = np.concatenate([line[skipped], empty[~np.isin(empty, blank)]])
        return kept, np.sort(malformed)


def _check_closed(path: Path, last: int) -> None:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as text:
        try:
            deque(csv.reader(islice(text, last - 1, None), strict=True), maxlen=0)
        except csv.Error as error:
            if "expected after" not in str(error):
                raise TraceError(f"line {last}: a quote is opened and never closed") from error


def _blank_lines(path: Path) -> list[int]:
    with path.open("rb") as file:
        return [number for number, line in enumerate(file, 1) if not line.strip(b"\r\n")]
