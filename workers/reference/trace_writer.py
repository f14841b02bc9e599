"""Drafts as the file of rows that `specfleet fit` reads."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from workers.reference.decoding import Drafts
from workers.reference.figures import trace_rows


def write_trace(path: Path, drafts: Mapping[str, Drafts]) -> None:
    """One row for each position of each draft; the workload is the stratum."""
    rows = trace_rows(drafts)
    table = pa.table(
        {
            "request": rows.request,
            "step": rows.step.astype(np.int64),
            "position": rows.position.astype(np.int64),
            "feature": rows.feature,
            "admitted": rows.admitted.astype(np.int64),
            "accepted": rows.accepted.astype(np.int64),
            "stratum": np.array(rows.strata)[rows.stratum],
        }
    )
    pq.write_table(table, path)
