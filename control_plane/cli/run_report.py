"""What `specfleet run` says when it is done, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from control_plane.load.endpoint import Request
from control_plane.load.outcome import Results, Spread
from control_plane.load.pairs import Totals

DETAIL_WIDTH = 60


@dataclass(frozen=True)
class Run:
    """A load, and all that is known of it."""

    url: str
    request: Request
    concurrency: int
    workloads: Sequence[str]
    results: Results
    fleet: Totals | None
    """What the fleet's counters grew by meanwhile."""
    no_fleet: str = ""
    """Why that is not known."""
    interrupted: bool = False


def document(run: Run) -> dict[str, Any]:
    """Plain lists, numbers and strings; null for what is not known. Durations are in seconds."""
    fleet, results = run.fleet, run.results
    known = fleet is not None and fleet.labelled > 0.0
    return {
        "url": run.url,
        "model": run.request.model,
        "api": "chat" if run.request.chat else "completions",
        "stream": run.request.stream,
        "concurrency": run.concurrency,
        "max_tokens": run.request.max_tokens,
        "interrupted": run.interrupted,
        "cancelled": results.cancelled,
        "seconds": results.seconds,
        **_numbers(results),
        "requests_per_second": len(results.served) / results.seconds if results.seconds else 0.0,
        "failures": {
            reason: {"requests": count, "example": results.example(reason) or None}
            for reason, count in results.reasons.items()
        },
        "emitted_tokens_per_verified_draft": fleet.emitted_per_draft if fleet else None,
        "admitted_tokens_per_verified_draft": fleet.admitted_per_draft if fleet else None,
        "output_tokens_per_engine_step": (
            results.tokens / fleet.steps if fleet is not None and fleet.steps > 0.0 else None
        ),
        "fleet": vars(fleet) if fleet is not None and known else None,
        "fleet_unknown_because": None if known else run.no_fleet or "no draft was verified",
        "workloads": {name: _numbers(results.of(name)) for name in run.workloads},
    }


def _numbers(results: Results) -> dict[str, Any]:
    return {
        "requests": len(results.served) + len(results.failed),
        "failed": len(results.failed),
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in results.served),
        "output_tokens": results.tokens,
        "tokens_per_second": results.throughput,
        "latency": _spread(results.latency),
        "time_to_first_token": _spread(results.first_token),
        "time_per_output_token": _spread(results.per_token),
    }


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else {k: float(v) for k, v in spread._asdict().items()}


def report(run: Run) -> RenderableType:
    """Everything about a run, at most 80 columns wide."""
    sections: list[RenderableType] = [_summary(run)]
    if run.results.served:
        sections.append(_durations(run.results))
    if len(run.workloads) > 1:
        sections.append(_workloads(run))
    if run.results.failed:
        sections.append(_failures(run.results))
    return Group(*(part for section in sections for part in ("", section)))


def _summary(run: Run) -> RenderableType:
    results, fleet = run.results, run.fleet
    done = len(results.served) + len(results.failed)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    how = "chat" if run.request.chat else "completions"
    streamed = "streamed" if run.request.stream else "not streamed"
    table.add_row("model", f"{run.request.model}, at {run.url}")
    table.add_row("sent", f"{how}, {streamed}, {run.concurrency} at a time")
    rate = f", {len(results.served) / results.seconds:.1f} per second" if results.served else ""
    table.add_row("requests", f"{done:,} in {results.seconds:.1f} s{rate}")
    if run.interrupted:
        table.add_row("", Text(f"interrupted; {results.cancelled} under way cancelled", "yellow"))
    table.add_row("failed", Text(f"{len(results.failed):,}", "bold red" if results.failed else ""))
    table.add_row("output tokens", f"{results.tokens:,}")
    table.add_row("throughput", Text(f"{results.throughput:,.1f} tokens/s", "bold cyan"))
    table.add_row("emitted tokens", _emitted(run))
    if fleet is not None and fleet.steps > 0.0 and results.tokens:
        per_step = results.tokens / fleet.steps
        table.add_row("", f"{per_step:.2f} per engine step, of all requests in it")
    return table


def _emitted(run: Run) -> str:
    fleet = run.fleet
    emitted = fleet.emitted_per_draft if fleet else None
    if fleet is None or emitted is None:
        return f"n/a: {run.no_fleet or 'no draft was verified meanwhile'}"
    admitted = fleet.admitted_per_draft
    of = "" if admitted is None else f" of {admitted:.2f} tokens"
    return f"{emitted:.2f} per verified draft{of}, over {fleet.labelled:,.0f} drafts"


def _durations(results: Results) -> Table:
    table = _table(left=("",), right=("mean", "p50", "p90", "p99", ""))
    _duration(table, "latency", results.latency, 1.0, "s", 3)
    _duration(table, "time to first token", results.first_token, 1.0, "s", 3)
    _duration(table, "time per output token", results.per_token, 1000.0, "ms", 1)
    return table


def _duration(
    table: Table, name: str, spread: Spread | None, scale: float, unit: str, digits: int
) -> None:
    if spread is not None:
        table.add_row(name, *(f"{scale * value:.{digits}f}" for value in spread), unit)


def _workloads(run: Run) -> Table:
    right = ("requests", "failed", "tokens", "tokens/s", "latency p50", "p99")
    table = _table(left=("workload",), right=right)
    for name in run.workloads:
        part = run.results.of(name)
        spread = part.latency
        table.add_row(
            name,
            f"{len(part.served) + len(part.failed):,}",
            f"{len(part.failed):,}",
            f"{part.tokens:,}",
            f"{part.throughput:,.1f}",
            *(("-", "-") if spread is None else (f"{spread.p50:.2f} s", f"{spread.p99:.2f} s")),
        )
    return table


def _failures(results: Results) -> RenderableType:
    table = _table(left=("failed because", "for example"), right=("requests",))
    for reason, count in results.reasons.items():
        table.add_row(Text(reason, "bold red"), Text(results.example(reason)), f"{count:,}")
    return table


def _table(*, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
