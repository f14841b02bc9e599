"""A pair as others see it: `messages.PairSnapshot`.

Its counters are

    frames_merged, frames_duplicate, frames_quarantined, frames_discarded, frames_refused
    refused_<reason>        refused frames, by `messages.Refusal`
    frames_lost             given up by their senders before they arrived
    labels_rejected         labels dropped when their replica was quarantined
    quarantines             times that a replica was quarantined
    refits_<outcome>        by `irls.Outcome`
    drift_<detector>        detections
    steps, explored_steps   verification steps of the replicas
"""

from estimator_service.messages import CoefficientSet, PairSnapshot, ReplicaSnapshot
from estimator_service.pair import Pair
from estimator_service.scoring import pair_scores, stratum_snapshots


def pair_snapshot(pair: Pair, now: float) -> PairSnapshot:
    """A pair at monotonic time `now`."""
    return PairSnapshot(
        id=pair.id,
        key=pair.key,
        coefficients=pair.in_force,
        scores=pair_scores(pair.evidence, pair.in_force),
        first_guess=pair_scores(pair.evidence, CoefficientSet.initial(pair.positions)),
        strata=stratum_snapshots(pair.evidence, pair.in_force),
        replicas=tuple(_replica(pair, name, now) for name in sorted(pair.replicas)),
        frozen=pair.frozen,
        policy=pair.policy,
        override=pair.override,
        drifting=pair.monitor.drifting,
        exploring=tuple(sorted(pair.exploration.orders)),
        last_fit=pair.last_fit,
        drift=tuple(pair.events),
        counters=dict(pair.tally.counters),
        skipped=dict(pair.tally.skipped),
        admitted=tuple(pair.tally.admitted),
        labels=tuple(pair.tally.labels),
        accepted=tuple(pair.tally.accepted),
    )


def _replica(pair: Pair, name: str, now: float) -> ReplicaSnapshot:
    replica, standing = pair.replicas[name], pair.trust.standing(name)
    return ReplicaSnapshot(
        replica=name,
        incarnation=replica.incarnation,
        applied=replica.applied,
        age=max(now - replica.heard_at, 0.0),
        labels=replica.labels,
        residual=standing.residual,
        quarantined=standing.quarantined,
        held=standing.held,
    )
