"""One pair: from checked rounds to published coefficients, and an operator's say in it."""

from __future__ import annotations

import copy
from collections import deque

import msgspec
import numpy as np

from estimator_service.config import EstimatorConfig
from estimator_service.drift.monitor import DriftMonitor
from estimator_service.evidence import Evidence
from estimator_service.exploration import Exploration
from estimator_service.intake import FrameRefused, check_frame
from estimator_service.irls import MAX_INTERCEPT, MAX_SLOPE, FitResult, Outcome
from estimator_service.messages import (
    CoefficientSet,
    DriftEvent,
    FitReport,
    Frame,
    FrameStatus,
    Override,
    PairKey,
    Pinned,
    Refusal,
    Source,
    Version,
    decode_array,
    encode_array,
)
from estimator_service.orders import resolve_pins
from estimator_service.pair_state import PairState, Replica
from estimator_service.parameters import Parameters, Pins
from estimator_service.pooling import refit
from estimator_service.records import EvidenceRecord, PairRecord, VersionRecord
from estimator_service.scoring import pair_scores
from estimator_service.sketch import BINS
from estimator_service.statistics import WIDTH, N
from estimator_service.tally import Tally
from estimator_service.trust import Trust

EVENTS = 100
"""Latest drift events that a pair remembers."""


class Pair:
    """Learns one pair's coefficients. Not thread-safe; time is passed to each call.

    `now` is monotonic seconds, `wall` Unix time.
    """

    def __init__(
        self,
        key: PairKey,
        config: EstimatorConfig,
        epoch: int,
        now: float,
        wall: float,
        state: PairState | None = None,
        evidence: tuple[EvidenceRecord, ...] = (),
    ) -> None:
        self.key = key
        self.id = key.id
        self.positions = key.num_speculative_tokens
        initial = CoefficientSet.initial(self.positions)
        state = state or PairState(initial, initial, Tally.empty(self.positions))
        self._config = config
        self._epoch = epoch
        self._number = 0
        self.in_force = state.in_force
        self.tally = state.tally
        self.override = state.override
        self.policy = state.policy
        self.frozen = state.frozen
        self.events: deque[DriftEvent] = deque(state.events, EVENTS)
        self.last_fit = state.last_fit
        self.replicas: dict[str, Replica] = {}
        self.monitor = DriftMonitor(config.drift, self.positions, state.monitor)
        self.exploration = Exploration(config.exploration)
        self.trust = Trust(config.trust)
        for name in state.quarantined:
            self.trust.standing(name).quarantined = True
        for name in state.held:
            self.trust.standing(name).held = True
        self.evidence = Evidence(self.positions)
        for name in state.strata:
            self.evidence.add_stratum(name)
        for record in evidence:
            self.evidence.put(
                record.stratum,
                decode_array(record.quadratic).reshape(self.positions, WIDTH),
                decode_array(record.sketch).reshape(3, self.positions, BINS),
            )
        self._fitted = self._parameters(state.fitted)
        self._steered = self._parameters(state.in_force)
        self._voided = state.voided
        # Deadlines run on the monotonic clock; only a restart has to believe the wall clock.
        self._grace_ends_at = state.grace_until
        self._grace_ends = now + state.grace_until - wall
        expires_at = self.override.expires_at if self.override else wall
        self._override_ends = now + expires_at - wall
        self._folded_at = now
        self._folded_tally = copy.deepcopy(self.tally)
        self.new_versions: list[VersionRecord] = []
        """Published, and not yet stored."""

    # -- frames ---------------------------------------------------------------------------------

    def take(self, frame: Frame, now: float) -> FrameStatus:
        """Take a frame that has not come before. Raises FrameRefused."""
        rounds = check_frame(frame, self.positions)
        new = [part.stratum for part in rounds if not self.evidence.knows(part.stratum)]
        if len(self.evidence.strata) + len(new) > self._config.max_strata:
            raise FrameRefused(
                Refusal.TOO_MANY_STRATA, f"{new[0]} would exceed {self._config.max_strata} strata"
            )
        self._hear(frame, now)
        self.tally.take_traffic(frame)
        if self._voided and self._voided[0] < frame.graded < self._voided[1]:
            return FrameStatus.DISCARDED
        for name in new:
            self.evidence.add_stratum(name)
        # A quarantined replica's rounds arrive like any other's: it is judged by them, and they
        # are dropped, or not, when they would be folded in.
        for part in rounds:
            self.evidence.arrive(frame.replica, part, frame.slope)
        trusted = self.trust.standing(frame.replica).trusted
        return FrameStatus.MERGED if trusted else FrameStatus.QUARANTINED

    def _hear(self, frame: Frame, now: float) -> None:
        replica = self.replicas.get(frame.replica)
        if replica is None:
            self.replicas[frame.replica] = Replica(frame.incarnation, frame.applied, now)
        elif frame.incarnation >= replica.incarnation:
            replica.incarnation, replica.applied = frame.incarnation, frame.applied
            replica.heard_at = now

    # -- fitting --------------------------------------------------------------------------------

    def refit(self, now: float, wall: float) -> FitResult:
        """Fold what arrived into the evidence, refit, and publish what has moved."""
        arrivals = self.evidence.arrivals()
        for name, statistics in arrivals.items():
            self.trust.observe(name, statistics)
        fallen, _ = self.trust.judge()
        self.tally.count("quarantines", len(fallen))
        brought = {}
        for name, statistics in arrivals.items():
            labels = float(statistics[N])
            if self.trust.standing(name).trusted:
                brought[name] = labels
            else:
                self.tally.count("labels_rejected", labels)
        folded = self.evidence.fold(
            brought,
            discount=0.5 ** ((now - self._folded_at) / self._config.fit.half_life),
            share=self._config.trust.influence,
            keep=self._config.drift.keep_labels if self.monitor.drifting else np.inf,
        )
        self._folded_at = now
        self.tally.take_labels(*folded.counted)
        for name, labels in brought.items():
            self.replicas[name].labels += labels
        for found in self.monitor.observe(self.evidence.strata, folded.residuals):
            self.tally.count(f"drift_{found.detector}")
            self.events.append(
                DriftEvent(wall, found.stratum, found.position, found.detector, found.residual)
            )
        self.exploration.plan(self.evidence.labels, self.evidence.accepted, self.live(now))
        result, published = self._solve(folded.labels, now, wall)
        self.tally.count(f"refits_{result.outcome}")
        self.last_fit = FitReport(wall, result.outcome, result.halvings, result.step, published)
        self._forget_silent(now)
        self._folded_tally = copy.deepcopy(self.tally)
        return result

    def _solve(self, fresh: float, now: float, wall: float) -> tuple[FitResult, Version | None]:
        strata = len(self.evidence.strata)
        self._fitted = self._fitted.with_strata(strata)
        self._steered = self._steered.with_strata(strata)
        if self.frozen or now < self._grace_ends:
            return FitResult(Outcome.HELD, self._steered), None
        if not fresh > 0.0:
            return FitResult(Outcome.NO_EVIDENCE, self._steered), None
        result = self._step(self._fitted, Pins.none(strata, self.positions))
        self._fitted = result.coefficients
        if self.override is None:
            self._steered = self._fitted
        else:
            # What is not pinned keeps fitting around the pins, from where it is.
            result = self._step(self._steered, self._pins())
            self._steered = result.coefficients
        moved = self._steered.distance(self._parameters(self.in_force))
        if not result.outcome.ok or moved <= self._config.fit.publish_above:
            return result, None
        source = Source.FITTED if self.override is None else Source.OVERRIDE
        return result, self._publish(source, "refit", wall)

    def _step(self, start: Parameters, pins: Pins) -> FitResult:
        evidence = self.evidence
        return refit(evidence.quadratics, evidence.sketches, start, self._config.fit.priors, pins)

    def _pins(self) -> Pins:
        pinned = self.override.pins if self.override else Pinned()
        return resolve_pins(pinned, self.evidence.strata, self.positions)

    # -- orders ---------------------------------------------------------------------------------

    def start_override(self, override: Override, now: float) -> None:
        """Put pins in force, in place of any others. Raises OrderError."""
        pins = resolve_pins(override.pins, self.evidence.strata, self.positions)
        self.override = override
        self._override_ends = now + override.expires_at - override.created_at
        self._steered = pins.apply(self._fitted.with_strata(len(self.evidence.strata)))
        # Residuals of pinned coefficients say how good the pins are, not whether traffic changed.
        self.monitor.restart()
        self._publish(Source.OVERRIDE, override.reason, override.created_at)

    def override_expired(self, now: float) -> bool:
        """Whether there is an override whose time is up."""
        return self.override is not None and now >= self._override_ends

    def end_override(self, reason: str, wall: float) -> None:
        """Return to the fitted coefficients, which kept learning meanwhile."""
        self.override = None
        self._steered = self._fitted
        self.monitor.restart()
        self._publish(Source.FITTED, reason, wall)

    def roll_back(self, to: CoefficientSet, reason: str, now: float, wall: float) -> None:
        """Put an old version's content in force as a new version.

        Every label that is held was, or may have been, gathered under what is being left: it is
        forgotten, rounds still to come from there will be discarded, and refits are held for the
        grace period. An override ends.
        """
        self.override = None
        self.evidence.clear()
        self.monitor.restart()
        self._fitted = self._steered = self._parameters(to)
        version = self._publish(Source.ROLLBACK, reason, wall)
        self._voided = (to.version, version)
        self._grace_ends = now + self._config.rollback_grace
        self._grace_ends_at = wall + self._config.rollback_grace

    def restate(self, wall: float) -> None:
        """After a restart: publish what is in force under the new epoch.

        The incarnation before may have published something newer without storing it: so every
        replica is told again what holds.
        """
        if self.in_force.source is not Source.INITIAL:
            self._publish(self.in_force.source, "restated after a restart", wall)

    # -- reading --------------------------------------------------------------------------------

    def live(self, now: float) -> list[str]:
        """Replicas heard of lately."""
        since = now - self._config.replica_timeout
        return sorted(name for name, r in self.replicas.items() if r.heard_at >= since)

    def state(self) -> PairState:
        """For a checkpoint, with the counters as they were at the last fold."""
        standings = self.trust.standings
        return PairState(
            in_force=self.in_force,
            fitted=self._coefficients(self._fitted, Version(), Source.FITTED),
            tally=self._folded_tally,
            strata=self.evidence.strata,
            override=self.override,
            policy=self.policy,
            frozen=self.frozen,
            quarantined=sorted(n for n, s in standings.items() if s.quarantined),
            held=sorted(n for n, s in standings.items() if s.held),
            monitor=self.monitor.state,
            events=list(self.events),
            last_fit=self.last_fit,
            voided=self._voided,
            grace_until=self._grace_ends_at,
        )

    def record(self) -> PairRecord:
        """`state` as the store keeps it."""
        return PairRecord(self.key, msgspec.json.encode(self.state()))

    def evidence_records(self) -> list[EvidenceRecord]:
        """The merged evidence as the store keeps it."""
        return [
            EvidenceRecord(self.id, name, encode_array(quadratic), encode_array(sketch))
            for name, quadratic, sketch in zip(
                self.evidence.strata, self.evidence.quadratics, self.evidence.sketches, strict=True
            )
        ]

    def faults(self) -> list[str]:
        """What is wrong inside; empty if nothing is."""
        found = self.evidence.faults()
        for name, parameters in (("fitted", self._fitted), ("in force", self._steered)):
            values = [parameters.slope, *parameters.intercepts, *parameters.strata.ravel()]
            if not np.isfinite(values).all():
                found.append(f"coefficients {name}: not finite")
            elif not (0.0 <= parameters.slope <= MAX_SLOPE):
                found.append(f"coefficients {name}: slope {parameters.slope} out of range")
            elif np.abs(values[1:]).max() > MAX_INTERCEPT:
                found.append(f"coefficients {name}: an intercept is out of range")
        return [f"pair {self.id}: {fault}" for fault in found]

    # -- inside ---------------------------------------------------------------------------------

    def _publish(self, source: Source, reason: str, wall: float) -> Version:
        self._number += 1
        version = Version(self._epoch, self._number)
        self.in_force = self._coefficients(self._steered, version, source)
        held = pair_scores(self.evidence, self.in_force)
        scores = held if held.observations > 0.0 else None
        self.new_versions.append(VersionRecord(self.id, self.in_force, wall, reason, scores))
        return version

    def _forget_silent(self, now: float) -> None:
        since = now - self._config.replica_retention
        for name in [name for name, r in self.replicas.items() if r.heard_at < since]:
            del self.replicas[name]
            self.trust.forget(name)

    def _parameters(self, coefficients: CoefficientSet) -> Parameters:
        rows = [coefficients.intercepts_of(name) for name in self.evidence.strata]
        return Parameters(
            coefficients.slope,
            np.array(coefficients.intercepts),
            np.array(rows).reshape(len(rows), self.positions),
        )

    def _coefficients(
        self, parameters: Parameters, version: Version, source: Source
    ) -> CoefficientSet:
        return CoefficientSet(
            version,
            source,
            float(parameters.slope),
            tuple(parameters.intercepts.tolist()),
            # A stratum that came after the last refit has no row yet: it uses the pair's.
            {
                name: tuple(row)
                for name, row in zip(self.evidence.strata, parameters.strata.tolist(), strict=False)
            },
        )
