"""A request's sampling parameters, as far as predictions and labels depend on them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from workers.config import DEFAULT_WORKLOAD
from workers.features import GREEDY_BELOW
from workers.labels import Request

WORKLOAD_KEY = "workload"
"""In `extra_args`; over HTTP in `vllm_xargs`."""
GREEDY = "greedy"
SAMPLED = "sampled"


def read_request(request_id: str, sampling: Any, workloads: Collection[str]) -> Request:
    """What a worker needs to know of a request.

    Args:
        request_id: the engine's name of it.
        sampling: vLLM's `SamplingParams`; None for a request that does not sample.
        workloads: names that a request may give; any other is `default`.
    """
    if sampling is None:
        return Request(request_id, stratum(SAMPLED, DEFAULT_WORKLOAD), skipped="not sampling")
    named = (sampling.extra_args or {}).get(WORKLOAD_KEY)
    workload = named if isinstance(named, str) and named in workloads else DEFAULT_WORKLOAD
    decoding = GREEDY if sampling.temperature < GREEDY_BELOW else SAMPLED
    stops = set(sampling.stop_token_ids or ())
    if sampling.eos_token_id is not None and not sampling.ignore_eos:
        stops.add(sampling.eos_token_id)
    return Request(
        request_id,
        stratum(decoding, workload),
        skipped=_skipped(sampling),
        stops=frozenset(stops),
        max_tokens=sampling.max_tokens,
    )


def stratum(decoding: str, workload: str) -> str:
    """The name of a stratum.

    >>> stratum("greedy", "default")
    'greedy:default'
    """
    return f"{decoding}:{workload}"


def _skipped(sampling: Any) -> str | None:
    """Why the drafter cannot know the target's distribution, if it cannot; the first reason."""
    altered = {
        "structured output": sampling.structured_outputs is not None,
        "penalties": sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.repetition_penalty != 1.0,
        "bad_words": bool(sampling.bad_words),
        "logit_bias": bool(sampling.logit_bias),
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "min_tokens": sampling.min_tokens > 0,
        "thinking budget": sampling.thinking_token_budget is not None,
        "trace replay": sampling.trace_decode_token_ids is not None,
    }
    return next((reason for reason, holds in altered.items() if holds), None)
