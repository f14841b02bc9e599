"""What the host path touches of vLLM beyond its documented interface, by name.

When one of these fails, vLLM has moved something: the message says what, and where we use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,  # importing vLLM takes long, and it warns of its own affairs
    pytest.mark.filterwarnings("ignore"),
]


def source(function: Callable[..., Any], *names: str, user: str) -> None:
    """Assert that a function of vLLM still speaks of these names."""
    text = inspect.getsource(function)
    for name in names:
        assert name in text, f"{function.__qualname__} no longer has {name}; used by {user}"


def fields(kind: Any, *names: str, user: str) -> None:
    known: Any = getattr(kind, "__struct_fields__", getattr(kind, "__dataclass_fields__", ()))
    for name in names:
        assert name in known or hasattr(kind, name), (
            f"{kind.__qualname__} no longer has {name}; used by {user}"
        )


def test_the_runner_keeps_draft_probabilities_by_request() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    user = "HostWorker._unlike"
    source(GPUModelRunner.__init__, "self._draft_probs", "self._draft_prob_req_ids", user=user)
    source(
        GPUModelRunner._get_spec_decode_draft_probs,
        "self._draft_prob_req_ids",
        "if row_idx is None",
        "return None",
        user=user,
    )


def test_the_drafter_drafts_through_propose_and_its_models_logits() -> None:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    user = "Capture"
    source(
        GPUModelRunner.propose_draft_token_ids,
        "self.drafter.propose(",
        "sampling_metadata=sampling_metadata",
        user=user,
    )
    source(Proposer._sample_draft_tokens, "self.model.compute_logits(", user=user)
    source(Proposer._greedy_sample, "self.model.compute_logits(", user=user)
    assert "self.model" in inspect.getsource(Proposer.load_model)


def test_the_drafter_scales_by_temperature_and_by_nothing_else() -> None:
    from vllm.v1.sample.sampler import _SAMPLING_EPS
    from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token

    from workers.features import GREEDY_BELOW

    assert _SAMPLING_EPS == GREEDY_BELOW
    source(
        compute_probs_and_sample_next_token,
        "temperature < _SAMPLING_EPS",
        "torch.where(is_greedy, 1.0, temperature)",
        "logits.div_(temperature.view(-1, 1))",
        user="workers.features",
    )


def test_the_worker_is_called_in_this_order() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    user = "HostWorker"
    step = inspect.getsource(EngineCore.step)
    calls = ["model_executor.execute_model(", "model_executor.sample_tokens("]
    assert [step.index(call) for call in calls] == sorted(step.index(call) for call in calls)
    source(EngineCore.post_step, "self.async_scheduling", "take_draft_token_ids()", user=user)
    source(EngineCore.post_step, "scheduler.update_draft_token_ids(", user=user)
    for name in ("load_model", "execute_model", "sample_tokens", "take_draft_token_ids"):
        assert callable(getattr(Worker, name, None)), f"Worker has no {name}; used by {user}"
    assert list(inspect.signature(Worker.execute_model).parameters) == ["self", "scheduler_output"]
    assert list(inspect.signature(Worker.sample_tokens).parameters) == ["self", "grammar_output"]


def test_what_the_scheduler_says_and_the_runner_answers_has_these_fields() -> None:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.sample.metadata import SamplingMetadata

    user = "HostWorker"
    fields(
        SchedulerOutput,
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "finished_req_ids",
        "num_spec_tokens_to_schedule",
        user=user,
    )
    fields(NewRequestData, "req_id", "sampling_params", user=user)
    fields(CachedRequestData, "resumed_req_ids", user=user)
    fields(DraftTokenIds, "req_ids", "draft_token_ids", user=user)
    fields(ModelRunnerOutput, "req_id_to_index", "sampled_token_ids", user=user)
    fields(SamplingMetadata, "temperature", "all_greedy", user="Capture")


def test_sampling_parameters_have_these_fields_and_no_others_that_alter_the_target() -> None:
    from vllm.sampling_params import SamplingParams

    known = {
        # Read in workers.vllm.requests.
        *("temperature", "extra_args", "stop_token_ids", "_eos_token_id", "ignore_eos"),
        *("max_tokens", "structured_outputs", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "bad_words", "logit_bias", "allowed_token_ids", "min_tokens"),
        *("thinking_token_budget", "trace_decode_token_ids"),
        # Cut the target's distribution, as they would anybody's: labels stay true.
        *("top_p", "top_k", "min_p"),
        # Alter nothing that is verified.
        *("n", "seed", "stop", "logprobs", "prompt_logprobs", "prompt_logprob_token_ids"),
        *("prompt_logprob_start", "logprob_token_ids", "flat_logprobs", "detokenize"),
        *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        *("output_kind", "stream_interval", "skip_clone", "output_text_buffer_length"),
        *("_all_stop_token_ids", "_bad_words_token_ids", "skip_reading_prefix_cache"),
        *("repetition_detection", "routed_experts_prompt_start"),
        # Refused together with speculation by the V1 runner.
        *("watermarking", "_watermarking_skipped"),
    }
    assert set(SamplingParams.__struct_fields__) == known, (
        "SamplingParams has changed: does what is new alter the target? See workers.vllm.requests"
    )


def test_an_engine_that_the_host_path_cannot_serve_is_refused() -> None:
    from workers.vllm.host_worker import HostWorkerError, _check

    def config(speculative: object, asynchronous: bool) -> SimpleNamespace:
        scheduler = SimpleNamespace(async_scheduling=asynchronous)
        return SimpleNamespace(speculative_config=speculative, scheduler_config=scheduler)

    _check(config(object(), False))
    with pytest.raises(HostWorkerError, match="needs a speculative_config"):
        _check(config(None, False))
    with pytest.raises(HostWorkerError, match="needs async_scheduling=False"):
        _check(config(object(), True))
