"""What a long command shows while it works: where it is, how long that takes, what is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

Say = Callable[[str], None]


@contextmanager
def no_chatter() -> Iterator[None]:
    """Keep what Ray, Serve and vLLM log in this process out of a command's messages."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class Steps:
    """Steps one after the other, on a console for messages.

    A terminal shows the present step with a spinner; elsewhere each thing said is a line, once.

    Args:
        console: where messages go.
        quiet: show nothing.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet

    @contextmanager
    def step(self, doing: str, done: str) -> Iterator[Say]:
        """A step; call what it yields to say where it is. Ends with `done` and the time it took."""
        began = time.monotonic()
        lively = self._console.is_terminal and not self._quiet
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not lively,
        ) as bars:
            bar = bars.add_task(doing, total=None)
            said = [doing]
            if not lively:
                self._line(doing)

            def say(what: str) -> None:
                if what != said[-1]:
                    said.append(what)
                    bars.update(bar, description=what)
                    if not lively:
                        self._line(what)

            yield say
        self._line(f"{done} ({time.monotonic() - began:.0f} s)", "green")

    def _line(self, text: str, style: str = "") -> None:
        if not self._quiet:
            self._console.print(Text(text, style), soft_wrap=True)
