"""Errors of an HTTP API as RFC 9457 has them: `application/problem+json`."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

MEDIA_TYPE = "application/problem+json"
NAMESPACE = "urn:specfleet:problem:"


class ProblemDocument(BaseModel):
    """What went wrong. Members beyond these depend on `type`."""

    model_config = ConfigDict(
        extra="allow",
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [
                {
                    "type": f"{NAMESPACE}unknown-pair",
                    "title": "Unknown pair",
                    "status": 404,
                    "detail": "no pair is named 'target-k5'; known are reference-draft-model-k5-1f",
                    "instance": "/specfleet/v1/pairs/target-k5",
                    "known": ["reference-draft-model-k5-1f"],
                }
            ]
        },
    )

    type: str = "about:blank"
    """Which kind of problem; `about:blank` if the status says it all."""
    title: str
    """The same for every problem of a type."""
    status: Annotated[int, Field(ge=400, le=599)]
    detail: str
    """What is wrong in this case, for people."""
    instance: str
    """The path that was asked for."""


class Problem(Exception):
    """Raised by a route; becomes the response.

    Args:
        status: of the response.
        kind: last part of the type's URI; empty for `about:blank`.
        title: the same for every problem of the kind; the status's own phrase if empty.
        detail: what is wrong in this case.
        headers: of the response.
        members: more members of the document.
    """

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        *,
        kind: str = "",
        title: str = "",
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.kind = kind
        self.title = title or status.phrase
        self.headers = dict(headers or {})
        self.members = dict(members or {})

    def response(self, request: Request) -> JSONResponse:
        """As it is sent."""
        document = ProblemDocument(
            type=NAMESPACE + self.kind if self.kind else "about:blank",
            title=self.title,
            status=self.status,
            detail=self.detail,
            instance=request.url.path,
            **self.members,
        )
        return JSONResponse(
            document.model_dump(mode="json"), self.status, self.headers, media_type=MEDIA_TYPE
        )


def responses(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """For a route's OpenAPI: which problems it answers with."""
    return {
        status.value: {
            "description": status.phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
        }
        for status in statuses
    }


def answer_with_problems(app: FastAPI) -> None:
    """Make every error of an application a problem document, those of the framework too."""
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unexpected)


async def _problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Problem)
    return error.response(request)


async def _http_exception(request: Request, error: Exception) -> JSONResponse:
    """What routing raises: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    if status is HTTPStatus.NOT_FOUND:
        detail = f"there is nothing at {request.url.path}"
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.url.path} does not take {request.method}"
    else:
        detail = str(error.detail)
    return Problem(status, detail, headers=error.headers).response(request)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = [
        {"in": ".".join(str(part) for part in fault["loc"]), "detail": fault["msg"]}
        for fault in error.errors()
    ]
    detail = "; ".join(f"{fault['in']}: {fault['detail']}" for fault in faults)
    status = HTTPStatus(422)
    return Problem(status, detail, kind="invalid", members={"errors": faults}).response(request)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """A fault of this program. The server logs it; callers learn no more than that."""
    detail = f"{type(error).__name__} while answering; the server's log says more"
    return Problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail).response(request)
