"""What the device path relies on inside vLLM. Run by `test_interpreted`.

Each of these fails when vLLM moves something, and says what.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.vllm.device.replica import vllm_estimator
from workers.vllm import device_contract as contract
from workers.vllm.device_hooks import DeviceHooks, NoEstimatorError

GPU = "vllm.v1.worker.gpu"
SLOTS, POSITIONS = 40, 3


def vllm(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def source(thing: Any) -> str:
    return inspect.getsource(thing)


def in_order(text: str, *parts: str) -> None:
    """Assert that `parts` follow each other in `text`."""
    at = 0
    for part in parts:
        found = text.find(part, at)
        assert found >= 0, f"vLLM has moved: {part!r} no longer follows in\n{text}"
        at = found + len(part)


def calls_on(attribute: str) -> dict[str, set[str]]:
    """What is asked of `self.<attribute>` or `x.<attribute>` in the V2 runner, by file."""
    folder = Path(inspect.getfile(import_module(GPU))).parent
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Attribute)
                and node.value.attr == attribute
            ):
                found.setdefault(path.name, set()).add(node.attr)
    return found


def speculator(kernels: Any) -> Any:
    """The parts of a `DraftModelSpeculator` that are looked at, its method the real one."""
    real = vllm(f"{GPU}.spec_decode.speculator", "DraftModelSpeculator")
    return SimpleNamespace(
        max_num_reqs=SLOTS,
        num_speculative_steps=POSITIONS,
        acceptance_estimator=kernels,
        observe_verification=real.observe_verification.__get__(object()),
    )


# --- What is checked when a worker attaches. ---


def test_vllm_is_where_it_was() -> None:
    kernels = vllm_estimator()
    assert contract.moved_in_kernels(kernels, SLOTS, POSITIONS) == []
    assert contract.moved_in_speculator(speculator(kernels)) == []
    manager_class = vllm(f"{GPU}.spec_decode.adaptive_verification", "AdaptiveVerificationManager")
    manager = object.__new__(manager_class)
    manager.cost_tables = None
    assert contract.moved_in_manager(manager) == []


def test_a_vllm_that_moved_is_told_by_name() -> None:
    kernels = vllm_estimator()
    del kernels.grad, kernels._steps_since_refit
    kernels.info = torch.zeros(POSITIONS, 4)
    kernels.counts = kernels.counts.double()
    kernels.step = lambda idx_mapping, verdicts: None
    moved = contract.moved_in_kernels(kernels, SLOTS, POSITIONS)
    assert [message.split(" (")[0] for message in moved] == [
        "vLLM has moved: OnlineAcceptanceEstimator.info is",
        "vLLM has moved: OnlineAcceptanceEstimator.grad is gone",
        "vLLM has moved: OnlineAcceptanceEstimator.counts is",
        "vLLM has moved: OnlineAcceptanceEstimator._steps_since_refit is gone",
        "vLLM has moved: OnlineAcceptanceEstimator.step takes",
    ]
    assert "(3, 4) torch.float32, not (3, 3)" in moved[0]
    assert "('idx_mapping', 'verdicts')" in moved[4]
    assert "gone" in contract.moved_in_manager(SimpleNamespace())[0]


class Loader:
    """As much of a worker as loads a model."""

    rank = 0
    vllm_config = SimpleNamespace(additional_config={})

    def __init__(self, kernels: Any) -> None:
        self.model_runner = SimpleNamespace(speculator=speculator(kernels))

    def load_model(self) -> None:
        pass


class Worker(DeviceHooks, Loader):
    pass


def test_a_worker_attaches_to_what_it_knows() -> None:
    kernels = vllm_estimator()
    worker = Worker(kernels)
    worker.load_model()
    assert worker.model_runner.speculator.acceptance_estimator is worker.fleet
    assert worker.status()["fault"] is None
    assert worker.exchange({})["rounds"] == []


@pytest.mark.parametrize("moved", [True, False])
def test_a_worker_leaves_vllm_alone_where_it_does_not_know_it(moved: bool) -> None:
    kernels = vllm_estimator() if moved else None
    if kernels is not None:
        del kernels.intercepts
    worker = Worker(kernels)
    worker.load_model()
    assert worker.model_runner.speculator.acceptance_estimator is kernels
    status = worker.status()
    assert status["attached"] is False
    expected = "OnlineAcceptanceEstimator.intercepts is gone" if moved else "V2 model runner"
    assert expected in status["fault"]
    with pytest.raises(NoEstimatorError, match=expected):
        worker.exchange({})


# --- What cannot be seen from an object. ---


def test_nothing_but_predict_and_step_is_asked_of_the_estimator() -> None:
    assert calls_on("acceptance_estimator") == {"speculator.py": {"predict", "step"}}
    text = source(vllm(f"{GPU}.spec_decode.speculator", "DraftModelSpeculator"))
    for call in (".step(idx_mapping, num_sampled, num_rejected)", "self.draft_token_confidence"):
        assert call in text, f"vLLM has moved: {call}"


def test_the_estimator_is_made_when_the_drafter_is_loaded() -> None:
    speculator_class = vllm(f"{GPU}.spec_decode.speculator", "DraftModelSpeculator")
    assert "self.acceptance_estimator = OnlineAcceptanceEstimator(" in source(
        speculator_class.load_model
    )
    runner = vllm(f"{GPU}.model_runner", "GPUModelRunner")
    in_order(source(runner.load_model), "self.speculator.load_model(self.model)")
    worker = vllm("vllm.v1.worker.gpu_worker", "Worker")
    in_order(source(worker.load_model), "self.model_runner.load_model(")


def test_a_step_grades_then_drafts_for_the_same_requests_then_records_confidences() -> None:
    runner = vllm(f"{GPU}.model_runner", "GPUModelRunner")
    in_order(
        source(runner.sample_tokens),
        "self.speculator.observe_verification(",
        "input_batch.idx_mapping, num_sampled, num_rejected",
        "self.speculator.propose(",
        "self.adaptive_verification.record_confidences(",
        "self.speculator.draft_token_confidence_probs, input_batch",
    )


def test_slots_are_64_bits_wide_and_unpadded_where_verdicts_are_graded() -> None:
    runner = vllm(f"{GPU}.model_runner", "GPUModelRunner")
    in_order(
        source(runner.prepare_inputs),
        "idx_mapping = async_tensor_h2d(",
        "idx_mapping_np, device=self.device, dtype=torch.int64",
    )


def test_adaptive_verification_is_made_with_the_kv_cache_and_reads_its_costs_late() -> None:
    runner = vllm(f"{GPU}.model_runner", "GPUModelRunner")
    made = "self.adaptive_verification = maybe_create_adaptive_verification_manager("
    makers = [
        name
        for name, function in inspect.getmembers(runner, inspect.isfunction)
        if made in source(function)
    ]
    assert makers == ["initialize_kv_cache"]
    worker = vllm("vllm.v1.worker.gpu_worker", "Worker")
    assert "self.model_runner.initialize_kv_cache(" in source(worker.initialize_from_config)
    manager = vllm(f"{GPU}.spec_decode.adaptive_verification", "AdaptiveVerificationManager")
    assert "draft_cost_ms, verify_cost_ms = self.cost_tables" in source(manager.get_num_tokens)
    readers = calls_on("adaptive_verification")["model_runner.py"]
    assert readers == {
        "add_request",
        "batches_to_profile",
        "set_initial_cost_curves",
        "get_num_tokens",
        "record_confidences",
    }


def test_a_request_is_new_with_a_slot_of_its_own_when_it_comes_and_when_it_comes_back() -> None:
    output = vllm("vllm.v1.core.sched.output", "SchedulerOutput")
    new = vllm("vllm.v1.core.sched.output", "NewRequestData")
    assert {"scheduled_new_reqs", "finished_req_ids"} <= {
        f.name for f in dataclasses.fields(output)
    }
    assert {"req_id", "sampling_params"} <= {f.name for f in dataclasses.fields(new)}
    runner = vllm(f"{GPU}.model_runner", "GPUModelRunner")
    in_order(
        source(runner.add_requests),
        "for new_req_data in scheduler_output.scheduled_new_reqs:",
        "self.req_states.add_request(",
        "self.req_states.req_id_to_index[req_id]",
    )
    scheduler = source(vllm("vllm.v1.core.sched.scheduler", "Scheduler").schedule)
    assert "scheduled_new_reqs.extend(scheduled_resumed_reqs)" in scheduler


def test_requests_are_noted_before_their_first_verdict() -> None:
    worker = vllm("vllm.v1.worker.gpu_worker", "Worker")
    assert list(inspect.signature(worker.execute_model).parameters) == ["self", "scheduler_output"]
    in_order(source(worker.execute_model), "self.model_runner.execute_model(")
    in_order(source(worker.sample_tokens), "self.model_runner.sample_tokens(")


def test_the_worker_for_gpus_is_ours_before_it_is_vllms() -> None:
    ours = vllm("workers.vllm.device_worker", "DeviceWorker")
    theirs = vllm("vllm.v1.worker.gpu_worker", "Worker")
    assert ours.__mro__[1:3] == (DeviceHooks, theirs)
    added = {"exchange", "status", "fleet", "steering", "_attach", "_detach", "_note", "_why_not"}
    assert not added & set(dir(theirs)), "vLLM's worker has these names now too"
    for name in ("load_model", "initialize_from_config", "compile_or_warm_up_model"):
        assert hasattr(theirs, name), f"vLLM has moved: Worker.{name} is gone"
