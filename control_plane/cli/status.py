"""`specfleet status`: what the fleet has learned, and where it has arrived."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from control_plane.cli.status_report import report
from control_plane.fleet_state import DEFAULT_URL, read_state
from control_plane.operator_client import OperatorApiError, OperatorClient

EXAMPLES = """
Example: specfleet status --watch

Example: specfleet status --json | jq '.pairs[].slope'
"""


def status(
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", show_default=f"where up put it, or {DEFAULT_URL}", help="Of the fleet."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep showing it, until Ctrl-C.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Between two looks of --watch.")
    ] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, the API's own.")
    ] = False,
) -> None:
    """Show every pair: coefficients, evidence, calibration; and every replica.

    [bold]admitted[/] counts draft tokens that the target verified, [bold]labels[/] those of \
    them with everything before accepted. A replica is [bold]stale[/] if it was not heard for \
    several exchanges: it serves on, with what it has applied.
    """
    messages = Console(stderr=True)
    if watch and as_json:
        raise typer.BadParameter("--watch and --json exclude each other")
    try:
        client = OperatorClient(url or _known_url())
        try:
            if watch:
                keep_showing(client.pairs, Console(), lambda: time.sleep(interval))
            else:
                _show(client.pairs(), as_json)
        finally:
            client.close()
    except OperatorApiError as error:
        _fail(messages, f"{error}{_hint(url)}")
    except KeyboardInterrupt:
        if not watch:
            raise


def keep_showing(
    look: Callable[[], dict[str, Any]], console: Console, wait: Callable[[], None]
) -> None:
    """Show the fleet again and again until `wait` is interrupted by KeyboardInterrupt.

    A look that fails is shown above what was seen last. Raises OperatorApiError if the first does.
    """
    seen = report(look())
    with Live(seen, console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            wait()
            shown: RenderableType
            try:
                shown = seen = report(look())
            except OperatorApiError as error:
                shown = Group(Text(f"{error}; what was seen last:", "bold red"), seen)
            live.update(shown, refresh=True)


def _show(pairs: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(pairs, indent=2, allow_nan=False))
    else:
        Console().print(report(pairs))


def _known_url() -> str:
    state = read_state()
    return state.url if state else DEFAULT_URL


def _hint(url: str | None) -> str:
    return "" if url else "; specfleet up brings a fleet up, --url names another"


def _fail(messages: Console, why: str) -> NoReturn:
    messages.print(Text(f"specfleet status: {why}", "bold red"), soft_wrap=True)
    raise typer.Exit(1)
