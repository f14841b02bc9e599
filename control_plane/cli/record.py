"""`specfleet record`: a labelled trace from the live replicas."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from control_plane.cli.trace_file.writer import TraceWriter
from control_plane.replicas import Replicas, ReplicasError
from estimator_service.trace import TraceError

EXAMPLES = """
Example: specfleet record trace.parquet --seconds 120

Example: specfleet record trace.parquet --append && specfleet fit trace.parquet
"""
SECONDS = 60.0
EVERY = 1.0
"""Seconds between two calls to the replicas."""
GIVE_UP = 30.0
"""Seconds without an answer from any replica until recording ends."""
INTERRUPTED = 130
OFF = (
    "the replicas keep no record. Set `record` among the model's `worker` settings, for example\n"
    "  worker: {record: 100000}\n"
    "in the file that `specfleet up` is given: it is how many draft positions each replica keeps."
)


class Calls(Protocol):
    """Calls to all replicas; `Replicas` has them."""

    failures: list[str]

    def call(self, method: str, *arguments: Any, timeout: float = 10.0) -> list[Any]:
        """The answers. Raises ReplicasError when there is none."""


@dataclass
class Recording:
    """What came of it."""

    seconds: float = 0.0
    replicas: int = 0
    """The most that answered at once."""
    dropped: int = 0
    """Rows that replicas had to drop, because they came faster than they were fetched."""
    unanswered: int = 0
    """Calls that a replica did not answer."""
    interrupted: bool = False
    ended_by: str = ""
    """Why it ended before its time, if it did."""


def record(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.parquet", show_default=False, help="What to write.")
    ],
    seconds: Annotated[
        float | None,
        typer.Option(min=0.0, show_default=f"{SECONDS:g}", help="For how long."),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Until there are so many, however long."),
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Keep the rows that the file has.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Record labelled drafts from the live replicas.

    One row for each draft position: what [bold]specfleet fit[/] reads, and the drafted token, its \
    probability, and the largest probability, margin and entropy of the drafter's distribution. \
    What the replicas had kept already comes first.

    The file appears when it is complete; after Ctrl-C, with the rows that came so far.
    """
    messages = Console(stderr=True)
    if file.suffix.lower() not in (".parquet", ".pq"):
        raise typer.BadParameter(f"{file} does not end in .parquet")
    if not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {file.absolute().parent}")
    if file.exists() and not append:
        raise typer.BadParameter(f"{file} exists; --append adds to it")
    if seconds is not None and rows is not None:
        raise typer.BadParameter("--seconds and --rows exclude each other")
    limit = math.inf if rows is not None else SECONDS if seconds is None else seconds
    try:
        replicas = Replicas.connect()
        check_recording(replicas)
        with TraceWriter(file, append=append) as trace, _progress(messages, quiet) as bars:
            total = float(rows) if rows is not None else limit
            bar = bars.add_task("Recording", total=total, done="")

            def show(elapsed: float) -> None:
                done = float(trace.rows) if rows is not None else elapsed
                bars.update(bar, completed=min(done, total), done=f"{trace.rows:,} rows")

            done = record_into(trace, replicas, seconds=limit, rows=rows, on_progress=show)
            if trace.rows:
                trace.commit()
    except (ReplicasError, TraceError) as error:
        _fail(messages, str(error))
    if done.ended_by:
        messages.print(Text(f"ended early: {done.ended_by}", "yellow"), soft_wrap=True)
    if not trace.rows:
        _fail(messages, "not one row came: the replicas verified no draft meanwhile")
    _report(trace, done, as_json)
    if done.interrupted:
        raise typer.Exit(INTERRUPTED)
    if done.ended_by:
        raise typer.Exit(1)


def check_recording(replicas: Calls) -> None:
    """Raise ReplicasError, with what to set, if no replica keeps a record."""
    kept = [_find(status, "record") for status in replicas.call("specfleet_status")]
    if kept and all(rows == 0 for rows in kept):
        raise ReplicasError(OFF)


def record_into(
    trace: TraceWriter,
    replicas: Calls,
    *,
    seconds: float,
    rows: int | None,
    on_progress: Callable[[float], None] = lambda elapsed: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Recording:
    """Fetch rows for `seconds`, or until there are `rows`, or until Ctrl-C.

    Raises:
        TraceError: they cannot be written.
    """
    done, start = Recording(), clock()
    answered = start
    try:
        while True:
            # The call that comes after the time is up fetches what came before it was.
            over = clock() - start >= seconds
            more = False
            try:
                answers = replicas.call("specfleet_drain_record")
                done.unanswered += len(replicas.failures)
                more = _add(trace, answers, done)
                answered = clock()
            except ReplicasError as error:
                done.unanswered += 1
                if clock() - answered >= GIVE_UP:
                    done.ended_by = str(error)
                    break
            on_progress(clock() - start)
            if rows is not None and trace.rows >= rows:
                break
            if over and not more:
                break
            if not more:
                sleep(min(EVERY, max(start + seconds - clock(), 0.0)))
    except KeyboardInterrupt:
        done.interrupted = True
    done.seconds = clock() - start
    return done


FULL_ANSWER = 500
"""Rows in an answer that mean that there are more: `workers.vllm.host_worker.RECORD_ROWS`."""


def _add(trace: TraceWriter, answers: Sequence[dict[str, Any]], done: Recording) -> bool:
    """Whether a replica has more rows than fitted into its answer."""
    done.replicas = max(done.replicas, len(answers))
    added = []
    for columns in answers:
        done.dropped += columns.get("dropped", 0)
        added.append(trace.add(columns))
    return max(added) >= FULL_ANSWER


def _find(status: Any, key: str) -> Any:
    """The value of a key, wherever in a status it is; None if nowhere."""
    if isinstance(status, dict):
        if key in status:
            return status[key]
        status = list(status.values())
    if isinstance(status, list):
        return next((v for part in status if (v := _find(part, key)) is not None), None)
    return None


def _report(trace: TraceWriter, done: Recording, as_json: bool) -> None:
    if as_json:
        summary = {
            "file": str(trace.path),
            "rows": trace.rows,
            "earlier_rows": trace.earlier,
            "strata": dict(sorted(trace.strata.items())),
            "seconds": done.seconds,
            "replicas": done.replicas,
            "dropped_rows": done.dropped,
            "unanswered_calls": done.unanswered,
            "interrupted": done.interrupted,
        }
        typer.echo(json.dumps(summary, indent=2))
        return
    console = Console(highlight=False, markup=False)
    behind = f", behind {trace.earlier:,} that were there" if trace.earlier else ""
    console.print(
        f"{trace.path}: {trace.rows:,} rows{behind}, "
        f"of {done.replicas} replicas in {done.seconds:.0f} s",
        soft_wrap=True,
    )
    for stratum, count in sorted(trace.strata.items()):
        console.print(f"  {stratum:<24} {count:>10,}")
    if done.dropped:
        dropped = f"{done.dropped:,} further rows were dropped: a replica's record was full"
        console.print(Text(f"{dropped}. Record more often, or raise `record`.", "yellow"))
    console.print(f"Next: specfleet fit {trace.path}", soft_wrap=True)


def _progress(messages: Console, quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
        console=messages,
        transient=True,
        disable=quiet or not messages.is_terminal,
    )


def _fail(messages: Console, why: str) -> NoReturn:
    messages.print(Text(f"specfleet record: {why}", "bold red"), soft_wrap=True)
    raise typer.Exit(1)
