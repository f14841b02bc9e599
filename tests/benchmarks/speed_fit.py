"""Coefficients from a worker's record, as `specfleet fit` would find them."""

from __future__ import annotations

from typing import Any

import numpy as np

from estimator_service.messages import CoefficientSet, Source, Version
from estimator_service.offline import fit_labels
from estimator_service.trace import Labels
from workers.vllm.rpc import write_coefficients


def fit_record(rows: dict[str, list[Any]], positions: int, version: Version) -> dict[str, Any]:
    """A coefficient set in plain types, from rows in the order in which drafts were verified."""
    columns = {name: np.array(rows[name]) for name in ("position", "feature", "stratum")}
    admitted, accepted = np.array(rows["admitted"]), np.array(rows["accepted"])
    # Observed: admitted, and everything before it in its draft accepted.
    before = np.where(columns["position"] == 0, 1, np.roll(accepted, 1))
    chosen = (admitted == 1) & (before == 1) & np.isfinite(columns["feature"])
    strata, stratum = np.unique(columns["stratum"][chosen], return_inverse=True)
    fit = fit_labels(
        Labels(
            positions,
            columns["position"][chosen],
            columns["feature"][chosen],
            accepted[chosen].astype(np.float64),
            stratum,
            tuple(strata.tolist()),
        ),
        smoothness=4.0,
    )
    return write_coefficients(
        CoefficientSet(
            version,
            Source.FITTED,
            fit.slope,
            tuple(fit.intercepts.tolist()),
            {name: tuple(part.intercepts.tolist()) for name, part in fit.strata.items()},
        )
    )
