"""One request through the official OpenAI client, timed. No failure of it is an exception."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from control_plane.load.outcome import Failed, Outcome, Served
from control_plane.load.prompts import Prompt

DETAIL_CHARACTERS = 300
NOT_CONNECTED = ("ConnectError", "ConnectTimeout")
"""The client's transport, which differs from release to release, names them so."""


class EndpointError(Exception):
    """There is nothing to send requests to: a sentence for people."""


@dataclass(frozen=True)
class Request:
    """How all requests of a load are made."""

    model: str
    max_tokens: int = 64
    chat: bool = False
    stream: bool = True
    timeout: float = 60.0
    """Seconds for all of a request."""


@dataclass(frozen=True)
class _Answer:
    prompt_tokens: int
    tokens: int
    first_at: float | None
    """By the clock."""


class _NotAnswered(Exception):
    """An answer of status 200 that is none."""


class Endpoint:
    """An OpenAI-compatible API at `url`, which ends in `/v1`. Close it after use."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.perf_counter) -> None:
        from openai import AsyncOpenAI

        # An attempt that is made again in secret would be timed as one. A server that wants a key
        # gets the one in OPENAI_API_KEY.
        self._client: Any = AsyncOpenAI(base_url=url, api_key=_key(), max_retries=0)
        self._clock = clock
        self.url = url

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    async def models(self, timeout: float = 10.0) -> list[str]:
        """The names of the models that it serves. Raises EndpointError."""
        try:
            async with asyncio.timeout(timeout):
                found = await self._client.models.list()
            return [model.id for model in found.data]
        except Exception as error:
            reason, detail = explain(error, timeout)
            raise EndpointError(f"{self.url}: {reason}{detail and f' ({detail})'}") from error

    async def send(
        self, prompt: Prompt, how: Request, on_tokens: Callable[[int], None] = lambda n: None
    ) -> Outcome:
        """Send one prompt and read the whole answer.

        Args:
            on_tokens: told, as they come, how many further tokens there are.
        """
        start = self._clock()
        try:
            async with asyncio.timeout(how.timeout):
                answer = await self._ask(prompt, how, on_tokens)
        except Exception as error:
            return Failed(prompt.workload, *explain(error, how.timeout))
        return Served(
            prompt.workload,
            self._clock() - start,
            answer.prompt_tokens,
            answer.tokens,
            None if answer.first_at is None else answer.first_at - start,
        )

    async def _ask(self, prompt: Prompt, how: Request, on_tokens: Callable[[int], None]) -> _Answer:
        arguments: dict[str, Any] = {
            "model": how.model,
            "max_tokens": how.max_tokens,
            "temperature": prompt.temperature,
            # Fills the stratum of that name, in a fleet that is configured to tell it apart.
            "extra_body": {"vllm_xargs": {"workload": prompt.workload}},
        }
        if how.chat:
            create = self._client.chat.completions.create
            arguments["messages"] = prompt.chat
        elif prompt.messages:
            raise _NotAnswered("the prompt is a chat: use --chat")
        else:
            create = self._client.completions.create
            arguments["prompt"] = prompt.text
        if not how.stream:
            answer = await create(**arguments)
            if answer.usage is None:
                raise _NotAnswered("the answer does not count its tokens")
            on_tokens(answer.usage.completion_tokens)
            return _Answer(answer.usage.prompt_tokens, answer.usage.completion_tokens, None)
        # With `continuous_usage_stats`, vLLM counts in every chunk and not only in the last.
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream = await create(stream=True, stream_options=options, **arguments)
        async with stream:
            return await self._read(stream, on_tokens)

    async def _read(self, stream: AsyncIterator[Any], on_tokens: Callable[[int], None]) -> _Answer:
        first_at, usage, finished, counted = None, None, False, 0
        async for chunk in stream:
            for choice in chunk.choices:
                finished = finished or choice.finish_reason is not None
                if first_at is None and _text(choice):
                    first_at = self._clock()
            if chunk.usage is not None:
                usage = chunk.usage
                on_tokens(usage.completion_tokens - counted)
                counted = usage.completion_tokens
        if not finished:
            raise _NotAnswered("the stream ended early")
        if usage is None:
            raise _NotAnswered("the answer does not count its tokens")
        return _Answer(usage.prompt_tokens, usage.completion_tokens, first_at)


def explain(error: BaseException, timeout: float) -> tuple[str, str]:
    """Why a request failed: a reason in few words, and what was said of it."""
    from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError

    causes = list(_causes(error))
    if isinstance(error, TimeoutError | APITimeoutError):
        return f"no answer within {timeout:g} s", ""
    if isinstance(error, APIConnectionError):
        if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
            return "connection refused", ""
        named = any(type(cause).__name__ in NOT_CONNECTED for cause in causes)
        return "cannot connect" if named else "connection lost", _say(causes[-1])
    if isinstance(error, APIStatusError):
        return f"HTTP {error.status_code}", _say(_message(error.body) or error.message)
    if isinstance(error, APIError):
        return "error in the answer", _say(error.message)
    if isinstance(error, _NotAnswered):
        return str(error), ""
    if any("Protocol" in type(cause).__name__ for cause in causes):
        return "connection lost", _say(causes[-1])
    return f"not understood: {type(error).__name__}", _say(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _message(body: object) -> str:
    """The server's own words, wherever in its error document they are."""
    while isinstance(body, dict):
        body = next((body[key] for key in ("error", "message", "detail") if key in body), None)
    return body if isinstance(body, str) else ""


def _say(what: object) -> str:
    return " ".join(str(what).split())[:DETAIL_CHARACTERS]


def _text(choice: Any) -> str:
    """What a chunk of either kind adds to the answer."""
    delta = getattr(choice, "delta", None)
    return (getattr(choice, "text", None) if delta is None else delta.content) or ""


def _key() -> str:
    import os

    return os.environ.get("OPENAI_API_KEY") or "none"
