"""A worker's settings, from the key `specfleet` of vLLM's `additional_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from estimator_service.messages import MAX_POSITIONS, MAX_STRATA, Policy, PolicyOrder

KEY = "specfleet"
DEFAULT_WORKLOAD = "default"
"""Of a request that names none, or one that is not configured."""

Workload = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,47}$")]


class CostConfig(BaseModel):
    """How the cost of a step is learned."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: Annotated[int, Field(ge=1)] = 15
    """Samples of one bucket of token counts whose median is its cost."""
    max_age: Annotated[int, Field(ge=1)] = 2000
    """Steps until a sample no longer counts."""
    share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.02
    """Of the steps, those that try a random budget: a size that is never tried has no cost."""
    warmup_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """The same while little is known ..."""
    warmup_tries: Annotated[int, Field(ge=0)] = 20
    """... which is until so many random budgets were tried."""


class WorkerConfig(BaseModel):
    """Everything that a worker can be told at its start.

    >>> WorkerConfig.of({"specfleet": {"record": 1000}}).record
    1000
    >>> WorkerConfig.of({}).policy.value
    'adaptive'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    workloads: Annotated[tuple[Workload, ...], Field(max_length=(MAX_STRATA // 2) - 1)] = ()
    """Names that a request may give as `workload` in its `extra_args` (`vllm_xargs` over HTTP)."""
    policy: Policy = Policy.ADAPTIVE
    """Until an order says otherwise."""
    length: Annotated[int, Field(ge=0, le=MAX_POSITIONS)] | None = None
    """Draft tokens to verify; with policy `fixed` only."""
    draft_depth: bool = True
    """Under policy `adaptive`, choose how many positions are drafted too."""
    cost: CostConfig = CostConfig()
    lease: Annotated[int, Field(ge=1)] = 30
    """Intervals between exchanges that may pass without one before the worker fits by itself."""
    record: Annotated[int, Field(ge=0)] = 0
    """Labelled draft positions to keep for `drain_record`; 0 keeps none."""
    seed: int = 0
    """Of the random budgets that are tried."""

    @field_validator("workloads")
    @classmethod
    def _distinct(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names) or DEFAULT_WORKLOAD in names:
            raise ValueError(f"workloads must be distinct and none {DEFAULT_WORKLOAD!r}: {names}")
        return names

    @model_validator(mode="after")
    def _length_goes_with_fixed(self) -> WorkerConfig:
        if (self.policy is Policy.FIXED) != (self.length is not None):
            raise ValueError("policy fixed needs a length, and the others take none")
        return self

    @property
    def order(self) -> PolicyOrder:
        """The policy at the start."""
        return PolicyOrder(self.policy, self.length)

    @classmethod
    def of(cls, additional_config: Mapping[str, Any]) -> WorkerConfig:
        """From the whole of vLLM's `additional_config`. Raises pydantic's ValidationError."""
        return cls.model_validate(additional_config.get(KEY, {}))
