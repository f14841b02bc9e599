"""Run the benchmarks and print what they measured. Nothing here asserts a time."""

from __future__ import annotations

import argparse
import os
import platform

from rich.console import Console

from tests.benchmarks import actor, frames, refit

BENCHMARKS = {"frames": frames.run, "refit": refit.run, "actor": actor.run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"which: {', '.join(BENCHMARKS)} (default: all)")
    names = parser.parse_args().name or list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    console = Console(width=150)
    console.print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    )
    for name in names:
        BENCHMARKS[name](console)


if __name__ == "__main__":
    main()
