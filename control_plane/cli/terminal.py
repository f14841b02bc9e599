"""What every command shows alike: that it failed, and how far it is."""

from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


def fail(messages: Console, command: str, why: str) -> NoReturn:
    """Say why a command failed, and exit with 1."""
    # As it is, not wrapped: somebody may look for it in a log.
    messages.print(Text(f"specfleet {command}: {why}", "bold red"), soft_wrap=True)
    raise typer.Exit(1)


def progress(messages: Console, quiet: bool) -> Progress:
    """A bar that only a terminal sees, and that is gone when the work is done.

    What is done is said beside it, in words: a task's field `done`.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
        console=messages,
        transient=True,
        disable=quiet or not messages.is_terminal,
    )
