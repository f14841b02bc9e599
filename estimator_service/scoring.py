"""What the held evidence says of a coefficient set."""

from __future__ import annotations

import math

import numpy as np

from estimator_service.calibration import Calibration, calibrate
from estimator_service.evidence import Evidence
from estimator_service.logistic import Array, predict
from estimator_service.messages import CoefficientSet, Scores, StratumSnapshot
from estimator_service.sketch import ACCEPTED, COUNT, Sketch, mean_features


def pair_scores(evidence: Evidence, coefficients: CoefficientSet) -> Scores:
    """Calibration over all strata and positions."""
    if not evidence.strata:
        return _scores(calibrate([], [], accepted=[]))
    intercepts = np.array([coefficients.intercepts_of(name) for name in evidence.strata])
    cells = np.moveaxis(evidence.sketches, 1, 0)
    p = predict(coefficients.slope, intercepts[:, :, None], mean_features(cells))
    return _scores(calibrate(p, cells[COUNT], accepted=cells[ACCEPTED]))


def stratum_snapshots(
    evidence: Evidence, coefficients: CoefficientSet
) -> dict[str, StratumSnapshot]:
    """Calibration of each stratum and of each of its positions."""
    snapshots = {}
    for name, cells in zip(evidence.strata, evidence.sketches, strict=True):
        sketch, intercepts = Sketch(cells), coefficients.intercepts_of(name)
        slope = coefficients.slope
        snapshots[name] = StratumSnapshot(
            intercepts=intercepts,
            scores=_scores(sketch.calibration(slope, intercepts)),
            positions=tuple(map(_scores, sketch.position_calibrations(slope, intercepts))),
            expected_accepted_length=_optional(sketch.expected_accepted_length(slope, intercepts)),
        )
    return snapshots


def _scores(calibration: Calibration) -> Scores:
    c = calibration
    return Scores(
        c.observations,
        *(None if math.isnan(x) else x for x in (c.log_loss, c.brier, c.ece, c.auc)),
        *(None if math.isnan(x) else x for x in (c.observed, c.predicted)),
    )


def _optional(values: Array) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(x) else x for x in values.tolist())
