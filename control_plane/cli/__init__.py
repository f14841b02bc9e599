"""The `specfleet` command."""

import logging
from importlib.metadata import version
from typing import Annotated

import typer

from control_plane.cli import demo, down, fit, record, run, status, up
from workers.reference.cli import app as reference

app = typer.Typer(
    help="See, share and steer the acceptance estimator of a fleet of vLLM replicas.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (up, down, status, run, record, demo, fit):
    name = command.__name__.rpartition(".")[2]
    app.command(name, epilog=command.EXAMPLES)(getattr(command, name))
app.add_typer(reference, name="reference")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specfleet {version('specfleet')}")
        raise typer.Exit


@app.callback()
def _specfleet(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point. Exits with 0, with 1 for bad input and with 2 for wrong usage."""
    # They tell of every request; Ray puts them on the terminal.
    for chatty in ("httpx", "openai", "ray.serve"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    app()
