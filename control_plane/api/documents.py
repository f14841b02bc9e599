"""What the API answers with. Field by field as `estimator_service.messages` has it, for people.

Numbers that are measured may not exist (`Measured`) and are then null; JSON has no NaN.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat


def finite_only(value: Any) -> Any:
    """The same with null for every number that is not finite, at any depth.

    >>> finite_only({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite_only(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [finite_only(inside) for inside in value]
    return value


Measured = Annotated[FiniteFloat | None, BeforeValidator(finite_only)]
Version = Annotated[str, Field(pattern=r"^\d+\.\d+$", examples=["3.14"])]
"""Epoch and number. Compare them as two numbers: 3.9 is before 3.14."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ScoresDocument(_Document):
    """How the coefficients in force do on the labels that are held."""

    observations: FiniteFloat
    """Labels held; older ones count less."""
    log_loss: Measured
    brier: Measured
    ece: Measured
    """Expected calibration error: mean distance of predicted and observed acceptance."""
    auc: Measured
    observed: Measured
    """Share accepted."""
    predicted: Measured
    """Mean predicted acceptance of the same labels."""


class PositionDocument(ScoresDocument):
    """One position of the draft, in one stratum."""

    position: int
    """0-based."""
    intercept: FiniteFloat


class StratumDocument(ScoresDocument):
    """One population of a pair: greedy or sampled decoding, and perhaps a workload."""

    intercepts: list[FiniteFloat]
    """[K]."""
    positions: list[PositionDocument]
    """[K]."""
    expected_accepted_length: list[Measured]
    """[K], draft tokens accepted when 1..K are verified."""


class ReplicaDocument(_Document):
    """One replica, as the estimator knows it."""

    name: str
    applied: Version
    """The coefficients in force there."""
    age: FiniteFloat
    """Seconds since it was last heard."""
    stale: bool
    """It was not heard for several exchange intervals: what it has applied may be old."""
    quarantined: bool
    """Its labels are kept out: they stand far outside the fleet's."""
    held: bool
    """Kept out by an operator, until an operator clears it."""
    exploring: bool
    """It was asked to verify whole drafts for a share of its steps."""
    labels: FiniteFloat
    """Merged from it, in all."""
    residual: Measured
    """Mean of accepted minus predicted, of late."""


class KeyDocument(_Document):
    """What the coefficients belong to."""

    target: str
    drafter: str
    method: str
    num_speculative_tokens: int
    """K."""
    draft_sample_method: str


class PolicyDocument(_Document):
    """What replicas do with the predictions."""

    policy: Literal["adaptive", "fixed", "full", "advisory"]
    length: int | None
    """Draft tokens to verify, of `fixed`."""


class OverrideDocument(_Document):
    """Coefficients that an operator holds at a value."""

    slope: FiniteFloat | None
    intercepts: dict[int, FiniteFloat]
    """By position."""
    strata: dict[str, dict[int, FiniteFloat]]
    """By stratum and position."""
    actor: str
    reason: str
    created_at: FiniteFloat
    expires_at: FiniteFloat


class DriftDocument(_Document):
    """One detection."""

    at: FiniteFloat
    stratum: str
    position: int
    detector: str
    residual: Measured
    """Standardized."""


class FitDocument(_Document):
    """What the last refit did."""

    at: FiniteFloat
    outcome: str
    halvings: int
    step: Measured
    """Of the largest move, in logits."""
    published: Version | None
    """The version that it made, if it made one."""


class CountersDocument(_Document):
    """Sums over the pair's whole life, restarts of the estimator included."""

    steps: FiniteFloat
    """Verification steps."""
    explored_steps: FiniteFloat
    """Those that verified whole drafts because the estimator had asked for it."""
    labels: FiniteFloat
    """Merged, at all positions."""
    admitted: list[FiniteFloat]
    """[K], draft tokens verified."""
    observed: list[FiniteFloat]
    """[K], labels merged: tokens that were verified with everything before them accepted."""
    accepted: list[FiniteFloat]
    """[K], accepted ones among the labels."""
    skipped: dict[str, FiniteFloat]
    """Requests verified but not observed, by reason."""
    events: dict[str, FiniteFloat]
    """Frames, refits, detections and quarantines, by kind."""


class PairDocument(_Document):
    """One pair of target and drafter."""

    id: str
    key: KeyDocument
    version: Version
    """Of the coefficients in force."""
    source: Literal["initial", "fitted", "override", "rollback"]
    """What made them."""
    slope: FiniteFloat
    intercepts: list[FiniteFloat]
    """[K]; of a stratum that has none of its own."""
    calibration: ScoresDocument
    """Over all strata."""
    first_guess: ScoresDocument | None
    """The same labels, with the coefficients that every pair starts from."""
    strata: dict[str, StratumDocument]
    replicas: list[ReplicaDocument]
    frozen: bool
    """Nothing is refitted until an operator says so."""
    policy: PolicyDocument
    override: OverrideDocument | None
    drifting: bool
    """The traffic has changed and the fit is catching up."""
    drift: list[DriftDocument]
    """The latest detections, oldest first."""
    exploring: list[str]
    """Replicas that verify whole drafts for a share of their steps."""
    last_fit: FitDocument | None
    counters: CountersDocument


class PairsDocument(_Document):
    """The fleet."""

    pairs: list[PairDocument]
    epoch: int
    """Of the estimator: grows with each of its lives."""
    taken_at: FiniteFloat
    unattributed: dict[str, FiniteFloat]
    """Frames that were refused before it was known which pair they are of, by reason."""


_SCORES = {
    "observations": 8213.5,
    "log_loss": 0.4311,
    "brier": 0.1402,
    "ece": 0.0083,
    "auc": 0.8127,
    "observed": 0.7124,
    "predicted": 0.7151,
}

EXAMPLE: dict[str, Any] = {
    "id": "reference-draft-model-k2-3d3c7db0",
    "key": {
        "target": "reference",
        "drafter": "draft",
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    },
    "version": "3.14",
    "source": "fitted",
    "slope": 0.6931,
    "intercepts": [0.1201, -0.0522],
    "calibration": _SCORES,
    "first_guess": _SCORES,
    "strata": {
        "sampled-code": {
            **_SCORES,
            "intercepts": [0.1304, -0.0611],
            "positions": [
                {**_SCORES, "position": 0, "intercept": 0.1304},
                {**_SCORES, "position": 1, "intercept": -0.0611},
            ],
            "expected_accepted_length": [0.7124, 1.2207],
        }
    },
    "replicas": [
        {
            "name": "reference-7f3a",
            "applied": "3.14",
            "age": 0.41,
            "stale": False,
            "quarantined": False,
            "held": False,
            "exploring": False,
            "labels": 10443.0,
            "residual": -0.0021,
        }
    ],
    "frozen": False,
    "policy": {"policy": "adaptive", "length": None},
    "override": None,
    "drifting": False,
    "drift": [],
    "exploring": [],
    "last_fit": {
        "at": 1764540120.25,
        "outcome": "moved",
        "halvings": 0,
        "step": 0.0121,
        "published": "3.14",
    },
    "counters": {
        "steps": 4102.0,
        "explored_steps": 12.0,
        "labels": 10443.0,
        "admitted": [6310.0, 5120.0],
        "observed": [6001.0, 4442.0],
        "accepted": [4721.0, 3105.0],
        "skipped": {"penalties": 3.0},
        "events": {"frames_merged": 812.0, "refits_moved": 120.0},
    },
}
