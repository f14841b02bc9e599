"""The JSON document of `specfleet fit --json`.

What does not exist, such as the AUC of labels that are all alike, is null.
"""

import math
from dataclasses import asdict
from typing import Any

from estimator_service.calibration import Calibration
from estimator_service.offline import OfflineFit
from estimator_service.trace import Trace


def document(trace: Trace, fit: OfflineFit) -> dict[str, Any]:
    """Plain lists, numbers and strings; `rejections` names the first of the rejected rows."""
    return {
        "slope": fit.slope,
        "intercepts": fit.intercepts.tolist(),
        "observations": fit.observations.tolist(),
        **_scores(fit.calibration),
        "per_position": [
            {
                "position": position,
                "observations": int(scores.observations),
                **_scores(scores),
                "observed": _or_null(scores.observed),
                "predicted": _or_null(scores.predicted),
            }
            for position, scores in enumerate(fit.per_position)
        ],
        "strata": {
            name: {
                "slope": fit.slope,
                "intercepts": stratum.intercepts.tolist(),
                "observations": stratum.observations.tolist(),
                **_scores(stratum.calibration),
            }
            for name, stratum in fit.strata.items()
        },
        "reliability": [asdict(bar) for bar in fit.reliability],
        "converged": fit.converged,
        "problems": fit.problems,
        "iterations": fit.iterations,
        "rows": trace.rows,
        "rejected_rows": trace.rejected_rows,
        "rejection_reasons": dict(trace.rejection_reasons),
        "rejections": [asdict(rejection) for rejection in trace.rejections],
    }


def _scores(calibration: Calibration) -> dict[str, float | None]:
    return {
        "log_loss": _or_null(calibration.log_loss),
        "brier": _or_null(calibration.brier),
        "ece": _or_null(calibration.ece),
        "auc": _or_null(calibration.auc),
    }


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None
