"""`specfleet demo`: what the product does, shown on a running fleet."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from control_plane.cli import demo_report as show
from control_plane.load.comparison import Arm, Comparison, compare
from control_plane.load.endpoint import Endpoint, EndpointError, Request
from control_plane.load.loop import Stop, closed_loop
from control_plane.load.outcome import Outcome, Results
from control_plane.load.pairs import PairsError, of_target, operator_url, read_document
from control_plane.load.prompts import ALL, Prompt, PromptsError, in_turn, read_prompts
from control_plane.replicas import Replicas, ReplicasError

EXAMPLES = """
Example: specfleet demo

Example: specfleet demo --seconds 120 --rounds 10
"""
UP_WITHIN = 900.0
"""Seconds that the replicas may take to start."""
CONCURRENCY = 8
ROWS = (0.0, 0.04, 0.08, 0.12, 0.17, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0)
"""When a line is printed, as shares of the time: close together while most happens."""
EVERY = 0.5
"""Seconds between two looks at the coefficients."""
FIRST_WORD = 30.0
"""Seconds in which a fleet that is up must have told its estimator of itself."""
SETTLING = 1.5
TURN = 5.0
"""Seconds that a policy serves in its turn, after SETTLING."""
HOPELESS = 20
"""Failures without one success after which the demonstration ends."""
INTERRUPTED = 130


class DemoError(Exception):
    """Why there is nothing to show: a sentence for people."""


@dataclass
class Told:
    """What was shown, for `--json`."""

    snapshots: list[dict[str, Any]] = field(default_factory=list)
    pair: dict[str, Any] = field(default_factory=dict)
    comparison: Comparison | None = None
    no_comparison: str = ""
    results: Results = field(default_factory=Results)


def demo(
    seconds: Annotated[
        float, typer.Option(min=5.0, max=3600.0, help="For how long the fleet learns.")
    ] = 60.0,
    url: Annotated[
        str | None,
        typer.Option(
            show_default="the one that is up, or is started", help="A fleet's OpenAI API."
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=0, max=100, help="Of the comparison, some 20 seconds each; 0 for none."),
    ] = 4,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document; the story goes to stderr.")
    ] = False,
) -> None:
    """Show a fleet learn, on the models that are shipped.

    Starts the fleet if it does not run, sends real prompts of five workloads, shows the \
    coefficients move and their calibration error fall, and compares throughput with that of \
    verifying a fixed number of draft tokens. The fleet is left up.
    """
    console = Console(highlight=False, markup=False, stderr=as_json)
    if not console.is_terminal:
        console.width = 80
    started = time.monotonic()
    try:
        url = (url or _bring_up(console)).rstrip("/")
        told = asyncio.run(_tell(console, url, seconds, rounds))
    except (DemoError, EndpointError, PairsError, PromptsError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        Console(stderr=True).print("\nInterrupted. The fleet is still up.")
        raise typer.Exit(INTERRUPTED) from None
    _end(console, url, told, time.monotonic() - started)
    if as_json:
        typer.echo(json.dumps(_document(url, told), indent=2, allow_nan=False))
    if told.results.failed:
        raise typer.Exit(1)


def _bring_up(console: Console) -> str:
    """The address of the OpenAI API of the fleet that `specfleet up` finds or starts."""
    from control_plane.cli.up import up
    from control_plane.fleet_state import read_state

    _chapter(console, "Bringing up the fleet")
    # Its progress goes to stderr. What it reports is said at the end, when it can be used.
    with contextlib.redirect_stdout(io.StringIO()):
        up(config=None, ray="auto", timeout=UP_WITHIN, as_json=False, quiet=False)
    state = read_state()
    if state is None:
        raise DemoError("the fleet was ended while it came up")
    return f"{state.url}/v1"


async def _tell(console: Console, url: str, seconds: float, rounds: int) -> Told:
    told = Told()
    endpoint = Endpoint(url)
    try:
        served = await endpoint.models()
        if not served:
            raise DemoError(f"{url}: serves no model")
        watch = _Watch(operator_url(url), served[0])
        pair = await watch.first()
        _chapter(console, "What this is about")
        k = pair["key"]["num_speculative_tokens"]
        console.print(show.INTRODUCTION.format(k=k))
        _chapter(console, "What is up")
        console.print(show.what_is_up(pair, watch.epoch))
        meter = _Meter(endpoint, Request(served[0]))
        async with meter.under_load(read_prompts([ALL])):
            await _learn(console, watch, meter, seconds, told)
            told.pair = await watch.pair()
            _chapter(console, "What was learned")
            console.print(
                "Chance of acceptance by position in the draft, once all before it was accepted:\n"
                "predicted, then observed. A stratum is a way of decoding and a workload.\n"
            )
            console.print(show.strata(told.pair))
            if rounds:
                await _compare(console, meter, k, rounds, told)
        told.results = meter.results
        return told
    finally:
        await endpoint.close()


class _Watch:
    """The pair of one target, as the operator's API has it."""

    def __init__(self, url: str, target: str) -> None:
        self._url, self._target = url, target
        self.epoch = 0

    async def pair(self) -> dict[str, Any]:
        """The one with the most labels, if drafters or K differ. Raises PairsError."""
        document = await asyncio.to_thread(read_document, self._url)
        pairs = of_target(document["pairs"], self._target)
        if not pairs:
            raise PairsError(f"{self._url}: no replica of {self._target} has reported yet")
        self.epoch = document["epoch"]
        return max(pairs, key=lambda pair: float(pair["counters"]["labels"]))

    async def first(self) -> dict[str, Any]:
        """The same of a fleet that may have come up only now. Raises PairsError."""
        until = time.monotonic() + FIRST_WORD
        while True:
            try:
                return await self.pair()
            except PairsError:
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(EVERY)


class _Meter:
    """Sends requests without end, and counts what comes back."""

    def __init__(self, endpoint: Endpoint, how: Request) -> None:
        self._endpoint, self._how = endpoint, how
        self.tokens = 0
        self.results = Results()

    @contextlib.asynccontextmanager
    async def under_load(self, prompts: list[list[Prompt]]) -> AsyncIterator[None]:
        """Within the block, so many requests are always under way."""
        stop = Stop()

        async def send(prompt: Prompt) -> Outcome:
            return await self._endpoint.send(prompt, self._how, self._count)

        load = asyncio.create_task(
            closed_loop(
                send,
                in_turn(prompts),
                concurrency=CONCURRENCY,
                stop=stop,
                on_outcome=self.results.add,
            )
        )
        try:
            yield
        finally:
            stop.told.set()
            await load

    def _count(self, tokens: int) -> None:
        self.tokens += tokens

    def check(self) -> None:
        """Raise DemoError if nothing gets through."""
        if not self.results.served and len(self.results.failed) >= HOPELESS:
            reason, count = next(iter(self.results.reasons.items()))
            detail = self.results.example(reason)
            raise DemoError(f"no request is answered: {reason} {count} times. {detail}".rstrip())


async def _learn(
    console: Console, watch: _Watch, meter: _Meter, seconds: float, told: Told
) -> None:
    _chapter(console, "All workloads at once, to learn from")
    console.print(
        "Code, math and structured text are continued greedily, prose and chat sampled at\n"
        f"temperature 1; {CONCURRENCY} requests are always under way.\n"
        "ECE is how far predicted acceptance is off on average. In the last column, what\n"
        "it is on the same labels with the coefficients that every pair starts from.\n"
    )
    pair, start = await watch.pair(), time.monotonic()
    console.print(Text(show.heading(pair), "bold"))
    rows = [seconds * share for share in ROWS]
    with _bar(console) as bars:
        bar = bars.add_task("Learning", total=seconds, done="")
        while rows:
            elapsed = time.monotonic() - start
            meter.check()
            with contextlib.suppress(PairsError):
                pair = await watch.pair()
            if elapsed >= rows[0]:
                rows = [row for row in rows if row > elapsed]
                bars.console.print(show.line(pair, elapsed))
                told.snapshots.append(_snapshot(pair, elapsed))
            rate = meter.tokens / max(elapsed, EVERY)
            served = len(meter.results.served)
            done = f"{served:,} requests, {rate:,.0f} tokens/s"
            bars.update(bar, completed=min(elapsed, seconds), done=done)
            await asyncio.sleep(EVERY)
    console.print(f"\n{show.calibration(pair)}")


def _snapshot(pair: dict[str, Any], seconds: float) -> dict[str, Any]:
    first = pair.get("first_guess")
    return {
        "seconds": seconds,
        "version": pair["version"],
        "labels": pair["counters"]["labels"],
        "slope": pair["slope"],
        "intercepts": pair["intercepts"],
        "ece": pair["calibration"]["ece"],
        "ece_of_first_guess": first["ece"] if first else None,
    }


async def _compare(console: Console, meter: _Meter, k: int, rounds: int, told: Told) -> None:
    half = (k + 1) // 2
    arms = [
        Arm("adaptive", "adaptive"),
        Arm(f"all {k}", "full"),
        Arm(f"always {half}", "fixed", half),
    ]
    _chapter(console, "What it is worth")
    console.print(
        f"Verifying what pays (adaptive), against all {k} tokens of every draft, or {half}.\n"
        f"The policy changes in turns under the same load, in {rounds} rounds: "
        f"{rounds * len(arms) * (SETTLING + TURN):.0f} seconds.\n"
    )
    try:
        replicas = await asyncio.to_thread(Replicas.connect)

        async def order(arm: Arm, seconds: float) -> None:
            meter.check()
            await asyncio.to_thread(
                replicas.call, "specfleet_policy", arm.policy, arm.length, seconds
            )
            if replicas.failures:
                raise ReplicasError(f"a replica did not obey: {replicas.failures[0]}")

        with _bar(console) as bars:
            bar = bars.add_task("Comparing", total=rounds * len(arms), done="")

            def turn(done: int, arm: Arm) -> None:
                bars.update(bar, completed=done, done=f"round {done // len(arms) + 1}: {arm.name}")

            told.comparison = await compare(
                arms,
                rounds=rounds,
                settling=SETTLING,
                seconds=TURN,
                order=order,
                tokens=lambda: meter.tokens,
                on_turn=turn,
            )
    except ReplicasError as error:
        told.no_comparison = str(error)
        console.print(Text(f"Left out: {error}", "yellow"))
        return
    console.print(show.throughput(told.comparison))
    console.print(f"\n{show.verdict(told.comparison)}")


def _end(console: Console, url: str, told: Told, seconds: float) -> None:
    results = told.results
    _chapter(console, "The fleet stays up")
    failed = len(results.failed)
    console.print(
        f"{len(results.served):,} requests were answered, {failed} failed; "
        f"the demonstration took {seconds:.0f} seconds.\n"
    )
    for reason, count in results.reasons.items():
        console.print(Text(f"failed: {reason}, {count} times. {results.example(reason)}", "red"))
    console.print(show.addresses(url, operator_url(url), _command()))


def _document(url: str, told: Told) -> dict[str, Any]:
    found = told.comparison
    return {
        "url": url,
        "snapshots": told.snapshots,
        "pair": told.pair,
        "requests": len(told.results.served) + len(told.results.failed),
        "failures": told.results.reasons,
        "output_tokens": told.results.tokens,
        "comparison": None
        if found is None
        else {"arms": [asdict(arm) for arm in found.arms], "tokens_per_second": found.rates},
        "no_comparison_because": told.no_comparison or None,
    }


def _command() -> str:
    """How to call this command again from here."""
    called = Path(sys.argv[0])
    on_path = shutil.which("specfleet")
    if called.name != "specfleet" or (on_path and Path(on_path).resolve() == called.resolve()):
        return "specfleet"
    return os.path.relpath(called)


def _chapter(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, "bold cyan"))
    console.print(Text("-" * len(title), "cyan"))


def _bar(console: Console) -> Progress:
    """A bar that only a terminal sees."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[done]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _fail(why: str) -> NoReturn:
    Console(stderr=True).print(Text(f"specfleet demo: {why}", "bold red"), soft_wrap=True)
    raise typer.Exit(1)
