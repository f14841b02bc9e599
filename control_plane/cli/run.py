"""`specfleet run`: real prompts through the OpenAI API, at a set concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import time
from collections.abc import Iterator
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from control_plane.cli.run_report import Run, document, report
from control_plane.load.endpoint import Endpoint, EndpointError, Request
from control_plane.load.loop import Stop, closed_loop
from control_plane.load.outcome import Failed, Outcome, Results
from control_plane.load.pairs import PairsError, Totals, of_target, operator_url, read_pairs
from control_plane.load.prompts import ALL, SHIPPED, Prompt, PromptsError, in_turn, read_prompts
from control_plane.load.settle import settled

EXAMPLES = """
Example: specfleet run all --requests 500 --concurrency 16

Example: specfleet run prompts.jsonl --chat --seconds 30 --json | jq .tokens_per_second
"""
URL = "http://127.0.0.1:8000/v1"
REQUESTS = 100
INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell has it."""


def _check_seconds(value: float | None) -> float | None:
    if value is not None and not 0.0 < value < math.inf:
        raise typer.BadParameter(f"{value} is not a number of seconds above 0")
    return value


def _check_temperature(value: float | None) -> float | None:
    if value is not None and not 0.0 <= value < math.inf:
        raise typer.BadParameter(f"{value} is not a finite number from 0 on")
    return value


def _check_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{value} does not begin with http:// or https://")
    return value.rstrip("/")


def run(
    workloads: Annotated[
        list[str],
        typer.Argument(
            metavar="WORKLOAD...",
            show_default=False,
            help=f"Of {', '.join(SHIPPED)}; or {ALL}; or a .txt or .jsonl file of prompts.",
        ),
    ],
    url: Annotated[str, typer.Option(callback=_check_url, help="Where the OpenAI API is.")] = URL,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, max=1000, help="Requests under way.")
    ] = 8,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", "-n", min=1, show_default=str(REQUESTS), help="How many to send."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            callback=_check_seconds, show_default=False, help="For how long, instead of how many."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            callback=_check_temperature,
            show_default="1 for prose and chat, 0 for others",
            help="Of sampling.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(show_default="the first that is served", help="Its name.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--completions", help="Which of the two APIs is used.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Whether tokens come as they are made.")
    ] = True,
    timeout: Annotated[
        float, typer.Option(callback=_check_seconds, help="Seconds for one request.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Send real prompts to a fleet, and say how it did.

    So many requests are always under way: when one is answered, the next is sent. Held-out text \
    of the workloads is continued by the model, each in turn; a file has one prompt on each line, \
    in a .jsonl as [bold]prompt[/] or [bold]messages[/].

    Exits with 1 if any request failed, and with 130 after Ctrl-C, which sends no more and reports \
    what was done.
    """
    messages = Console(stderr=True)
    if requests is not None and seconds is not None:
        raise typer.BadParameter("--requests and --seconds exclude each other")
    if requests is None and seconds is None:
        requests = REQUESTS
    try:
        prompts = read_prompts(workloads, temperature)
        names = list(dict.fromkeys(p.workload for part in prompts for p in part))
        how = Request(model or "", max_tokens, chat, stream, timeout)
        with _Bar(messages, quiet, requests, seconds) as bar:
            done = asyncio.run(_run(url, how, prompts, names, concurrency, requests, seconds, bar))
    except (PromptsError, EndpointError) as error:
        _fail(messages, str(error))
    if as_json:
        typer.echo(json.dumps(document(done), indent=2, allow_nan=False))
    else:
        Console().print(report(done))
    if done.interrupted:
        raise typer.Exit(INTERRUPTED)
    if done.results.failed:
        raise typer.Exit(1)


class _Bar:
    """Progress, on a terminal; of requests or of seconds."""

    def __init__(
        self, messages: Console, quiet: bool, requests: int | None, seconds: float | None
    ) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
            console=messages,
            transient=True,
            disable=quiet or not messages.is_terminal,
        )
        self._requests, self._seconds = requests, seconds
        self._sent = self._failed = self._tokens = 0
        self._start = 0.0

    def __enter__(self) -> _Bar:
        self._task = self._progress.add_task("Connecting", total=None, done="")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self) -> None:
        self._start = time.perf_counter()
        total = float(self._requests) if self._requests is not None else self._seconds
        self._progress.update(self._task, description="Sending", total=total)

    def tokens(self, n: int) -> None:
        self._tokens += n
        if self._requests is None:
            elapsed = time.perf_counter() - self._start
            self._progress.update(self._task, completed=min(elapsed, self._seconds or elapsed))

    def outcome(self, outcome: Outcome) -> None:
        self._sent += 1
        self._failed += isinstance(outcome, Failed)
        rate = self._tokens / max(time.perf_counter() - self._start, 1e-9)
        done = f"{self._sent:,} done, {rate:,.0f} tokens/s"
        if self._failed:
            done += f", [red]{self._failed:,} failed[/]"
        self._progress.update(self._task, done=done)
        if self._requests is not None:
            self._progress.update(self._task, completed=self._sent)

    def settle(self) -> None:
        self._progress.update(self._task, description="Counting", total=None)


async def _run(
    url: str,
    how: Request,
    prompts: list[list[Prompt]],
    names: list[str],
    concurrency: int,
    requests: int | None,
    seconds: float | None,
    bar: _Bar,
) -> Run:
    endpoint = Endpoint(url)
    try:
        if not how.model:
            served = await endpoint.models()
            if not served:
                raise EndpointError(f"{url}: serves no model")
            how = Request(served[0], how.max_tokens, how.chat, how.stream, how.timeout)
        before = await _totals(url, how.model)
        bar.begin()
        until = None if seconds is None else time.perf_counter() + seconds
        stop = Stop(requests, until)

        async def send(prompt: Prompt) -> Outcome:
            return await endpoint.send(prompt, how, bar.tokens)

        with _interrupts(stop.told):
            results = await closed_loop(
                send, in_turn(prompts), concurrency=concurrency, stop=stop, on_outcome=bar.outcome
            )
        interrupted = stop.told.is_set()
    finally:
        await endpoint.close()
    grown, why = await _growth(url, how.model, before, results, wait=not interrupted, bar=bar)
    return Run(url, how, concurrency, names, results, grown, why, interrupted)


async def _growth(
    url: str, model: str, before: Totals | PairsError, results: Results, *, wait: bool, bar: _Bar
) -> tuple[Totals | None, str]:
    """What the fleet's counters grew by, or None and why."""
    if isinstance(before, PairsError):
        return None, str(before)
    if not results.served:
        return None, "no request was answered"
    bar.settle()

    async def read() -> Totals:
        totals = await _totals(url, model)
        if isinstance(totals, PairsError):
            raise totals
        return totals

    try:
        after = await (settled(read) if wait else read())
    except PairsError as error:
        return None, str(error)
    return after.plus(before, -1.0), ""


async def _totals(url: str, model: str) -> Totals | PairsError:
    try:
        pairs = await asyncio.to_thread(read_pairs, operator_url(url))
    except PairsError as error:
        return error
    return Totals.of(of_target(pairs, model))


@contextlib.contextmanager
def _interrupts(told: asyncio.Event) -> Iterator[None]:
    """Ctrl-C sets `told` and no more; a second one ends the command as ever."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        told.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _fail(messages: Console, why: str) -> NoReturn:
    messages.print(Text(f"specfleet run: {why}", "bold red"), soft_wrap=True)
    raise typer.Exit(1)
