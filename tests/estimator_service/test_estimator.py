"""The estimator as a whole: fleets that learn, and what must not be able to lead them astray."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from estimator_service.config import EstimatorConfig
from estimator_service.delivery import Outbox
from estimator_service.estimator import Estimator, IntegrityError
from estimator_service.irls import MAX_INTERCEPT, Outcome
from estimator_service.logistic import Array, predict
from estimator_service.messages import (
    MAX_FRAME_BYTES,
    CoefficientSet,
    Frame,
    FrameStatus,
    PairKey,
    PairSnapshot,
    Pinned,
    Policy,
    PolicyOrder,
    Refusal,
    Reply,
    Source,
    Version,
    encode,
)
from estimator_service.orders import OrderError, UnknownPairError, UnknownVersionError
from estimator_service.records import Action
from estimator_service.store import Store
from tests.estimator_service.fleet import (
    PAIR,
    Labels,
    ManualClock,
    SimulatedReplica,
    Truth,
    frame_of,
    mean_error,
)

TRUTH = Truth(0.6, (0.6, 0.4, 0.3, 0.2, 0.1, 0.0, -0.1))
K = TRUTH.positions
REFIT_SECONDS = 5.0


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store.open("sqlite://")
    yield store
    store.close()


class Fleet:
    """An estimator and its replicas, on a clock that the test moves."""

    def __init__(
        self,
        store: Store,
        replicas: int,
        truth: Truth = TRUTH,
        config: EstimatorConfig | None = None,
        strata: tuple[str, ...] = ("sampled",),
    ) -> None:
        self.clock = ManualClock()
        self.estimator = Estimator(store, config, self.clock)
        self.pair = self.estimator.register(PAIR)
        self.replicas = [
            SimulatedReplica(f"r{i}", dict.fromkeys(strata, truth), np.random.default_rng(i))
            for i in range(replicas)
        ]
        self.statuses: dict[str, list[FrameStatus]] = {r.name: [] for r in self.replicas}

    def round(self, drafts: int = 40) -> Outcome:
        """Five seconds: a frame a second from every replica, then a refit."""
        for _ in range(5):
            self.clock.advance(REFIT_SECONDS / 5)
            for replica in self.replicas:
                reply = replica.report(self.estimator, drafts)
                self.statuses[replica.name].append(reply.status)
        return self.estimator.refit()[self.pair].outcome

    def last_status(self, replica: str) -> FrameStatus:
        return self.statuses[replica][-1]

    def snapshot(self) -> PairSnapshot:
        return self.estimator.snapshot().pairs[0]

    @property
    def coefficients(self) -> CoefficientSet:
        return self.estimator.coefficients(self.pair)

    def error(self, stratum: str = "sampled", truth: Truth = TRUTH) -> float:
        fitted = self.coefficients
        intercepts = np.array(fitted.intercepts_of(stratum))
        return mean_error(fitted.slope, intercepts, truth, np.random.default_rng(99))


def test_a_fleet_learns_the_truth_and_publishes_ever_newer_versions(store: Store) -> None:
    fleet = Fleet(store, 4)
    before, versions = fleet.error(), []
    for _ in range(30):
        fleet.round()
        versions.append(fleet.coefficients.version)
        fleet.estimator.check_integrity()
    assert versions == sorted(versions)
    assert fleet.coefficients.source is Source.FITTED
    assert fleet.error() < 0.02 < before
    ece = fleet.snapshot().scores.ece
    assert ece is not None
    assert ece < 0.02


def test_replies_bring_coefficients_only_to_who_lacks_them(store: Store) -> None:
    fleet = Fleet(store, 1)
    fleet.round()
    fleet.round()
    current = fleet.coefficients
    labels = {"sampled": TRUTH.drafts(np.random.default_rng(0), 5)}
    stale = frame_of(labels, CoefficientSet.initial(K), replica="late", seq=1)
    assert fleet.estimator.submit(stale).coefficients == current
    fresh = frame_of(labels, current, replica="late", seq=2)
    assert fleet.estimator.submit(fresh).coefficients is None


def test_a_frame_that_came_before_its_pair_was_known_can_be_sent_again(store: Store) -> None:
    fleet = Fleet(store, 0)
    other = PairKey("org/target", "org/other-draft", "draft_model", 7)
    outbox = Outbox[Frame]()
    labels = {"sampled": TRUTH.drafts(np.random.default_rng(0), 5)}
    outbox.put(frame_of(labels, CoefficientSet.initial(K), pair=other.id))

    def send() -> Reply:
        [(seq, frame)] = outbox.due()
        reply = fleet.estimator.receive(encode(frame))
        outbox.answered(seq, reply.epoch, reply.durable_seq, reply.settled)
        return reply

    assert send().reason is Refusal.UNKNOWN_PAIR
    fleet.estimator.register(other)
    assert send().status is FrameStatus.MERGED
    assert outbox.due() == []


def test_a_frame_beyond_any_sensible_size_is_refused_unread(store: Store) -> None:
    fleet = Fleet(store, 0)
    reply = fleet.estimator.receive(bytes(MAX_FRAME_BYTES + 1))
    assert (reply.status, reply.reason) == (FrameStatus.REFUSED, Refusal.MALFORMED)
    assert str(MAX_FRAME_BYTES) in reply.detail


def test_two_keys_of_one_id_are_not_taken_for_one_pair(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimator = Estimator(store, clock=ManualClock())
    monkeypatch.setattr(PairKey, "id", "the-same")
    estimator.register(PAIR)
    estimator.register(PAIR)
    with pytest.raises(OrderError, match="share the id the-same"):
        estimator.register(PairKey("another/target", "org/draft", "draft_model", 7))


@pytest.mark.parametrize("accepted", [1.0, 0.0], ids=["only_accepted", "only_rejected"])
@pytest.mark.parametrize("windows", [5, 10, 20, 200])
def test_separated_labels_stay_in_bounds_and_are_unlearned_within_five_windows(
    store: Store, windows: int, accepted: float
) -> None:
    fleet = Fleet(store, 0)
    rng = np.random.default_rng(1)
    errors = []
    after = 0.8 if accepted else 0.2
    for window in range(windows + 5):
        f = TRUTH.features(rng, (K * 100,))
        if window < windows:
            y = np.full(K * 100, accepted)
        else:
            y = (rng.random(K * 100) < after).astype(float)
        labels = Labels(np.repeat(np.arange(K), 100).astype(float), f, y)
        fleet.clock.advance(REFIT_SECONDS)
        frame = frame_of({"sampled": labels}, fleet.coefficients, seq=window + 1)
        assert fleet.estimator.submit(frame).status is FrameStatus.MERGED
        fleet.estimator.refit()
        fleet.estimator.check_integrity()
        now = fleet.coefficients
        assert max(map(abs, now.intercepts_of("sampled"))) <= MAX_INTERCEPT
        p = predict(
            now.slope, np.array(now.intercepts_of("sampled"))[labels.position.astype(int)], f
        )
        errors.append(abs(float(p.mean()) - (y.mean() if window < windows else after)))
    print(
        f"\n{windows} windows of {accepted:.0f}: errors before "
        f"{errors[windows - 1]:.4f}, after {[f'{e:.3f}' for e in errors[windows:]]}"
    )
    assert errors[-1] < 0.1


def test_the_trap_of_pessimistic_intercepts_opens_with_exploration_and_not_without(
    store: Store,
) -> None:
    generous = Truth(0.5, tuple(np.full(7, 1.6)))  # about .9 accepted at every position
    trapped = Pinned(intercepts=dict.fromkeys(range(2, 7), -5.0))

    def run(config: EstimatorConfig) -> tuple[Fleet, int]:
        fleet = Fleet(Store.open("sqlite://"), 8, generous, config)
        for replica in fleet.replicas:
            replica.min_survival = 0.5
        # Learn under the trap, then take it for fitted: all evidence is what the trap let be seen.
        fleet.estimator.override(
            fleet.pair, trapped, actor="test", reason="force the trap", ttl_seconds=1e5
        )
        fleet.round()
        forced = fleet.coefficients
        fleet.estimator.rollback(fleet.pair, forced.version, actor="test", reason="as if fitted")
        fleet.clock.advance(config.rollback_grace + 1)
        for replica in fleet.replicas:
            replica.spent = replica.drafted = 0
        for refits in range(1, 61):
            fleet.round()
            if fleet.error(truth=generous) < 0.05:
                return fleet, refits
        return fleet, 60

    def spent(fleet: Fleet) -> float:
        return sum(r.spent for r in fleet.replicas) / sum(r.drafted for r in fleet.replicas)

    def off(**fit: float) -> EstimatorConfig:
        return EstimatorConfig.model_validate({"exploration": {"label_floor": 0.0}, "fit": fit})

    fleet, refits = run(EstimatorConfig())
    print(f"\nthe trap: open after {refits} refits, {spent(fleet):.1%} of steps spent exploring")
    assert refits < 30
    assert 0.0 < spent(fleet) < 0.05
    walk, refits = run(off())
    print(f"the random walk alone: open after {refits} refits, nothing spent")
    stuck, _ = run(off(smoothness=0.0))
    print(f"with neither: error {stuck.error(truth=generous):.2f} after 60 refits")
    assert spent(walk) == spent(stuck) == 0.0
    assert stuck.error(truth=generous) > 0.3


POISON_BOUND = 0.02
"""Most that one bad replica of eight may move the fleet's predictions at any refit, on average."""


@pytest.mark.parametrize(
    ("tamper", "traffic"),
    [("inverted", 1), ("all_accepted", 1), ("inverted", 100), ("all_accepted", 100), ("", 100)],
)
@pytest.mark.parametrize("sound_refits", [1, 12])
def test_a_poisoned_replica_moves_the_fleet_little_is_quarantined_and_comes_back(
    store: Store, tamper: str, traffic: int, sound_refits: int
) -> None:
    fleet, twin = Fleet(store, 8), Fleet(Store.open("sqlite://"), 8)
    bad = fleet.replicas[3]
    f = TRUTH.features(np.random.default_rng(98), (5000, K))

    def predictions(of: Fleet) -> Array:
        c = of.coefficients
        return predict(c.slope, np.array(c.intercepts_of("sampled")), f)

    for _ in range(sound_refits):
        fleet.round()
        twin.round()
    bad.tamper = tamper
    moved = 0.0
    for _ in range(12):
        bad.report(fleet.estimator, 200 * (traffic - 1))
        fleet.round()
        twin.round()
        moved = max(moved, float(np.abs(predictions(fleet) - predictions(twin)).mean()))
    out = [r.replica for r in fleet.snapshot().replicas if r.quarantined]
    print(f"\n{tamper or 'honest'}, traffic x{traffic}: moved the fleet by {moved:.4f} at most")
    assert moved < POISON_BOUND
    assert out == ([bad.name] if tamper else [])
    if tamper:
        assert fleet.last_status(bad.name) is FrameStatus.QUARANTINED
        bad.tamper = ""
        for _ in range(12):
            fleet.round()
        assert not any(r.quarantined for r in fleet.snapshot().replicas)
        assert fleet.last_status(bad.name) is FrameStatus.MERGED
    fleet.estimator.check_integrity()


def test_a_change_that_all_replicas_see_is_drift_and_accuses_none(store: Store) -> None:
    fleet = Fleet(store, 4)
    for _ in range(12):
        fleet.round()
    assert not fleet.snapshot().drift
    harder = Truth(0.5, tuple(np.array(TRUTH.intercepts) - 1.0))
    for replica in fleet.replicas:
        replica.truth = {"sampled": harder}
    fleet.round()
    assert fleet.snapshot().drifting
    assert {event.stratum for event in fleet.snapshot().drift} == {"sampled"}
    assert all(event.residual < 0 for event in fleet.snapshot().drift)
    for _ in range(8):
        fleet.round()
    assert not fleet.snapshot().drifting
    # Deeper ones have hardly a label: few drafts get there now.
    fitted = fleet.coefficients.intercepts_of("sampled")[:3]
    np.testing.assert_allclose(fitted, harder.intercepts[:3], atol=0.15)
    assert not any(r.quarantined for r in fleet.snapshot().replicas)


def test_idle_is_no_drift_and_moves_nothing(store: Store) -> None:
    fleet = Fleet(store, 2)
    for _ in range(8):
        fleet.round()
    before = fleet.coefficients
    for _ in range(50):
        fleet.clock.advance(600.0)
        assert fleet.estimator.refit()[fleet.pair].outcome is Outcome.NO_EVIDENCE
    assert fleet.coefficients == before
    assert not fleet.snapshot().drift
    fleet.round()
    assert fleet.error() < 0.05


def test_an_override_holds_its_pins_while_the_rest_keeps_fitting_around_them(store: Store) -> None:
    fleet = Fleet(store, 4)
    for _ in range(6):
        fleet.round()
    fitted = fleet.coefficients
    pins = Pinned(slope=0.9, strata={"sampled": {2: -1.0}})
    pinned = fleet.estimator.override(
        fleet.pair, pins, actor="ann", reason="a test", ttl_seconds=60.0
    )
    assert pinned.source is Source.OVERRIDE
    assert pinned.version > fitted.version
    for _ in range(6):
        fleet.round()
        now = fleet.coefficients
        assert (now.slope, now.intercepts_of("sampled")[2]) == (0.9, -1.0)
    # A slope that is too steep is made up for by the intercepts that are free.
    assert now.intercepts_of("sampled")[0] < fitted.intercepts_of("sampled")[0] - 0.2
    assert fleet.snapshot().override is not None
    fleet.clock.advance(60.0)
    fleet.round()
    assert fleet.snapshot().override is None
    assert fleet.coefficients.source is Source.FITTED
    assert fleet.error() < 0.03
    fleet.estimator.checkpoint()
    actions = [entry.record.action for entry in store.audit(fleet.pair)]
    assert actions == [Action.EXPIRE, Action.OVERRIDE]


def test_bad_pins_are_no_drift_and_cost_no_evidence(store: Store) -> None:
    fleet = Fleet(store, 4)
    for _ in range(8):
        fleet.round()
    held = fleet.snapshot().scores.observations
    bad = Pinned(intercepts=dict.fromkeys(range(K), -2.0))
    fleet.estimator.override(fleet.pair, bad, actor="ann", reason="a test", ttl_seconds=1e4)
    for _ in range(8):
        fleet.round()
    assert fleet.snapshot().scores.observations > held
    fleet.estimator.release(fleet.pair, actor="ann", reason="done")
    assert fleet.error() < 0.03
    for _ in range(4):
        fleet.round()
    assert not fleet.snapshot().drift
    assert fleet.error() < 0.03


def test_what_a_replica_sent_counts_even_if_it_fell_silent_long_before_the_refit(
    store: Store,
) -> None:
    fleet = Fleet(store, 2)
    for replica in fleet.replicas:
        replica.min_survival = 0.0  # whole drafts
    fleet.replicas[0].report(fleet.estimator, 50)
    fleet.clock.advance(EstimatorConfig().replica_retention + 1)
    fleet.replicas[1].report(fleet.estimator, 50)
    fleet.estimator.refit()
    snapshot = fleet.snapshot()
    assert [r.replica for r in snapshot.replicas] == ["r1"]
    assert snapshot.labels[0] == 100.0


def test_a_pair_s_pinned_intercept_is_every_stratum_s(store: Store) -> None:
    fleet = Fleet(store, 2, strata=("sampled", "greedy"))
    fleet.round()
    fleet.estimator.override(
        fleet.pair, Pinned(intercepts={1: 0.25}), actor="ann", reason="a test", ttl_seconds=60.0
    )
    fleet.round()
    now = fleet.coefficients
    assert now.intercepts[1] == now.strata["sampled"][1] == now.strata["greedy"][1] == 0.25
    released = fleet.estimator.release(fleet.pair, actor="ann", reason="done")
    assert released.source is Source.FITTED
    assert released.intercepts[1] != 0.25
    with pytest.raises(OrderError, match="no override"):
        fleet.estimator.release(fleet.pair, actor="ann", reason="again")


def test_a_frozen_pair_gathers_and_does_not_fit(store: Store) -> None:
    fleet = Fleet(store, 2)
    fleet.round()
    before = fleet.coefficients
    fleet.estimator.freeze(fleet.pair, True, actor="ann", reason="a test")
    held = fleet.snapshot().scores.observations
    assert fleet.round() is Outcome.HELD
    assert fleet.coefficients == before
    assert fleet.snapshot().scores.observations > held
    fleet.estimator.freeze(fleet.pair, False, actor="ann", reason="a test")
    fleet.round()
    assert fleet.coefficients.version > before.version


def test_a_rollback_restores_content_forgets_what_was_gathered_and_waits(store: Store) -> None:
    fleet = Fleet(store, 2)
    for _ in range(4):
        fleet.round()
    fleet.estimator.checkpoint()
    good = fleet.coefficients
    fleet.round()
    bad = fleet.coefficients
    assert bad.version > good.version
    late = frame_of({"sampled": TRUTH.drafts(np.random.default_rng(0), 50)}, bad, replica="late")
    rolled = fleet.estimator.rollback(fleet.pair, good.version, actor="ann", reason="bad fit")
    assert rolled.source is Source.ROLLBACK
    assert (rolled.slope, rolled.strata) == (good.slope, good.strata)
    assert rolled.version > bad.version
    assert fleet.snapshot().scores.observations == 0.0
    assert fleet.estimator.submit(late).status is FrameStatus.DISCARDED
    assert fleet.round() is Outcome.HELD
    assert fleet.coefficients == rolled
    fleet.clock.advance(EstimatorConfig().rollback_grace)
    assert fleet.round() is Outcome.MOVED
    first = fleet.estimator.rollback(fleet.pair, Version(), actor="ann", reason="start over")
    assert (first.slope, first.intercepts) == (0.5, (-0.2,) * K)
    with pytest.raises(UnknownVersionError):
        fleet.estimator.rollback(fleet.pair, Version(99, 1), actor="ann", reason="no such")


def test_orders_that_cannot_be_carried_out_change_nothing(store: Store) -> None:
    fleet = Fleet(store, 1)
    fleet.round()
    before = fleet.snapshot()
    order = fleet.estimator.override
    with pytest.raises(UnknownPairError):
        order("nobody", Pinned(slope=0.5), actor="ann", reason="x", ttl_seconds=1.0)
    for pins in (Pinned(), Pinned(slope=np.nan), Pinned(intercepts={K: 0.0})):
        with pytest.raises(OrderError):
            order(fleet.pair, pins, actor="ann", reason="x", ttl_seconds=1.0)
    with pytest.raises(OrderError, match="ttl_seconds"):
        order(fleet.pair, Pinned(slope=0.5), actor="ann", reason="x", ttl_seconds=1e12)
    with pytest.raises(OrderError, match="reason"):
        order(fleet.pair, Pinned(slope=0.5), actor="ann", reason=" ", ttl_seconds=1.0)
    with pytest.raises(OrderError, match="length"):
        fleet.estimator.policy(
            fleet.pair, PolicyOrder(Policy.FIXED, K + 1), actor="ann", reason="x"
        )
    with pytest.raises(OrderError, match="no replica"):
        fleet.estimator.hold(fleet.pair, "nobody", actor="ann", reason="x")
    assert fleet.snapshot() == before


def test_a_held_replica_stays_out_until_it_is_cleared(store: Store) -> None:
    fleet = Fleet(store, 3)
    fleet.round()
    fleet.estimator.hold(fleet.pair, "r1", actor="ann", reason="suspicious")
    fleet.round()
    assert fleet.last_status("r1") is FrameStatus.QUARANTINED
    assert fleet.last_status("r0") is FrameStatus.MERGED
    fleet.estimator.clear(fleet.pair, "r1", actor="ann", reason="it was nothing")
    fleet.round()
    assert fleet.last_status("r1") is FrameStatus.MERGED


def test_a_policy_reaches_the_replicas_with_the_next_reply(store: Store) -> None:
    fleet = Fleet(store, 1)
    fixed = PolicyOrder(Policy.FIXED, 3)
    fleet.estimator.policy(fleet.pair, fixed, actor="ann", reason="compare")
    assert fleet.replicas[0].report(fleet.estimator, 5).policy == fixed


def test_everything_that_was_stored_comes_back_under_a_new_epoch(store: Store) -> None:
    fleet = Fleet(store, 3)
    for _ in range(5):
        fleet.round()
    estimator = fleet.estimator
    estimator.override(
        fleet.pair, Pinned(slope=0.7), actor="ann", reason="a test", ttl_seconds=100.0
    )
    estimator.hold(fleet.pair, "r2", actor="ann", reason="suspicious")
    estimator.refit()
    estimator.checkpoint()
    before = fleet.snapshot()
    fleet.clock.advance(30.0)
    successor = Estimator(store, clock=fleet.clock)
    after = successor.snapshot().pairs[0]
    assert successor.epoch == estimator.epoch + 1
    assert after.coefficients.version == Version(successor.epoch, 1)
    assert after.coefficients.source is Source.OVERRIDE
    assert after.coefficients.strata == before.coefficients.strata
    assert after.override == before.override
    assert after.scores == before.scores
    assert (after.labels, after.counters) == (before.labels, before.counters)
    successor.check_integrity()
    fleet.estimator = successor
    fleet.round()
    assert fleet.last_status("r2") is FrameStatus.QUARANTINED
    assert fleet.snapshot().override is not None
    fleet.clock.advance(70.0)
    fleet.round()
    assert fleet.snapshot().override is None


def test_pairs_learn_apart(store: Store) -> None:
    fleet = Fleet(store, 1)
    other = PairKey("org/target", "org/draft", "draft_model", 3)
    short = Truth(0.3, (-0.5, -0.5, -0.5))
    fleet.estimator.register(other)
    replica = SimulatedReplica("s0", {"sampled": short}, np.random.default_rng(5), other)
    for _ in range(20):
        for _ in range(5):
            replica.report(fleet.estimator, 40)
        fleet.round()
    assert fleet.error() < 0.03
    fitted = fleet.estimator.coefficients(other.id)
    intercepts = np.array(fitted.intercepts_of("sampled"))
    assert mean_error(fitted.slope, intercepts, short, np.random.default_rng(1)) < 0.03
    # A frame of one K for the pair of another.
    wrong = frame_of(
        {"sampled": short.drafts(np.random.default_rng(2), 5)}, fitted, pair=fleet.pair, replica="x"
    )
    reply = fleet.estimator.submit(wrong)
    assert (reply.status, reply.reason) == (FrameStatus.REFUSED, Refusal.WRONG_LENGTH)


def test_the_integrity_check_notices_what_is_wrong(store: Store) -> None:
    fleet = Fleet(store, 1)
    fleet.round()
    fleet.estimator.check_integrity()
    pair = fleet.estimator.pair(fleet.pair)
    pair.evidence.quadratics[0, 0, 5] *= 2.0
    with pytest.raises(IntegrityError, match="different labels"):
        fleet.estimator.check_integrity()
    pair.evidence.sketches[0, 0, 0, 0] = np.nan
    with pytest.raises(IntegrityError, match="not finite"):
        fleet.estimator.check_integrity()
