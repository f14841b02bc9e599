"""Whether the API is there, and the estimator behind it."""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from control_plane.api.documents import finite_only
from control_plane.api.source import EstimatorSource
from estimator_service.service import EstimatorAway


class HealthDocument(BaseModel):
    """How the control plane is. Answering at all means that the API works."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    estimator: Literal["reachable", "away"]
    """While it is away, replicas go on serving and learning."""
    detail: str
    """Why it is away; empty if it is not."""
    status: dict[str, Any]
    """What the estimator says of itself: its epoch, refits, saves; empty if it is away."""


def health_routes(source: EstimatorSource) -> APIRouter:
    """`GET /health`."""
    router = APIRouter(tags=["health"])

    @router.get("/health", summary="Whether the estimator can be reached")
    async def health() -> HealthDocument:
        """Always 200 while this API works: a probe must not end it because another is away."""
        try:
            status = dict(await source.status())
        except EstimatorAway as away:
            return HealthDocument(estimator="away", detail=str(away), status={})
        return HealthDocument(estimator="reachable", detail="", status=finite_only(status))

    return router
