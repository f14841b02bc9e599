"""From the estimator's snapshot to the API's documents."""

from collections.abc import Mapping

from control_plane.api.documents import (
    CountersDocument,
    DriftDocument,
    FitDocument,
    KeyDocument,
    OverrideDocument,
    PairDocument,
    PolicyDocument,
    PositionDocument,
    ReplicaDocument,
    ScoresDocument,
    StratumDocument,
)
from estimator_service.messages import (
    DriftEvent,
    FitReport,
    Override,
    PairSnapshot,
    ReplicaSnapshot,
    Scores,
    StratumSnapshot,
)


def pair_document(pair: PairSnapshot, stale_seconds: float) -> PairDocument:
    """A pair; a replica that was silent for `stale_seconds` is stale."""
    key, coefficients = pair.key, pair.coefficients
    exploring = set(pair.exploring)
    return PairDocument(
        id=pair.id,
        key=KeyDocument(
            target=key.target,
            drafter=key.drafter,
            method=key.method,
            num_speculative_tokens=key.num_speculative_tokens,
            draft_sample_method=key.draft_sample_method,
        ),
        version=str(coefficients.version),
        source=coefficients.source.value,
        slope=coefficients.slope,
        intercepts=list(coefficients.intercepts),
        calibration=ScoresDocument.model_validate(_scores(pair.scores)),
        first_guess=ScoresDocument.model_validate(_scores(pair.first_guess))
        if pair.first_guess
        else None,
        strata={name: _stratum(stratum) for name, stratum in pair.strata.items()},
        replicas=[_replica(replica, exploring, stale_seconds) for replica in pair.replicas],
        frozen=pair.frozen,
        policy=PolicyDocument(policy=pair.policy.policy.value, length=pair.policy.length),
        override=_override(pair.override) if pair.override else None,
        drifting=pair.drifting,
        drift=[_drift(event) for event in pair.drift],
        exploring=list(pair.exploring),
        last_fit=_fit(pair.last_fit) if pair.last_fit else None,
        counters=_counters(pair),
    )


def _scores(scores: Scores) -> dict[str, float | None]:
    return {
        "observations": scores.observations,
        "log_loss": scores.log_loss,
        "brier": scores.brier,
        "ece": scores.ece,
        "auc": scores.auc,
        "observed": scores.observed,
        "predicted": scores.predicted,
    }


def _stratum(stratum: StratumSnapshot) -> StratumDocument:
    positions = [
        PositionDocument.model_validate(
            {**_scores(scores), "position": position, "intercept": intercept}
        )
        for position, (intercept, scores) in enumerate(
            zip(stratum.intercepts, stratum.positions, strict=True)
        )
    ]
    return StratumDocument.model_validate(
        {
            **_scores(stratum.scores),
            "intercepts": list(stratum.intercepts),
            "positions": positions,
            "expected_accepted_length": list(stratum.expected_accepted_length),
        }
    )


def _replica(
    replica: ReplicaSnapshot, exploring: set[str], stale_seconds: float
) -> ReplicaDocument:
    return ReplicaDocument(
        name=replica.replica,
        applied=str(replica.applied),
        age=replica.age,
        stale=replica.age > stale_seconds,
        quarantined=replica.quarantined,
        held=replica.held,
        exploring=replica.replica in exploring,
        labels=replica.labels,
        residual=replica.residual,
    )


def _override(override: Override) -> OverrideDocument:
    pins = override.pins
    return OverrideDocument(
        slope=pins.slope,
        intercepts=dict(pins.intercepts),
        strata={name: dict(intercepts) for name, intercepts in pins.strata.items()},
        actor=override.actor,
        reason=override.reason,
        created_at=override.created_at,
        expires_at=override.expires_at,
    )


def _drift(event: DriftEvent) -> DriftDocument:
    return DriftDocument(
        at=event.at,
        stratum=event.stratum,
        position=event.position,
        detector=event.detector,
        residual=event.residual,
    )


def _fit(fit: FitReport) -> FitDocument:
    return FitDocument(
        at=fit.at,
        outcome=fit.outcome,
        halvings=fit.halvings,
        step=fit.step,
        published=str(fit.published) if fit.published else None,
    )


_OWN = ("steps", "explored_steps")
"""Counters with a field of their own."""


def _counters(pair: PairSnapshot) -> CountersDocument:
    counters: Mapping[str, float] = pair.counters
    return CountersDocument(
        steps=counters.get("steps", 0.0),
        explored_steps=counters.get("explored_steps", 0.0),
        labels=sum(pair.labels),
        admitted=list(pair.admitted),
        observed=list(pair.labels),
        accepted=list(pair.accepted),
        skipped=dict(pair.skipped),
        events={name: count for name, count in counters.items() if name not in _OWN},
    )
