"""Whether vLLM and the worker know what a configuration tells them.

Needs vLLM, whose import takes half a minute: only those who need the engine anyway ask.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from control_plane.config import FleetConfig, ModelConfig
from control_plane.config_errors import ConfigError, explain, join, nearest, unknown_key

WORKER_SETTINGS = "workers.config:WorkerConfig"
"""Named, not imported: replicas and control plane know each other by messages only."""


def check_engine_arguments(config: FleetConfig) -> None:
    """Raises ConfigError, which names every engine argument and method that vLLM does not know."""
    faults = [
        fault
        for index, model in enumerate(config.models)
        for fault in _engine_faults(model, f"models[{index}]")
    ]
    if faults:
        raise ConfigError(join(faults))


def check_worker_settings(config: FleetConfig) -> None:
    """Raises ConfigError, which names every setting that the worker does not know. Quick."""
    module, _, name = WORKER_SETTINGS.partition(":")
    settings: type[BaseModel] = getattr(importlib.import_module(module), name)
    faults = []
    for index, model in enumerate(config.models):
        try:
            settings.model_validate(model.worker)
        except ValidationError as error:
            faults.append(explain(error, settings, f"models[{index}].worker"))
    if faults:
        raise ConfigError(join(faults))


def _engine_faults(model: ModelConfig, path: str) -> Iterator[str]:
    from vllm.config import SpeculativeConfig
    from vllm.config.speculative import SpeculativeMethod
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    known = {*_fields(AsyncEngineArgs), *_fields(FrontendArgs)}
    yield from _unknown(model.engine, known, f"{path}.engine")
    speculative = model.engine.get("speculative_config", {})
    if not isinstance(speculative, dict):
        yield f"{path}.engine.speculative_config: {speculative!r} is not a mapping"
    else:
        inside = f"{path}.engine.speculative_config"
        yield from _unknown(speculative, _fields(SpeculativeConfig), inside)
    methods = set(_literals(SpeculativeMethod))
    if model.method not in methods:
        hint = nearest(model.method, methods)
        yield f"{path}.method: vLLM knows no method {model.method}; {hint}"


def _unknown(given: Iterable[str], known: Iterable[str], path: str) -> Iterator[str]:
    names = set(known)
    for name in given:
        if name not in names:
            yield unknown_key(f"{path}.{name}", name, names)


def _fields(dataclass: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(dataclass)]


def _literals(annotation: Any) -> Iterator[str]:
    """The strings of a Literal, and of those within it."""
    for part in get_args(annotation):
        if isinstance(part, str):
            yield part
        else:
            yield from _literals(part)
