"""The application: routes, errors, description."""

from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from control_plane.api.documents import EXAMPLE
from control_plane.api.health import health_routes
from control_plane.api.pairs import pair_routes
from control_plane.api.source import EstimatorSource
from control_plane.problems import ProblemDocument, answer_with_problems, responses

DESCRIPTION = """
What the fleet's acceptance estimator has learned, and how well it predicts.

Errors are RFC 9457 problem documents (`application/problem+json`). Times are Unix seconds, ages are
seconds. A number that does not exist, such as the calibration of a stratum without labels, is null.
"""


def create_app(source: EstimatorSource, *, stale_seconds: float) -> FastAPI:
    """The API over whatever `source` says.

    Args:
        source: the estimator.
        stale_seconds: a replica that was silent for so long is shown as stale.
    """
    app = FastAPI(
        title="SpecFleet",
        summary="See and steer the acceptance estimator of a fleet of vLLM replicas.",
        description=DESCRIPTION,
        version=version("specfleet"),
        redoc_url=None,
        redirect_slashes=False,
    )
    answer_with_problems(app)
    app.include_router(pair_routes(source, stale_seconds), prefix="/v1")
    app.include_router(health_routes(source), prefix="/v1")
    _complete_description(app)
    return app


def _complete_description(app: FastAPI) -> None:
    """Put into the OpenAPI document what FastAPI does not: our problems, and nulls in examples."""
    describe = app.openapi
    problem = ProblemDocument.model_json_schema()

    def openapi() -> dict[str, Any]:
        document = describe()
        schemas = document["components"]["schemas"]
        schemas["ProblemDocument"] = problem
        schemas["PairDocument"]["examples"] = [EXAMPLE]
        # FastAPI describes its own answer to a bad argument; ours is a problem.
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for methods in document["paths"].values():
            for operation in methods.values():
                if "422" in operation["responses"]:
                    operation["responses"]["422"] = responses(HTTPStatus(422))[422]
        return document

    app.openapi = openapi  # type: ignore[method-assign]
