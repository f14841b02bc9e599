"""The operator's API as a program sees it."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx

TIMEOUT_SECONDS = 10.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class OperatorApiError(Exception):
    """It did not answer, or not with what was asked for; the text says which."""


class OperatorClient:
    """Reads `/specfleet/v1`.

    Args:
        url: of the HTTP server, `http://127.0.0.1:8000` say.
        timeout: seconds for one call.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT_SECONDS) -> None:
        self.url = url.rstrip("/")
        try:
            local = urlsplit(url).hostname in _LOOPBACK
            # A proxy in the environment is not for this machine.
            self._client = httpx.Client(timeout=timeout, trust_env=not local)
        except ValueError as error:
            raise OperatorApiError(f"{url}: {error}") from error

    def pairs(self) -> dict[str, Any]:
        """`GET /pairs`. Raises OperatorApiError."""
        return self._get("pairs")

    def health(self) -> dict[str, Any]:
        """`GET /health`. Raises OperatorApiError."""
        return self._get("health")

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def _get(self, path: str) -> dict[str, Any]:
        address = f"{self.url}/specfleet/v1/{path}"
        try:
            response = self._client.get(address)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OperatorApiError(f"nothing answers at {self.url}: {_reason(error)}") from error
        document = _json(response)
        if response.is_success and document is not None:
            return document
        if document is not None and "title" in document:
            raise OperatorApiError(f"{document['title']}: {document.get('detail', '')}")
        raise OperatorApiError(
            f"{address} answered {response.status_code} and no SpecFleet document; "
            "is something else running there?"
        )


def _json(response: httpx.Response) -> dict[str, Any] | None:
    try:
        document = response.json()
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return str(error).strip() or type(error).__name__
