from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from estimator_service.logistic import predict
from estimator_service.messages import (
    CoefficientSet,
    ExplorationOrder,
    Policy,
    PolicyOrder,
    Source,
    Version,
)
from workers.config import WorkerConfig
from workers.labels import Request
from workers.record import DETAILS
from workers.speculation import Drafted, Speculation
from workers.vllm.rpc import Order

K = 3
NEWER = CoefficientSet(Version(1, 1), Source.FITTED, 1.0, (0.5, 0.0, -0.5), {"a": (1.0,) * K})
OLDER = CoefficientSet(Version(0, 9), Source.FITTED, 9.0, (0.0,) * K)
NAN = float("nan")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def speculation(clock: Clock | None = None, **settings: Any) -> Speculation:
    config = WorkerConfig.model_validate({"policy": "full", **settings})
    return Speculation(config, K, clock=clock or Clock())


def draft(mine: Speculation, *names: str, feature: float = 1.0) -> list[int]:
    """Each drafts tokens 1, 2, 3."""
    shape = (len(names), K)
    details = {name: np.full(shape, 0.5) for name in DETAILS}
    return mine.drafted(Drafted(names, [[1, 2, 3]] * len(names), np.full(shape, feature), details))


def begun(mine: Speculation, *names: str, **request: Any) -> None:
    mine.schedule(new=[Request(name, "a", **request) for name in names], admitted={})
    mine.verified({name: [9] for name in names})


def test_labels_are_graded_by_the_version_that_predicted_them() -> None:
    mine = speculation()
    begun(mine, "x")
    draft(mine, "x")
    assert mine.adopt(NEWER)
    mine.schedule(admitted={"x": [1, 2, 3]})
    mine.verified({"x": [1, 7]})
    draft(mine, "x", feature=2.0)
    mine.schedule(admitted={"x": [1, 2]})
    mine.verified({"x": [1, 2, 7]})
    first, second = mine.exchange(Order())
    assert (first.graded, first.admitted, first.steps) == (Version(0, 0), (1, 1, 1), 1)
    assert (second.graded, second.admitted, second.steps) == (Version(1, 1), (1, 1, 0), 1)
    p = predict(1.0, 1.0, 2.0)
    np.testing.assert_allclose(second.strata["a"].statistics.sums[0, 4], 1.0 - p)
    assert first.strata["a"].statistics.observations.tolist() == [1, 1, 0]
    assert second.strata["a"].intercepts == (1.0,) * K


def test_a_step_counts_when_it_runs_even_if_it_verifies_nothing() -> None:
    mine = speculation()
    begun(mine, "x")
    draft(mine, "x")
    mine.schedule(admitted={})
    mine.verified({"x": [9]})
    draft(mine, "x")
    mine.schedule(finished=["x"], admitted={}, runs=False)
    (drained,) = mine.exchange(Order())
    assert (drained.steps, drained.admitted) == (1, ())


def test_only_what_is_not_older_is_adopted() -> None:
    mine = speculation()
    assert mine.adopt(NEWER)
    assert not mine.adopt(OLDER)
    assert mine.coefficients == NEWER
    repaired = CoefficientSet(Version(1, 1), Source.FITTED, 2.0, (0.0,) * K)
    assert mine.adopt(repaired)
    assert mine.coefficients == repaired


def test_a_request_that_is_not_observed_is_verified_and_counted_once() -> None:
    mine = speculation()
    begun(mine, "x", skipped="penalties")
    begun(mine, "y")
    for _ in range(3):
        assert draft(mine, "x", "y") == [K, K]
        mine.schedule(admitted={"x": [1, 2, 3], "y": [1, 2, 3]})
        mine.verified({"x": [1, 2, 3, 9], "y": [9]})
    (drained,) = mine.exchange(Order())
    assert drained.skipped == {"penalties": 1}
    assert drained.admitted == (6, 6, 6)
    assert drained.strata["a"].statistics.observations.tolist() == [3, 0, 0]


@pytest.mark.parametrize(
    ("happening", "reason"),
    [
        ({"resumed": ["x"]}, "no such draft"),
        ({"finished": ["x"]}, "no such draft"),
        ({"new": [Request("x", "a")]}, "no such draft"),
        ({"unlike": frozenset({"x"})}, "judged by another rule"),
    ],
)
def test_a_draft_that_cannot_be_trusted_gives_no_label(
    happening: dict[str, Any], reason: str
) -> None:
    mine = speculation()
    begun(mine, "x")
    draft(mine, "x")
    mine.schedule(admitted={"x": [1, 2, 3]}, **happening)
    mine.verified({"x": [1, 2, 3, 9]})
    assert mine.status()["unmatched"] == {reason: 1}
    assert not any(r.strata for r in mine.exchange(Order()))


def test_a_step_that_never_returns_leaves_nothing_behind() -> None:
    mine = speculation()
    begun(mine, "x")
    draft(mine, "x")
    mine.schedule(admitted={"x": [1, 2, 3]})
    mine.schedule(admitted={})
    mine.verified({"x": [1, 2, 3, 9]})
    assert not any(r.strata for r in mine.exchange(Order()))


def test_policies_change_lengths_and_never_predictions() -> None:
    mine = speculation(cost={"warmup_share": 0.0, "share": 0.0})
    for tokens in range(1, 30):
        # So dear that nothing is worth verifying.
        mine.cost.observe(
            requests=1, tokens=tokens, verify=0.01 * 10.0**tokens, draft=0.01, depth=3
        )
    begun(mine, "x")
    chosen = {}
    labels = 0
    for order in (
        PolicyOrder(),
        PolicyOrder(Policy.FULL),
        PolicyOrder(Policy.ADVISORY),
        PolicyOrder(Policy.FIXED, 2),
        PolicyOrder(Policy.FIXED, 0),
    ):
        labels += sum(r.labels for r in mine.exchange(Order(policy=order)))
        chosen[order.policy.value, order.length] = draft(mine, "x")[0]
        mine.schedule(admitted={"x": [1]})
        mine.verified({"x": [9]})
    assert chosen == {
        ("adaptive", None): 0,
        ("full", None): K,
        ("advisory", None): K,
        ("fixed", 2): 2,
        ("fixed", 0): 0,
    }
    assert mine.status()["advised_lengths"] == {"0": 5}
    assert labels + sum(r.labels for r in mine.exchange(Order())) == 5


def test_an_exploration_order_verifies_whole_drafts_for_its_share_and_its_time() -> None:
    clock = Clock()
    mine = speculation(clock, policy="fixed", length=1)
    begun(mine, "x")
    mine.admission.explore(ExplorationOrder(0.25, 10.0))
    lengths = []
    for _ in range(400):
        lengths += draft(mine, "x")
        mine.schedule(admitted={"x": [1, 2, 3][: lengths[-1]]})
        mine.verified({"x": [9]})
    assert 60 < lengths.count(K) < 140
    drained = mine.exchange(Order())
    assert sum(r.steps for r in drained) == 400
    assert sum(r.explored_steps for r in drained) == lengths.count(K)
    clock.now = 10.0
    assert [draft(mine, "x") for _ in range(50)] == [[1]] * 50
    assert mine.status()["exploring"] is None


def test_without_a_cost_drafts_are_whole_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine = speculation(policy="adaptive", cost={"warmup_share": 0.0, "share": 0.0})
    begun(mine, "x")
    assert [draft(mine, "x") for _ in range(300)] == [[K]] * 300
    assert len(caplog.records) == 1


def test_a_request_without_features_gets_nothing_and_the_others_their_own() -> None:
    mine = speculation(policy="adaptive", cost={"warmup_share": 0.0, "share": 0.0})
    for tokens in range(1, 30):
        mine.cost.observe(requests=2, tokens=tokens, verify=1.0, draft=0.01, depth=3)
    begun(mine, "x", "y", "z")
    features = np.array([[NAN] * K, [2.0, 2.0, 2.0], [2.0, NAN, 2.0]])
    lengths = mine.drafted(Drafted(["x", "y", "z"], [[1, 2, 3]] * 3, features))
    assert lengths == [0, K, 1]


def test_the_record_holds_drafts_and_is_bounded() -> None:
    mine = speculation(record=2 * K)
    begun(mine, "x", max_tokens=3)
    for emitted in ([1, 7], [1, 2, 3, 7], [9]):
        draft(mine, "x")
        mine.schedule(admitted={"x": [1, 2]})
        mine.verified({"x": emitted})
    rows = mine.record.drain(100)
    assert rows["dropped"] == K
    assert rows["step"] == [2, 2, 2, 3, 3, 3]
    assert rows["token"] == [1, 2, 3] * 2
    # The second draft reached the limit with its first token; the third was behind it.
    assert rows["admitted"] == [0] * 6
    assert rows["stratum"] == ["a"] * 6
    assert rows["q_drawn"] == [0.5] * 6
    assert mine.record.drain(100)["request"] == []


@pytest.mark.parametrize("vary", [True, False])
def test_what_is_not_to_be_verified_is_not_drafted_unless_ranks_must_agree(vary: bool) -> None:
    config = WorkerConfig.model_validate({"policy": "fixed", "length": 1})
    mine = Speculation(config, K, vary_depth=vary, clock=Clock())
    begun(mine, "x")
    assert mine.plan(1) == (1 if vary else K)
    assert draft(mine, "x") == [1]
    mine.admission.explore(ExplorationOrder(1.0, 5.0))
    assert mine.plan(1) == K
    assert draft(mine, "x") == [K]


def test_the_depth_is_chosen_when_asked_and_drafts_stay_whole_for_a_share() -> None:
    cost = {"warmup_tries": 0, "share": 0.1}
    mine = speculation(policy="adaptive", draft_depth=True, cost=cost)
    begun(mine, "x")
    for tokens in (1, 2, 3, 4):
        mine.cost.observe(requests=1, tokens=tokens, verify=1.0, draft=0.9, depth=K)
    for _ in range(300):
        mine.plan(1)
        # Certain at first and hopeless after it: one position is worth its third of a second.
        features = np.array([[9.0, -9.0, -9.0]])
        mine.drafted(Drafted(["x"], [[1, 2, 3]], features))
    depths = mine.status()["depths"]
    assert depths["1"] > 240
    assert 10 < depths[str(K)] < 60
    assert depths.keys() == {"1", str(K)}
