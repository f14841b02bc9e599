"""An OpenAI-like server on loopback that fails on demand: a real one cannot be made to.

What it does with a request is the model that the request names.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


class BrokenServer:
    """Counts what it was sent, in `bodies`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.pairs: list[dict[str, Any]] | None = None
        """What the operator's API says; None: there is none."""
        self.on_request: Callable[[], None] = lambda: None
        self.url = ""
        self.under_way = 0
        self.most_under_way = 0
        self.arrived = threading.Event()
        """A request that hangs has come."""
        self.app = FastAPI()
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/completions")(self._completions)
        self.app.post("/v1/chat/completions")(self._completions)
        self.app.get("/specfleet/v1/pairs")(self._pairs)

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "good", "object": "model", "created": 0}]}

    async def _pairs(self) -> Response:
        if self.pairs is None:
            return JSONResponse({"title": "The estimator is away"}, 503)
        return JSONResponse({"pairs": self.pairs})

    async def _completions(self, body: dict[str, Any]) -> Response:
        self.bodies.append(body)
        self.on_request()
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0.01)
            return await self._answer(body)
        finally:
            self.under_way -= 1

    async def _answer(self, body: dict[str, Any]) -> Response:
        match body["model"]:
            case "error":
                return JSONResponse({"error": {"message": "the engine is dead", "code": 500}}, 500)
            case "busy":
                return JSONResponse({"detail": "too many requests"}, 429)
            case "hang":
                self.arrived.set()
                await asyncio.sleep(60.0)
            case "not json":
                return Response("<html>", media_type="application/json")
            case "no usage":
                return JSONResponse(self._whole(body, usage=None))
        if body.get("stream"):
            return StreamingResponse(self._chunks(body), media_type="text/event-stream")
        return JSONResponse(self._whole(body, usage=USAGE))

    def _whole(self, body: dict[str, Any], usage: Any) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": "ab"}
        else:
            choice["text"] = "ab"
        return {
            "id": "x",
            "object": "chat.completion" if "messages" in body else "text_completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
            "usage": usage,
        }

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[str]:
        yield self._chunk(body, "a", None, 1)
        match body["model"]:
            case "cut off":
                return
            case "broken off":
                raise ConnectionError("gone")
            case "error in stream":
                yield f"data: {json.dumps({'error': {'message': 'preempted', 'code': 500}})}\n\n"
                return
        yield self._chunk(body, "b", "stop", 2)
        yield "data: [DONE]\n\n"

    def _chunk(self, body: dict[str, Any], text: str, finish: str | None, tokens: int) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if "messages" in body:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        chunk = {
            "id": "x",
            "object": "text_completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
            "usage": USAGE | {"completion_tokens": tokens},
        }
        return f"data: {json.dumps(chunk)}\n\n"


class _Quiet(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        pass


@contextmanager
def broken_server() -> Iterator[BrokenServer]:
    """Serves until the block ends."""
    broken = BrokenServer()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        broken.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        config = uvicorn.Config(
            broken.app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
        server = _Quiet(config)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listening]}, daemon=True, name="broken server"
        )
        thread.start()
        while not server.started:
            thread.join(0.01)
        try:
            yield broken
        finally:
            server.should_exit = True
            thread.join(20.0)
            assert not thread.is_alive()
