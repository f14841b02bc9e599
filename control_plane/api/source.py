"""Where the API has the fleet's state from."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Protocol

from control_plane.problems import Problem
from estimator_service.messages import Snapshot
from estimator_service.service import EstimatorAway

RETRY_AFTER_SECONDS = 2
"""An estimator that died is back within a few seconds."""


class EstimatorSource(Protocol):
    """What the API needs of `estimator_service.actor.EstimatorLink`."""

    async def snapshot(self) -> Snapshot:
        """The fleet as of now. Raises EstimatorAway."""
        ...

    async def status(self) -> Mapping[str, Any]:
        """How the estimator itself is. Raises EstimatorAway."""
        ...


async def snapshot_of(source: EstimatorSource) -> Snapshot:
    """The fleet as of now. Raises Problem."""
    try:
        return await source.snapshot()
    except EstimatorAway as away:
        raise estimator_away(away) from away


def estimator_away(away: EstimatorAway) -> Problem:
    """503, and when to come again."""
    return Problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"{away}; replicas go on serving and learning meanwhile",
        kind="estimator-away",
        title="The estimator is away",
        headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
    )
