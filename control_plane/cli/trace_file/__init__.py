"""Reads a trace of labelled drafts from a Parquet or CSV file.

It lives here and not beside `estimator_service.labelling`, which it hands the rows to, because the
estimator itself computes with NumPy alone.
"""

import csv
from pathlib import Path

import pyarrow as pa

from control_plane.cli.trace_file.columns import Progress
from control_plane.cli.trace_file.csv_file import read_csv
from control_plane.cli.trace_file.parquet_file import read_parquet
from estimator_service.labelling import label_rows
from estimator_service.trace import Trace, TraceError

__all__ = ["Progress", "read_trace"]

READERS = {".csv": read_csv, ".parquet": read_parquet, ".pq": read_parquet}


def read_trace(path: Path, progress: Progress | None = None) -> Trace:
    """Read the trace at `path`, whose suffix says what it is, and label its rows.

    Raises:
        TraceError: it cannot be read, lacks a column, has no rows, or is of another suffix.
    """
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise TraceError(f"{path}: a trace ends in {', '.join(READERS)}")
    try:
        return label_rows(read(path, progress or (lambda done, total: None)))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (pa.ArrowException, csv.Error) as error:
        raise TraceError(f"{path}: not readable as {path.suffix}: {error}") from error
