"""The device path in a whole engine: vLLM's V2 runner on the CPU. Run by `test_interpreted`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from estimator_service.logistic import predict
from estimator_service.messages import CoefficientSet, Source, Version
from tests.workers.vllm.device.engine import POSITIONS, PROMPTS, Engine, labels_of, start
from workers.vllm.device_estimator import STRATUM
from workers.vllm.rpc import Order, OrderError


@pytest.fixture(scope="module")
def engine() -> Engine:
    return start("draft")


@pytest.fixture
def drained(engine: Engine) -> Engine:
    engine.exchange()
    return engine


def fitted(number: int) -> CoefficientSet:
    intercepts = tuple(0.9 - 0.5 * k for k in range(POSITIONS))
    return CoefficientSet(Version(1, number), Source.FITTED, 0.75 + 0.01 * number, intercepts)


def test_the_labels_of_a_real_pair_arrive_as_the_kernels_hold_them(drained: Engine) -> None:
    assert drained.generate(12) == [12, 12]
    held = drained.peek()
    (round_,) = (answer := drained.exchange()).rounds
    sums = round_.strata[STRATUM].statistics.sums
    np.testing.assert_array_equal(sums[:, :3].ravel(), held["info"])
    np.testing.assert_array_equal(sums[:, 3:5].ravel(), held["grad"])
    np.testing.assert_array_equal(sums[:, 5], held["counts"])
    sketch = round_.strata[STRATUM].sketch
    np.testing.assert_array_equal(sketch.observations, held["counts"])
    labels = labels_of(answer)
    assert labels[0] >= labels[1] >= labels[2]
    # Every position after the first is labelled when the one before it was accepted.
    np.testing.assert_array_equal(sketch.accepted[:2], labels[1:])
    # A request may be done before the other; the first step reads prompts and verifies nothing.
    assert round_.steps - 1 <= round_.admitted[0] <= 2 * (round_.steps - 1)
    assert labels[0] <= round_.admitted[0]
    assert drained.peek()["counts"] == [0.0] * POSITIONS
    assert drained.exchange().rounds == []


def test_pushed_coefficients_make_the_next_predictions_where_the_tensors_are(
    drained: Engine,
) -> None:
    before = drained.peek()
    new = fitted(1)
    answer = drained.exchange(Order(coefficients=new))
    assert answer.applied == new.version
    drained.generate(4, temperature=0.8)
    after = drained.peek()
    features = np.array(after["features"]).reshape(-1, POSITIONS)
    predictions = np.array(after["predictions"]).reshape(-1, POSITIONS)
    drafted = predictions != np.array(before["predictions"]).reshape(-1, POSITIONS)
    assert drafted.any()
    expected = predict(new.slope, new.intercepts, features)
    np.testing.assert_allclose(predictions[drafted], expected[drafted], rtol=0, atol=3e-7)
    where = [name for name in before if name.endswith("_at")]
    assert len(where) == 7
    assert {name: after[name] for name in where} == {name: before[name] for name in where}
    (round_,) = drained.exchange().rounds
    assert (round_.graded, round_.slope) == (new.version, float(np.float32(new.slope)))


def test_a_change_between_two_steps_leaves_the_drafts_in_flight_out(drained: Engine) -> None:
    from vllm import SamplingParams

    llm = drained.llm
    # More than the steps below can emit: both requests outlive them.
    parameters = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    core = llm.llm_engine
    for number, prompt in enumerate(PROMPTS):
        core.add_request(f"flight-{number}", prompt, parameters)
    for _ in range(3):
        core.step()
    held = drained.peek()["counts"]
    first = drained.exchange(Order(coefficients=fitted(2)))
    assert labels_of(first) == held
    core.step()
    # Verified under the new coefficients' rule, predicted by the old ones.
    assert drained.peek()["counts"] == [0.0] * POSITIONS
    core.step()
    assert drained.peek()["counts"][0] == 2.0
    while core.has_unfinished_requests():
        core.step()
    (round_,) = drained.exchange().rounds
    assert round_.graded == Version(1, 2)
    assert round_.admitted[0] == round_.strata[STRATUM].statistics.observations[0] + 2


@pytest.mark.parametrize(
    ("reason", "sampling"),
    [
        ("penalties", {"repetition_penalty": 1.2}),
        ("bad_words", {"bad_words": ["the"]}),
        ("allowed_token_ids", {"allowed_token_ids": list(range(5, 800))}),
        ("min_tokens", {"min_tokens": 3}),
    ],
)
def test_requests_whose_target_is_altered_are_served_and_never_observed(
    drained: Engine, reason: str, sampling: dict[str, Any]
) -> None:
    assert drained.generate(5, **sampling) == [5, 5]
    (round_,) = (answer := drained.exchange()).rounds
    assert labels_of(answer) == [0.0] * POSITIONS
    assert round_.skipped == {reason: 2}
    assert round_.admitted[0] >= 2


def test_vllm_itself_refuses_to_draft_with_a_logit_bias(drained: Engine) -> None:
    from vllm.exceptions import VLLMValidationError

    # When it no longer does, it belongs among the reasons above.
    with pytest.raises(VLLMValidationError, match="logit_bias"):
        drained.generate(3, logit_bias={5: 2.0})


def test_in_one_batch_only_the_request_that_may_be_is_observed(drained: Engine) -> None:
    from vllm import SamplingParams

    plain, altered = (
        SamplingParams(
            temperature=1.0, seed=2, max_tokens=6, ignore_eos=True, repetition_penalty=penalty
        )
        for penalty in (1.0, 1.3)
    )
    drained.llm.generate(PROMPTS, [plain, altered], use_tqdm=False)
    (round_,) = (answer := drained.exchange()).rounds
    assert round_.skipped == {"penalties": 1}
    assert 0 < labels_of(answer)[0] < round_.admitted[0]
    # The one that is observed was drafted for in every step but its first, until it ended.
    assert labels_of(answer)[0] <= round_.steps - 1


def test_structured_output_is_served_and_never_observed(drained: Engine) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    constraint = StructuredOutputsParams(choice=["yes, of course", "no, not at all"])
    drained.generate(6, structured_outputs=constraint, ignore_eos=False)
    (round_,) = (answer := drained.exchange()).rounds
    assert labels_of(answer) == [0.0] * POSITIONS
    assert round_.skipped == {"structured output": 2}


def test_a_slot_is_observed_again_after_a_request_that_was_not(drained: Engine) -> None:
    drained.generate(4, repetition_penalty=1.2)
    drained.exchange()
    drained.generate(4)
    assert labels_of(drained.exchange())[0] > 0


def test_an_order_that_breaks_a_rule_changes_nothing_and_the_engine_serves_on(
    drained: Engine,
) -> None:
    before = drained.status()
    wrong = {"coefficients": {"version": [9, 9], "source": "fitted", "slope": float("nan")}}
    with pytest.raises(OrderError):
        drained.llm.collective_rpc("exchange", args=(wrong,))
    assert drained.status() == before
    assert drained.generate(3) == [3, 3]


def test_the_status_says_who_and_what_in_plain_types(drained: Engine) -> None:
    status = drained.status()
    assert status["fault"] is None
    assert (status["rank"], status["path"], status["local"]) == (0, "device", False)
    assert status["coefficients"]["version"] == status["applied"]
    assert status["coefficients_hash"] == drained.exchange().coefficients_hash
    # Adaptive verification needs a GPU.
    assert status["steered"] is False
