"""Writes a trace of the rows that replicas recorded, as a Parquet file that `read_trace` reads."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from estimator_service.trace import TraceError

SCHEMA = pa.schema(
    [
        ("request", pa.string()),
        ("step", pa.int64()),
        ("position", pa.int32()),
        ("feature", pa.float64()),
        ("admitted", pa.int8()),
        ("accepted", pa.int8()),
        ("stratum", pa.string()),
        ("token", pa.int32()),
        ("q_max", pa.float64()),
        ("entropy", pa.float64()),
        ("margin", pa.float64()),
        ("q_drawn", pa.float64()),
    ]
)
"""The columns of a replica's record. `specfleet fit` needs the first seven."""
GROUP_ROWS = 50_000
"""Of a row group: what is held in memory until it is written."""


class TraceWriter:
    """A trace that appears at its path when it is complete, and not before.

    Use it as a context manager. It writes into a file beside, which is renamed by `commit`, and is
    gone without it.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        """Begin. With `append`, with the rows that are in the file at `path`, if there is one.

        Raises:
            TraceError: these are no recorded rows, or the directory cannot be written to.
        """
        self.path = path
        self.rows = 0
        """Added."""
        self.earlier = 0
        """Taken over from the file that was there."""
        self.strata: Counter[str] = Counter()
        """Rows added, by stratum."""
        self._beside = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._held: list[Any] = []
        self._held_rows = 0
        try:
            self._writer = pq.ParquetWriter(self._beside, SCHEMA, compression="zstd")
            if append and path.exists():
                self._take_over()
        except OSError as error:
            self._discard()
            raise TraceError(f"{path}: {error.strerror or error}") from error
        except (TraceError, pa.ArrowException) as error:
            self._discard()
            raise TraceError(f"{path}: {error}") from error

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def add(self, columns: Mapping[str, Sequence[Any]]) -> int:
        """Add rows by column, as a replica's record has them; returns how many.

        Raises:
            TraceError: a column is missing or is not what it should be, or the disk is full.
        """
        try:
            table = pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)
        except KeyError as error:
            raise TraceError(f"a replica's record has no column {error}") from error
        except pa.ArrowException as error:
            raise TraceError(f"a replica's record is not as expected: {error}") from error
        if table.num_rows:
            self.strata.update(columns["stratum"])
            self.rows += table.num_rows
            self._held.append(table)
            self._held_rows += table.num_rows
        if self._held_rows >= GROUP_ROWS:
            self._flush()
        return int(table.num_rows)

    def commit(self) -> None:
        """Put the file where it belongs. Raises TraceError."""
        self._flush()
        try:
            self._writer.close()
            self._beside.replace(self.path)
        except OSError as error:
            raise TraceError(f"{self.path}: {error.strerror or error}") from error

    def _flush(self) -> None:
        if not self._held:
            return
        try:
            self._writer.write_table(pa.concat_tables(self._held), row_group_size=GROUP_ROWS)
        except OSError as error:
            raise TraceError(f"{self.path}: {error.strerror or error}") from error
        self._held, self._held_rows = [], 0

    def _take_over(self) -> None:
        with pq.ParquetFile(self.path) as file:
            names = file.schema_arrow.names
            if sorted(names) != sorted(SCHEMA.names):
                raise TraceError(f"not written by `specfleet record`; its columns: {names}")
            for batch in file.iter_batches(GROUP_ROWS, columns=SCHEMA.names):
                table = pa.Table.from_batches([batch]).select(SCHEMA.names).cast(SCHEMA)
                self._writer.write_table(table)
                self.earlier += table.num_rows

    def _discard(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.close()
        self._beside.unlink(missing_ok=True)
