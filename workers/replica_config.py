"""A replica's settings, from the key `specfleet` of Ray Serve LLM's `experimental_configs`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from estimator_service.messages import PairKey
from estimator_service.service import ServiceConfig

KEY = "specfleet"
Seconds = Annotated[float, Field(gt=0.0, le=3600.0, allow_inf_nan=False)]


class ReplicaConfig(BaseModel):
    """Everything that a replica can be told about its fleet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    estimator: ServiceConfig = ServiceConfig()
    """Of the one that the first replica starts; the others find it running."""
    interval_seconds: Seconds = 1.0
    """Between two exchanges with the estimator."""
    timeout_seconds: Seconds = 5.0
    """That a call to the estimator may take."""
    drafter: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Its name in the pair's key; by default the last part of the drafter's path or id."""

    def pair(self, target: str, speculative_config: dict[str, Any]) -> PairKey:
        """The pair that an engine serves.

        Args:
            target: the name under which the target is served.
            speculative_config: vLLM's.

        Raises:
            ValueError: it does not say how many tokens are drafted, or how.

        >>> ReplicaConfig().pair("chat", {"model": "org/Draft", "num_speculative_tokens": 5,
        ...     "method": "draft_model"}).drafter
        'Draft'
        """
        missing = [
            name for name in ("method", "num_speculative_tokens") if name not in speculative_config
        ]
        if missing:
            raise ValueError(f"speculative_config lacks {' and '.join(missing)}")
        method = str(speculative_config["method"])
        model = str(speculative_config.get("model") or method)
        return PairKey(
            target=target,
            drafter=self.drafter or model.rstrip("/").rsplit("/", 1)[-1],
            method=method,
            num_speculative_tokens=int(speculative_config["num_speculative_tokens"]),
            draft_sample_method=str(speculative_config.get("draft_sample_method", "greedy")),
        )
