"""What a fleet consists of: the arguments of `app.build`, and a file for `specfleet up`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from control_plane.config_errors import ConfigError, explain, nearest
from estimator_service.config import Positive
from estimator_service.messages import MAX_POSITIONS
from estimator_service.service import ServiceConfig

REFERENCE = "reference:"
"""Before the name of a model that the package ships."""

Name = Annotated[
    str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")
]
Replicas = Annotated[int, Field(ge=1, le=10_000)]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AutoscalingConfig(_Config):
    """Bounds between which Ray Serve chooses the number of replicas."""

    min: Annotated[int, Field(ge=0, le=10_000)] = 1
    max: Replicas
    target_ongoing_requests: Positive = 16.0
    """Requests in flight at each replica that Serve aims at."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class ModelConfig(_Config):
    """One served model: a pair, and how many replicas of it."""

    name: Name
    """What clients give as `model`, and the target's name in the pair."""
    target: Name
    """A directory, a name on the Hugging Face Hub, or `reference:target`."""
    drafter: Name
    """Likewise; `reference:draft`, say."""
    method: Name = "draft_model"
    """How the drafter drafts; vLLM's `method`."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_POSITIONS)] = 5
    """K."""
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    replicas: Replicas | None = None
    """2, if there is no `autoscaling`."""
    autoscaling: AutoscalingConfig | None = None
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """`auto` is what the installed build of vLLM is for."""
    engine: dict[str, Any] = {}
    """Any other argument of vLLM's engine, by its name in Python."""
    worker: dict[str, Any] = {}
    """Settings of SpecFleet's worker in the engine; `workers.config` says which."""
    env: dict[str, str] = {}
    """Environment variables of the replicas."""

    @field_validator("target", "drafter")
    @classmethod
    def _is_shipped(cls, model: str) -> str:
        model_source(model)
        return model

    @field_validator("engine")
    @classmethod
    def _not_ours(cls, engine: dict[str, Any]) -> dict[str, Any]:
        _check_plain(engine)
        for key, instead in _OURS.items():
            if _reaches(engine, key):
                raise ValueError(f"{'.'.join(key)} is set by {instead}")
        return engine

    @field_validator("worker")
    @classmethod
    def _plain(cls, worker: dict[str, Any]) -> dict[str, Any]:
        _check_plain(worker)
        return worker

    @model_validator(mode="after")
    def _one_number_of_replicas(self) -> Self:
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("give replicas or autoscaling, not both")
        return self

    @property
    def fewest(self) -> int:
        """Replicas that are there once the fleet is up."""
        return self.autoscaling.min if self.autoscaling else self.replicas or DEFAULT_REPLICAS

    @property
    def most(self) -> int:
        """Replicas that there may be."""
        return self.autoscaling.max if self.autoscaling else self.fewest


DEFAULT_REPLICAS = 2

_OURS = {
    ("model",): "target",
    ("served_model_name",): "name",
    ("speculative_config", "model"): "drafter",
    ("speculative_config", "method"): "method",
    ("speculative_config", "num_speculative_tokens"): "num_speculative_tokens",
    ("speculative_config", "draft_sample_method"): "draft_sample_method",
    ("additional_config", "specfleet"): "worker",
}
"""Engine arguments that have a key of their own: written there, they could contradict it."""


class ExchangeConfig(_Config):
    """How replicas and estimator talk."""

    interval_seconds: Positive = 1.0
    """Between two exchanges of a replica."""
    timeout_seconds: Positive = 5.0
    """After which a call to the estimator is given up."""
    stale_intervals: Annotated[float, Field(ge=2.0, allow_inf_nan=False)] = 5.0
    """Without a word from a replica for so many intervals, the API calls it stale."""

    @property
    def stale_seconds(self) -> float:
        """Age from which a replica is stale."""
        return self.stale_intervals * self.interval_seconds


def reference_models() -> list[ModelConfig]:
    """The pair that the package ships, in the precision that CPUs are quick in."""
    return [
        ModelConfig(
            name="reference",
            target="reference:target",
            drafter="reference:draft",
            engine={"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16},
            worker={"workloads": ["code", "math", "prose", "chat", "structured"]},
        )
    ]


def _default_service() -> ServiceConfig:
    return ServiceConfig(store=default_store())


class FleetConfig(_Config):
    """Everything that a fleet can be told.

    >>> FleetConfig().models[0].num_speculative_tokens
    5
    >>> FleetConfig.of({"models": []})
    Traceback (most recent call last):
    control_plane.config_errors.ConfigError: models: list should have at least 1 item after \
validation, not 0
    """

    models: Annotated[list[ModelConfig], Field(min_length=1, default_factory=reference_models)]
    estimator: ServiceConfig = Field(default_factory=_default_service)
    exchange: ExchangeConfig = ExchangeConfig()
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Of the HTTP server that `specfleet up` starts; it listens on the loopback interface only."""

    @field_validator("models")
    @classmethod
    def _distinct(cls, models: list[ModelConfig]) -> list[ModelConfig]:
        names = [model.name for model in models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are named {name!r}")
        return models

    @field_validator("estimator", mode="before")
    @classmethod
    def _store(cls, estimator: Any) -> Any:
        """Without a store, the one in the user's directory; a relative path means this directory's.

        The estimator's process has a working directory of its own.
        """
        if not isinstance(estimator, Mapping):
            return estimator
        store = estimator.get("store", default_store())
        return {**estimator, "store": _absolute(store)}

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> FleetConfig:
        """From plain data. Raises ConfigError, which names every key that is wrong."""
        try:
            return cls.model_validate(dict(args))
        except ValidationError as error:
            raise ConfigError(explain(error, cls)) from error


def state_directory() -> Path:
    """Where what outlives a command is kept."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "specfleet"


def default_store() -> str:
    """The URL of the estimator's database in the user's state directory."""
    return f"sqlite:///{state_directory().absolute()}/specfleet.db"


def model_source(model: str) -> str:
    """What vLLM loads for `target` or `drafter`: a path for a shipped one, else as it is.

    >>> model_source("org/Target-8B")
    'org/Target-8B'
    >>> model_source("reference:targets")
    Traceback (most recent call last):
    ValueError: no reference model is named targets; did you mean target?
    """
    if not model.startswith(REFERENCE):
        return model
    name = model.removeprefix(REFERENCE)
    models = Path(str(resources.files("workers.reference"))) / "models"
    known = [path.parent.name for path in models.glob("*/config.json")]
    if name not in known:
        raise ValueError(f"no reference model is named {name}; {nearest(name, known)}")
    return str(models / name)


def _absolute(store: Any) -> Any:
    prefix = "sqlite:///"
    if not isinstance(store, str) or not store.startswith(prefix):
        return store
    path = store.removeprefix(prefix)
    return store if path in ("", ":memory:") else prefix + str(Path(path).expanduser().absolute())


def _reaches(document: Mapping[str, Any], key: tuple[str, ...]) -> bool:
    at: Any = document
    for part in key:
        if not isinstance(at, Mapping) or part not in at:
            return False
        at = at[part]
    return True


def _check_plain(value: Any, path: str = "") -> None:
    """Raises ValueError for what JSON cannot say, such as nan or a date."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{path or 'it'} has the key {key!r}, which is not a string")
            _check_plain(inside, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for index, inside in enumerate(value):
            _check_plain(inside, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path} is {value}, not a finite number")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"{path} is a {type(value).__name__}; use numbers, strings and lists")
