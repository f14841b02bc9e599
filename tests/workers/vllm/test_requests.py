from __future__ import annotations

from typing import Any

import pytest

from workers.labels import Request
from workers.vllm.requests import read_request

pytestmark = [
    pytest.mark.slow,  # importing vLLM takes long, and it warns of its own affairs
    pytest.mark.filterwarnings("ignore"),
]
WORKLOADS = ("code", "chat")


def sampling(**parameters: Any) -> Any:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    if "regex" in parameters:
        regex = parameters.pop("regex")
        parameters["structured_outputs"] = StructuredOutputsParams(regex=regex)
    return SamplingParams(**parameters)


def read(**parameters: Any) -> Request:
    return read_request("r", sampling(**parameters), WORKLOADS)


@pytest.mark.parametrize(
    ("temperature", "stratum"),
    # vLLM raises 1e-6 to .01, so that request is sampled, almost surely the most likely token.
    [(0.0, "greedy:default"), (1e-6, "sampled:default"), (1.0, "sampled:default")],
)
def test_a_stratum_says_how_a_request_is_decoded(temperature: float, stratum: str) -> None:
    assert read(temperature=temperature).stratum == stratum


@pytest.mark.parametrize(
    ("named", "stratum"),
    [
        ("code", "sampled:code"),
        ("prose", "sampled:default"),
        (7, "sampled:default"),
        (None, "sampled:default"),
    ],
)
def test_a_workload_is_one_of_those_configured(named: Any, stratum: str) -> None:
    assert read(extra_args={"workload": named}).stratum == stratum


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"presence_penalty": 0.5}, "penalties"),
        ({"frequency_penalty": -0.5}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
        ({"min_tokens": 3, "max_tokens": 9}, "min_tokens"),
        ({"regex": "a+"}, "structured output"),
        ({"top_p": 0.9, "top_k": 5, "seed": 1, "logprobs": 2}, None),
    ],
)
def test_who_alters_the_target_is_not_observed(
    parameters: dict[str, Any], reason: str | None
) -> None:
    assert read(**parameters).skipped == reason


def test_a_request_ends_at_its_stops_and_its_limit() -> None:
    ending = sampling(stop_token_ids=[5], max_tokens=7)
    ending.update_from_generation_config({}, eos_token_id=3)
    assert read_request("r", ending, ()).stops == {3, 5}
    assert read_request("r", ending, ()).max_tokens == 7
    going_on = sampling(stop_token_ids=[5], ignore_eos=True)
    going_on.update_from_generation_config({}, eos_token_id=3)
    assert read_request("r", going_on, ()).stops == {5}
