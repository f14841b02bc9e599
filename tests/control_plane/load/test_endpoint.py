"""Every way in which a request can fail is a typed outcome, and none is an exception."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from control_plane.load.endpoint import Endpoint, EndpointError, Request
from control_plane.load.outcome import Failed, Outcome, Served
from control_plane.load.prompts import Prompt
from tests.control_plane.load.broken_server import BrokenServer, broken_server

PROMPT = Prompt("prose", "In the beginning", temperature=1.0)


@pytest.fixture(scope="module")
def server() -> Iterator[BrokenServer]:
    with broken_server() as broken:
        yield broken


def send(url: str, how: Request, prompt: Prompt = PROMPT) -> tuple[Outcome, list[int]]:
    async def once() -> tuple[Outcome, list[int]]:
        endpoint, tokens = Endpoint(url), list[int]()
        try:
            return await endpoint.send(prompt, how, tokens.append), tokens
        finally:
            await endpoint.close()

    return asyncio.run(once())


@pytest.mark.parametrize("chat", [False, True])
def test_a_streamed_answer_is_timed_and_counted(server: BrokenServer, chat: bool) -> None:
    outcome, tokens = send(server.url, Request("good", chat=chat))
    assert isinstance(outcome, Served)
    assert (outcome.workload, outcome.prompt_tokens, outcome.tokens) == ("prose", 3, 2)
    assert tokens == [1, 1]
    assert outcome.first_token is not None
    assert 0.0 < outcome.first_token <= outcome.seconds
    assert outcome.per_token == pytest.approx(outcome.seconds - outcome.first_token)


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_in_one_piece_has_no_first_token(server: BrokenServer, chat: bool) -> None:
    outcome, tokens = send(server.url, Request("good", chat=chat, stream=False))
    assert isinstance(outcome, Served)
    assert (outcome.tokens, tokens) == (2, [2])
    assert (outcome.first_token, outcome.per_token) == (None, None)


def test_a_request_names_its_workload_and_how_it_is_sampled(server: BrokenServer) -> None:
    send(server.url, Request("good", max_tokens=7))
    sent = server.bodies[-1]
    assert sent["vllm_xargs"] == {"workload": "prose"}
    assert (sent["temperature"], sent["max_tokens"]) == (1.0, 7)
    assert sent["prompt"] == PROMPT.text
    send(server.url, Request("good", chat=True))
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": PROMPT.text}]


@pytest.mark.parametrize(
    ("model", "stream", "reason", "detail"),
    [
        ("error", True, "HTTP 500", "the engine is dead"),
        ("error", False, "HTTP 500", "the engine is dead"),
        ("busy", True, "HTTP 429", "too many requests"),
        ("hang", True, "no answer within 0.3 s", ""),
        ("no usage", False, "the answer does not count its tokens", ""),
        ("cut off", True, "the stream ended early", ""),
        ("error in stream", True, "error in the answer", "preempted"),
    ],
)
def test_a_failure_has_a_reason(
    server: BrokenServer, model: str, stream: bool, reason: str, detail: str
) -> None:
    outcome, _ = send(server.url, Request(model, stream=stream, timeout=0.3))
    assert outcome == Failed("prose", reason, detail)


def test_a_connection_that_breaks_off_is_a_failure(server: BrokenServer) -> None:
    outcome, tokens = send(server.url, Request("broken off"))
    assert isinstance(outcome, Failed)
    assert outcome.reason == "connection lost"
    assert tokens == [1]


def test_an_answer_that_is_no_json_is_a_failure(server: BrokenServer) -> None:
    outcome, _ = send(server.url, Request("not json", stream=False))
    assert isinstance(outcome, Failed)
    assert outcome.reason.startswith("not understood: ")


def test_nobody_listening_is_a_failure() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        outcome, _ = send(url, Request("good"))
        assert isinstance(outcome, Failed)
        assert outcome.reason in ("connection refused", "cannot connect")
        with pytest.raises(EndpointError, match=f"{url}: (connection refused|cannot connect)"):
            asyncio.run(Endpoint(url).models())


def test_a_chat_from_a_file_is_not_sent_as_a_completion(server: BrokenServer) -> None:
    prompt = Prompt("x", messages=({"role": "user", "content": "?"},))
    outcome, _ = send(server.url, Request("good"), prompt)
    assert outcome == Failed("x", "the prompt is a chat: use --chat")
    outcome, _ = send(server.url, Request("good", chat=True), prompt)
    assert isinstance(outcome, Served)


def test_the_models_are_those_that_are_served(server: BrokenServer) -> None:
    async def models() -> list[str]:
        endpoint = Endpoint(server.url)
        try:
            return await endpoint.models()
        finally:
            await endpoint.close()

    assert asyncio.run(models()) == ["good"]
