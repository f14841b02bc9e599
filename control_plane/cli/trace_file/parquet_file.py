"""A trace from a Parquet file."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from control_plane.cli.trace_file.columns import REQUIRED, STRATUM, Columns, Progress, check_names
from estimator_service.trace import Rows

BATCH_ROWS = 1 << 17


def read_parquet(path: Path, progress: Progress) -> Rows:
    """The rows of a Parquet file, numbered from 1. Progress is in rows."""
    columns, done = Columns(), 0
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        check_names(names)
        total = file.metadata.num_rows
        wanted = [name for name in (*REQUIRED, STRATUM) if name in names]
        for batch in file.iter_batches(BATCH_ROWS, columns=wanted):
            columns.add(batch)
            done += len(batch)
            progress(done, total)
    return columns.rows(np.arange(1, done + 1), malformed=np.empty(0, dtype=np.int64))
