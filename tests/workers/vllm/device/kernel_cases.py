"""vLLM's own estimator and kernels with our hook. Run by `test_interpreted`."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from estimator_service.intake import check_frame
from estimator_service.logistic import predict
from estimator_service.messages import (
    CoefficientSet,
    ExplorationOrder,
    Frame,
    Policy,
    PolicyOrder,
    Source,
    StratumRound,
    Version,
    encode_array,
)
from tests.workers.vllm.device.replica import POSITIONS, SLOTS, Replica, sums_of, vllm_estimator
from workers.lease import Lease
from workers.rounds import Round
from workers.vllm import ranks
from workers.vllm.device_estimator import STRATUM
from workers.vllm.device_steering import Steering, steer
from workers.vllm.device_tally import ROWS
from workers.vllm.rpc import Exchanged, coefficients_hash

TENSORS = ("slope", "intercepts", "features", "predictions", "info", "grad", "counts")
REQUESTS = [5, 0, 3]


def fitted(number: int, slope: float = 0.8, first: float = 0.7) -> CoefficientSet:
    intercepts = tuple(first - 0.5 * k for k in range(POSITIONS))
    return CoefficientSet(Version(1, number), Source.FITTED, slope, intercepts)


def labels_of(rounds: list[Round]) -> int:
    parts = (part for round_ in rounds for part in round_.strata.values())
    return int(sum(part.statistics.observations.sum() for part in parts))


# --- Draining. ---


def test_what_is_drained_is_what_the_kernels_hold_and_what_the_labels_say() -> None:
    replica = Replica()
    replica.first_step(REQUESTS)
    labels = replica.serve(REQUESTS, steps=10)
    kernels = replica.kernels
    held = torch.cat([kernels.info, kernels.grad, kernels.counts[:, None]], dim=1).numpy().copy()
    (round_,) = replica.fleet.exchange(None)
    part = round_.strata[STRATUM]
    np.testing.assert_array_equal(part.statistics.sums, held)
    statistics, sketch = sums_of(labels)
    # float32 sums of 20 steps; see `test_vllm_parity.test_sums` for the tolerance.
    np.testing.assert_allclose(part.statistics.sums, statistics.sums, rtol=3e-6, atol=3e-6)
    np.testing.assert_array_equal(part.statistics.observations, statistics.observations)
    np.testing.assert_array_equal(part.sketch.cells, sketch.cells)
    assert (round_.slope, part.intercepts) == (0.5, (float(np.float32(-0.2)),) * POSITIONS)
    assert round_.steps == 11


def test_the_estimator_takes_what_is_drained() -> None:
    replica = Replica()
    replica.first_step(REQUESTS)
    replica.serve(REQUESTS, steps=10)
    (round_,) = replica.fleet.exchange(None)
    part = round_.strata[STRATUM]
    on_the_wire = StratumRound(
        encode_array(part.intercepts), encode_array(part.statistics.sums), part.sketch.pack()
    )
    frame = Frame(
        pair="p",
        replica="r",
        incarnation=1,
        seq=1,
        oldest=1,
        applied=Version(),
        graded=round_.graded,
        slope=round_.slope,
        strata={STRATUM: on_the_wire},
        admitted=round_.admitted,
        steps=round_.steps,
    )
    (checked,) = check_frame(frame, POSITIONS)
    np.testing.assert_array_equal(checked.statistics, part.statistics.sums)


def test_a_drain_starts_anew_and_an_idle_replica_drains_nothing() -> None:
    replica = Replica()
    replica.first_step(REQUESTS)
    replica.serve(REQUESTS, steps=4)
    assert replica.fleet.exchange(None)
    assert replica.fleet.exchange(None) == []
    labels = replica.serve(REQUESTS, steps=5)
    (round_,) = replica.fleet.exchange(None)
    np.testing.assert_array_equal(
        round_.strata[STRATUM].statistics.observations, sums_of(labels)[0].observations
    )
    assert round_.steps == 5


def test_admitted_counts_every_request_and_sketch_counts_more_than_a_block_of_them() -> None:
    replica = Replica()
    many = list(range(SLOTS))
    assert SLOTS > ROWS
    replica.first_step(many)
    replica.fleet.begin(7, "penalties")
    labels = replica.verify(many, [2] * SLOTS, [1] * SLOTS)
    labels = labels[: 2 * 7] + labels[2 * 8 :]
    (round_,) = replica.fleet.exchange(None)
    assert round_.admitted == (SLOTS, SLOTS, 0)
    np.testing.assert_array_equal(round_.strata[STRATUM].sketch.cells, sums_of(labels)[1].cells)


# --- Adopting. ---


def test_the_very_next_prediction_uses_what_was_adopted_and_tensors_stay() -> None:
    replica = Replica()
    replica.first_step(REQUESTS)
    replica.serve(REQUESTS, steps=2)
    addresses = {name: getattr(replica.kernels, name).data_ptr() for name in TENSORS}
    new = fitted(1)
    replica.fleet.exchange(new)
    assert replica.fleet.applied == new.version
    features = replica.draft(REQUESTS)
    expected = predict(new.slope, new.intercepts, features)
    predictions = replica.kernels.predictions.numpy()[REQUESTS]
    np.testing.assert_allclose(predictions, expected, rtol=0, atol=3e-7)
    assert np.abs(predictions - predict(0.5, -0.2, features)).max() > 0.1
    replica.serve(REQUESTS, steps=3)
    replica.fleet.exchange(fitted(2))
    assert {name: getattr(replica.kernels, name).data_ptr() for name in TENSORS} == addresses


def test_drafts_in_flight_when_coefficients_change_are_in_neither_round() -> None:
    replica = Replica()
    replica.first_step(REQUESTS)
    before = replica.serve(REQUESTS, steps=3)
    (old,) = replica.fleet.exchange(fitted(1))
    in_flight = replica.verify(REQUESTS, [3, 3, 2], [3, 1, 0])
    replica.draft(REQUESTS)
    after = replica.serve(REQUESTS, steps=3)
    (new,) = replica.fleet.exchange(None)
    assert len(in_flight) == 6
    for round_, labels in ((old, before), (new, after)):
        counted = round_.strata[STRATUM].statistics.observations
        np.testing.assert_array_equal(counted, sums_of(labels)[0].observations)
    assert (old.graded, new.graded) == (Version(), Version(1, 1))
    # They were verified all the same.
    assert sum(new.admitted) > len(in_flight)


def test_a_request_that_was_away_at_the_change_is_not_graded_when_it_returns() -> None:
    replica = Replica()
    replica.first_step(REQUESTS)
    replica.fleet.exchange(fitted(1))
    here = REQUESTS[:2]
    replica.verify(here, [1, 1], [1, 1])
    replica.draft(here)
    replica.verify(REQUESTS, [1, 1, 1], [1, 1, 1])
    (round_,) = replica.fleet.exchange(None)
    assert labels_of([round_]) == 2


def test_an_older_version_is_left_alone() -> None:
    replica = Replica()
    replica.fleet.exchange(fitted(2))
    replica.fleet.exchange(fitted(1, slope=0.1))
    assert replica.fleet.applied == Version(1, 2)
    assert replica.kernels.slope.item() == pytest.approx(0.8)


# --- Excluding. ---


def test_excluded_requests_add_nothing_and_are_counted() -> None:
    clean, mixed = Replica(), Replica()
    for slot, reason in ((0, None), (3, None), (6, "penalties"), (1, "structured output")):
        mixed.fleet.begin(slot, reason)
    clean.first_step([0, 3])
    mixed.first_step([0, 3])
    mixed.draft([6, 1])
    rng = np.random.default_rng(1)
    for _ in range(8):
        # The observed requests live the same life in both.
        verdict = ([3, 2], rng.integers(0, 3, 2).tolist())
        clean.verify([0, 3], *verdict)
        mixed.verify([0, 6, 3, 1], [3, 3, 2, 2], [verdict[1][0], 3, verdict[1][1], 0])
        mixed.kernels.features[[6, 1]] = 7.0
        features = torch.from_numpy(clean.draft([0, 3]))
        for replica in (clean, mixed):
            replica.kernels.features[[0, 3]] = features
            replica.kernels.predictions[[0, 3]] = torch.sigmoid(0.5 * features - 0.2)
        # Not drafted by the kernel, but drafted: the hook has seen the requests in `verify`.
    (expected,), (found,) = clean.fleet.exchange(None), mixed.fleet.exchange(None)
    a, b = expected.strata[STRATUM], found.strata[STRATUM]
    np.testing.assert_array_equal(a.statistics.observations, b.statistics.observations)
    np.testing.assert_allclose(a.statistics.sums, b.statistics.sums, rtol=3e-6, atol=3e-6)
    np.testing.assert_array_equal(a.sketch.cells, b.sketch.cells)
    assert labels_of([found]) > 0
    assert found.skipped == {"penalties": 1, "structured output": 1}
    assert sum(found.admitted) == sum(expected.admitted) + 8 * 5


def test_the_draft_of_a_request_that_is_gone_is_not_graded_for_the_next_in_its_slot() -> None:
    replica = Replica()
    replica.first_step([2, 4])
    replica.fleet.begin(2, None)
    replica.verify([2, 4], [3, 3], [3, 3])
    (round_,) = replica.fleet.exchange(None)
    assert labels_of([round_]) == 3


def test_a_slot_is_observed_again_when_its_next_request_may_be() -> None:
    replica = Replica()
    replica.fleet.begin(2, "bad_words")
    replica.first_step([2])
    replica.serve([2], steps=3)
    replica.fleet.begin(2, None)
    # The draft there is still that of the request before.
    replica.verify([2], [3], [3])
    replica.draft([2])
    labels = replica.serve([2], steps=3)
    (round_,) = replica.fleet.exchange(None)
    assert labels_of([round_]) == len(labels) > 0


# --- Learning alone. ---


def test_without_a_fleet_vllm_refits_as_ever_and_its_rounds_are_handed_over_later() -> None:
    replica, alone = Replica(), vllm_estimator()
    replica.kernels.REFIT_INTERVAL = alone.REFIT_INTERVAL = 6
    rows = torch.tensor(REQUESTS)
    replica.first_step(REQUESTS)
    nothing = torch.zeros(3, dtype=torch.int32)
    alone.step(rows, nothing + 1, nothing)
    for _ in range(5):
        alone.features.copy_(replica.kernels.features)
        alone.predictions.copy_(replica.kernels.predictions)
        replica.verify(REQUESTS, [3, 3, 3], [3, 1, 0])
        replica.draft(REQUESTS)
        alone.step(rows, torch.tensor([4, 2, 1]).int(), torch.tensor([0, 2, 3]).int())
    assert replica.fleet.refits == 1
    assert torch.equal(replica.kernels.slope, alone.slope)
    assert torch.equal(replica.kernels.intercepts, alone.intercepts)
    assert alone.slope.item() != 0.5
    # The drafts that the old coefficients made, and then a round of the new ones.
    replica.serve(REQUESTS, steps=6)
    assert replica.fleet.refits == 2
    first, second = replica.fleet.exchange(fitted(1))
    assert (first.slope, second.slope) == (0.5, float(alone.slope))
    assert second.strata[STRATUM].intercepts == tuple(alone.intercepts.tolist())
    assert (first.graded, replica.fleet.applied) == (Version(), Version(1, 1))


def test_in_charge_the_fleet_alone_fits_until_it_is_silent_for_too_long() -> None:
    replica = Replica(lease=Lease(exchanges=2, least_steps=10))
    replica.kernels.REFIT_INTERVAL = 4
    replica.fleet.exchange(fitted(1))
    replica.first_step(REQUESTS)
    replica.serve(REQUESTS, steps=8)
    assert (replica.fleet.local, replica.fleet.refits) == (False, 0)
    replica.fleet.exchange(None)
    replica.serve(REQUESTS, steps=17)
    assert (replica.fleet.local, replica.fleet.refits) == (False, 0)
    replica.serve(REQUESTS, steps=4)
    assert (replica.fleet.local, replica.fleet.refits) == (True, 1)
    assert replica.fleet.applied == Version()
    # It comes back with what it had published, and is followed again.
    replica.fleet.exchange(fitted(1))
    assert (replica.fleet.local, replica.fleet.applied) == (False, Version(1, 1))
    assert replica.kernels.slope.item() == pytest.approx(0.8)


# --- Ranks. ---


def answers_of(replicas: list[Replica], coefficients: CoefficientSet | None) -> list[Exchanged]:
    answers = []
    for rank, replica in enumerate(replicas):
        rounds = replica.fleet.exchange(coefficients)
        fleet = replica.fleet
        answers.append(Exchanged(rank, fleet.applied, coefficients_hash(fleet.proof), rounds))
    return answers


def test_ranks_apply_the_same_at_the_same_step_and_one_that_differs_is_corrected() -> None:
    pair = [Replica(seed=4), Replica(seed=4)]

    def serve(steps: int) -> None:
        for replica in pair:
            replica.serve(REQUESTS, steps)

    def same() -> bool:
        mine, theirs = (replica.kernels for replica in pair)
        return all(torch.equal(getattr(mine, name), getattr(theirs, name)) for name in TENSORS)

    for replica in pair:
        replica.first_step(REQUESTS)
    for number in range(1, 4):
        serve(3)
        answers = answers_of(pair, fitted(number, slope=0.1 * number))
        assert not ranks.compare(answers)
        assert same()
    pair[1].kernels.slope += 1e-7
    serve(2)
    assert not same()
    found = ranks.compare(answers_of(pair, None))
    assert (found.coefficients, found.labels) == ((1,), ())
    told = ranks.correction(pair[0].fleet.proof)
    assert not ranks.compare(answers_of(pair, told.coefficients))
    serve(2)
    assert same()
    assert not ranks.compare(answers_of(pair, None))


def test_ranks_that_fitted_by_themselves_are_corrected_too() -> None:
    pair = [Replica(seed=4, lease=Lease(exchanges=1, least_steps=2)) for _ in range(2)]
    answers_of(pair, fitted(3))
    for replica in pair:
        replica.kernels.REFIT_INTERVAL = 3
        replica.first_step(REQUESTS)
        replica.serve(REQUESTS, steps=4)
        assert (replica.fleet.refits, replica.fleet.applied) == (1, Version())
    pair[1].kernels.intercepts[2] += 1e-6
    assert ranks.compare(answers_of(pair, None)).coefficients == (1,)
    told = ranks.correction(pair[0].fleet.proof)
    assert not ranks.compare(answers_of(pair, told.coefficients))
    assert torch.equal(pair[0].kernels.intercepts, pair[1].kernels.intercepts)
    # And what the fleet has published since is taken as ever.
    assert not ranks.compare(answers_of(pair, fitted(3)))
    assert pair[1].fleet.applied == Version(1, 3)


def test_a_rank_that_graded_something_else_is_noticed() -> None:
    pair = [Replica(seed=4), Replica(seed=4)]
    for replica in pair:
        replica.first_step(REQUESTS)
        replica.serve(REQUESTS, steps=2)
    pair[1].verify(REQUESTS, [1, 1, 1], [1, 1, 1])
    assert ranks.compare(answers_of(pair, None)).labels == (1,)


# --- Not waiting, not failing. ---


class SlowEvent:
    """An event that happens when the test says so."""

    happened = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.happened


def test_a_device_that_is_busy_is_not_waited_for() -> None:
    events: list[SlowEvent] = []

    def event() -> SlowEvent:
        events.append(SlowEvent())
        return events[-1]

    replica = Replica(event=event, depth=2)
    replica.first_step(REQUESTS)
    first = replica.serve(REQUESTS, steps=3)
    assert replica.fleet.exchange(None) == []
    replica.serve(REQUESTS, steps=2)
    assert replica.fleet.exchange(None) == []
    later = replica.serve(REQUESTS, steps=2)
    # No room for a third: the round goes on.
    assert replica.fleet.exchange(None) == []
    for each in events:
        each.happened = True
    arrived = replica.fleet.exchange(None)
    assert len(arrived) == 2
    assert labels_of(arrived[:1]) == len(first)
    assert labels_of(replica.fleet.exchange(None)) == len(later)
    assert replica.fleet.dropped == 0


def test_a_failure_stops_learning_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    replica = Replica()
    replica.first_step(REQUESTS)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    replica.kernels.step = broken
    replica.serve(REQUESTS, steps=2)
    assert replica.fleet.fault is not None
    assert "out of memory" in replica.fleet.fault
    assert replica.fleet.exchange(fitted(1)) == []
    assert np.isfinite(replica.draft(REQUESTS)).all()
    assert len(caplog.records) == 1


# --- Policies, in vLLM's own budget. ---


class Verification:
    """vLLM's `AdaptiveVerificationManager` for three requests, with costs that admit one draft."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.adaptive_verification")

        class Nothing:
            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def wait_stream(self, _: Any) -> None:
                pass

            def record(self) -> None:
                pass

            def synchronize(self) -> None:
                pass

        for name in ("Stream", "Event"):
            monkeypatch.setattr(torch.cuda, name, Nothing)
        monkeypatch.setattr(torch.cuda, "current_stream", Nothing)
        monkeypatch.setattr(module, "stream", lambda *_: contextlib.nullcontext())
        # Without torch.compile, which has no business with the interpreter.
        assign = module._assign_draft_token_budget
        monkeypatch.setattr(module, "_assign_draft_token_budget_compiled", assign)
        full = np.zeros(SLOTS, dtype=np.int32)
        states = SimpleNamespace(
            num_speculative_steps=POSITIONS,
            device=torch.device("cpu"),
            max_num_reqs=SLOTS,
            max_num_batched_tokens=64,
            req_id_to_index={"a": 5, "b": 0, "c": 3},
            num_computed_tokens_np=full,
            prefill_len=SimpleNamespace(np=full),
        )
        query_start_loc = torch.zeros(SLOTS + 1, dtype=torch.int32)
        self.manager = module.AdaptiveVerificationManager(states, query_start_loc, 1, 64)
        tokens = np.arange(65)
        # Beyond 8 tokens something dear begins, which a confidence of 1 would not pay for.
        self.costs = (np.full(SLOTS + 1, 0.1), 1.0 + 0.2 * tokens + 5.0 * (tokens > 8))
        self.manager.cost_tables = self.costs

    def step(self, predictions: torch.Tensor) -> list[int]:
        """End a step with these predictions [3, K]; returns what the next admits of each draft."""
        rows = torch.tensor([5, 0, 3])
        batch = SimpleNamespace(num_reqs=3, idx_mapping=rows)
        self.manager.record_confidences(predictions, batch)
        ids = ["a", "b", "c"]
        scheduled = dict.fromkeys(ids, POSITIONS + 1)
        self.manager.get_num_tokens(scheduled, {id_: [0] * POSITIONS for id_ in ids})
        starts, _, _ = self.manager.reallocate_drafts(ids, rows)
        admitted: list[int] = (starts.diff() - 1).tolist()
        return admitted


PREDICTIONS = torch.tensor([[0.9, 0.8, 0.3], [0.05, 0.5, 0.5], [0.6, 0.1, 0.1]])


@pytest.fixture
def verification(monkeypatch: pytest.MonkeyPatch) -> Verification:
    return Verification(monkeypatch)


def settle(verification: Verification, predictions: torch.Tensor = PREDICTIONS) -> list[int]:
    """The budget reads confidences that are a step old."""
    for _ in range(3):
        admitted = verification.step(predictions)
    return admitted


def test_adaptive_leaves_vllm_alone(verification: Verification) -> None:
    plain = settle(verification)
    assert 0 < sum(plain) < 9
    steer(verification.manager, Steering(POSITIONS))
    assert settle(verification) == plain
    assert verification.manager.cost_tables is verification.costs


def test_full_and_advisory_and_fixed_verify_what_they_say_and_are_reversible(
    verification: Verification,
) -> None:
    plain = settle(verification)
    steering = Steering(POSITIONS)
    steer(verification.manager, steering)
    for order, admitted in (
        (PolicyOrder(Policy.FULL), [3, 3, 3]),
        (PolicyOrder(Policy.ADVISORY), [3, 3, 3]),
        (PolicyOrder(Policy.FIXED, 2), [2, 2, 2]),
        (PolicyOrder(Policy.FIXED, 0), [0, 0, 0]),
        (PolicyOrder(), plain),
    ):
        steering.policy = order
        assert settle(verification) == admitted
    assert verification.manager.cost_tables is verification.costs


def test_exploring_verifies_single_steps_in_full(verification: Verification) -> None:
    plain = settle(verification)
    steering = Steering(POSITIONS)
    steer(verification.manager, steering)
    steering.explore(ExplorationOrder(share=0.25, seconds=2.0))
    seen = []
    for _ in range(8):
        admitted = verification.step(PREDICTIONS)
        seen.append((steering.exploring, admitted))
    assert [admitted for exploring, admitted in seen if exploring] == [[3, 3, 3]] * 2
    assert [admitted for exploring, admitted in seen if not exploring] == [plain] * 6
    steering.exchanged()
    assert steering.explores
    steering.exchanged()
    assert not steering.explores


def test_a_prediction_that_is_none_gets_no_drafts_and_leaves_the_others_alone(
    verification: Verification,
) -> None:
    steering = Steering(POSITIONS)
    steer(verification.manager, steering)
    broken = PREDICTIONS.clone()
    broken[0] = float("nan")
    admitted = settle(verification, broken)
    assert admitted[0] == 0
    assert admitted[2] >= 1


def test_steps_that_explored_are_counted(verification: Verification) -> None:
    replica = Replica()
    replica.first_step(REQUESTS)
    replica.steering.exploring = True
    replica.serve(REQUESTS, steps=2)
    replica.steering.exploring = False
    replica.serve(REQUESTS, steps=3)
    (round_,) = replica.fleet.exchange(None)
    assert (round_.steps, round_.explored_steps) == (6, 2)
