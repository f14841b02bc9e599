"""Drafts as the file of rows that `specfleet fit` reads."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from estimator_service.trace import Rows
from workers.reference.decoding import Drafts


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


def trace_rows(drafts: Mapping[str, Drafts]) -> Rows:
    """The drafts as a trace, the workload as stratum."""
    parts = []
    requests = 0
    for stratum, d in enumerate(drafts.values()):
        n, k = d.feature.shape
        position = np.tile(np.arange(k), n)
        parts.append(
            (
                np.repeat(d.request + requests, k),
                np.repeat(d.step, k),
                position,
                d.feature.ravel(),
                position < np.repeat(d.admitted, k),
                position < np.repeat(d.accepted, k),
                np.full(n * k, stratum),
            )
        )
        requests += len(d.emitted)
    request, step, position, feature, admitted, accepted, strata = map(
        np.concatenate, zip(*parts, strict=True)
    )
    return Rows(
        line=np.arange(1, len(request) + 1),
        request=request,
        step=step.astype(np.float64),
        position=position.astype(np.float64),
        feature=feature,
        admitted=admitted.astype(np.float64),
        accepted=accepted.astype(np.float64),
        stratum=strata,
        strata=list(drafts),
        malformed=np.array([], dtype=np.int64),
    )
