"""`specfleet fit`: coefficients from a file of labelled drafts."""

import json
import math
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from control_plane.cli.fit_document import document
from control_plane.cli.fit_plot import save_plot
from control_plane.cli.fit_report import rejected_rows, report, verdict
from control_plane.cli.trace_file import read_trace
from estimator_service.offline import POOLING, NoLabelsError, OfflineFit, fit_labels
from estimator_service.trace import Trace, TraceError

EXAMPLES = """
Example: specfleet fit trace.parquet --plot fit.png

Example: specfleet fit trace.csv --json | jq .slope
"""


def _check_plot(path: Path | None) -> Path | None:
    if path and path.suffix.lower() != ".png":
        raise typer.BadParameter(f"{path} does not end in .png")
    if path and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {path.parent}")
    return path


def _check_smoothness(value: float) -> float:
    if not 0.0 <= value < math.inf:
        raise typer.BadParameter(f"{value} is not a finite number from 0 on")
    return value


def _check_pooling(value: float) -> float:
    if not value > 0.0:
        raise typer.BadParameter(f"{value} is not above 0")
    return value


def fit(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", show_default=False, help="A .parquet or .csv file.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", show_default=False, callback=_check_plot, help="Draw the fit."
        ),
    ] = None,
    smoothness: Annotated[
        float,
        typer.Option(
            callback=_check_smoothness,
            help="Precision of the prior that ties each intercept to the one before.",
        ),
    ] = 0.0,
    pooling: Annotated[
        float,
        typer.Option(
            callback=_check_pooling,
            help="Precision of the prior that ties strata to the pair; inf gives them one fit.",
        ),
    ] = POOLING,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail, and fit nothing, if any row is bad.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress and no warnings.")
    ] = False,
) -> None:
    """Fit acceptance coefficients to a file of labelled drafts.

    TRACE has one row per draft position: which [bold]request[/] and [bold]step[/] it is of, its \
    [bold]position[/] in the draft, the [bold]feature[/] (log-odds of the drafter's most likely \
    token), whether it was [bold]admitted[/] to verification and [bold]accepted[/], and if you \
    like a [bold]stratum[/]. Rows that cannot be used are counted and named by line.
    """
    messages = Console(stderr=True)
    try:
        with _progress(messages, quiet) as bars:
            reading = bars.add_task("Reading", total=None)
            graded = read_trace(
                trace, lambda done, total: bars.update(reading, completed=done, total=total)
            )
            if graded.rejected_rows and (strict or not len(graded.labels)):
                messages.print(rejected_rows(graded))
            if graded.rejected_rows and strict:
                _fail(messages, f"{trace}: --strict allows no rejected row")
            fitting = bars.add_task("Fitting", total=None)
            fitted = fit_labels(
                graded.labels,
                smoothness=smoothness,
                pooling=pooling,
                on_step=lambda n, _: bars.update(fitting, description=f"Fitting, step {n}"),
            )
    except (TraceError, NoLabelsError) as error:
        _fail(messages, str(error))
    if as_json:
        typer.echo(json.dumps(document(graded, fitted), indent=2, allow_nan=False))
        if not quiet:
            _warn(messages, graded, fitted)
    else:
        Console().print(report(graded, fitted))
    if plot:
        try:
            save_plot(fitted, plot)
        except OSError as error:
            _fail(messages, f"{plot}: {error.strerror or error}")


def _progress(messages: Console, quiet: bool) -> Progress:
    """Bars that only a terminal sees, and that are gone when the work is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=messages,
        transient=True,
        disable=quiet or not messages.is_terminal,
    )


def _warn(messages: Console, graded: Trace, fitted: OfflineFit) -> None:
    """What must not be missed by someone who only looks at a number in the document."""
    if graded.rejected_rows:
        messages.print(rejected_rows(graded))
    if not fitted.converged:
        messages.print(verdict(fitted))


def _fail(messages: Console, why: str) -> NoReturn:
    # As it is, not wrapped: somebody may look for it in a log.
    messages.print(Text(f"specfleet fit: {why}", "bold red"), soft_wrap=True)
    raise typer.Exit(1)
