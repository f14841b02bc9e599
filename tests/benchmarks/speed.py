"""Output tokens per second by policy and concurrency, on a pair whose target costs more.

    python -m tests.benchmarks.speed RESULTS.jsonl [--drafter eagle] [--seconds 8] [--repeats 3]

Two engines, one that drafts nothing and one with the worker, take turns: in every repeat, all arms
of one concurrency come one after the other in a new order, and serve the same prompts, so that a
machine that drifts does it to all of them. Every measurement is appended to RESULTS.jsonl at once;
what is in it already is not measured again, so the run can be stopped and resumed. One file, one
setting: another drafter or number of parameters belongs into another file. Nothing here asserts a
time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

ENGINE = "tests.benchmarks.speed_engine"
POSITIONS = 7
PARAMETERS = 84_000_000
PROMPTS = 5
"""Documents of each workload by which the repeats' prompts are apart."""
REQUESTS = (1, 2, 4, 8, 16, 32)
NONE = "no speculation"
ARMS: dict[str, dict[str, Any]] = {
    NONE: {},
    **{f"K = {k}": {"policy": {"policy": "fixed", "length": k}} for k in range(1, POSITIONS + 1)},
    "adaptive": {"policy": {"policy": "adaptive"}},
    "adaptive, depth too": {"policy": {"policy": "adaptive"}, "depth": True},
}
Key = tuple[int, int, str]
"""Repeat, requests, arm."""


class Child:
    """One engine in a process of its own."""

    def __init__(self, target: Path, drafter: str, positions: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", ENGINE, str(target), drafter, str(positions)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Raises RuntimeError when the engine has died."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._answer())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return line[1:]
        raise RuntimeError(f"the engine ended with {self._process.wait()}")


def measure(
    results: Path,
    *,
    drafter: str,
    seconds: float,
    repeats: int,
    requests: list[int],
    parameters: int,
    arms: list[str],
) -> None:
    """Fill `results` with what is missing."""
    from workers.reference.inflate import write_inflated

    done = set(read(results))
    wanted = [(r, n, arm) for r in range(repeats) for n in requests for arm in shuffled(arms, r, n)]
    missing = [key for key in wanted if key not in done]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory)
        write_inflated(parameters, target)
        engines = {NONE: Child(target, drafter, 0), "": Child(target, drafter, POSITIONS)}
        start = time.monotonic()
        for i, (repeat, n, arm) in enumerate(missing, start=1):
            engine = engines.get(arm, engines[""])
            first = repeat * PROMPTS
            order = {**ARMS[arm], "requests": n, "seconds": seconds, "first": first}
            answer = engine.ask(order)
            row = {"repeat": repeat, "requests": n, "arm": arm, **answer}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            left = (time.monotonic() - start) / i * (len(missing) - i)
            print(
                f"{i}/{len(missing)}, {left / 60:.0f} min left: {n} requests, {arm}: "
                f"{answer['tokens_per_second']:.1f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
        for engine in engines.values():
            engine.close()


def shuffled(arms: list[str], repeat: int, requests: int) -> list[str]:
    """The arms, in an order of this repeat's own."""
    return random.Random(1000 * repeat + requests).sample(arms, len(arms))


def read(results: Path) -> dict[Key, dict[str, Any]]:
    """What was measured."""
    if not results.exists():
        return {}
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return {(row["repeat"], row["requests"], row["arm"]): row for row in rows}


def report(rows: dict[Key, dict[str, Any]], console: Console) -> None:
    """Print the tables: one for each figure, mean and standard deviation over repeats."""
    for figure, digits in (("tokens_per_second", 1), ("ms_per_token", 0), ("tokens_per_step", 2)):
        cells: dict[tuple[str, int], list[float]] = defaultdict(list)
        for (_, n, arm), row in rows.items():
            cells[arm, n].append(row[figure])
        counts = sorted({n for _, n in cells})
        table = Table("requests at once", *map(str, counts), title=figure.replace("_", " "))
        for arm in ARMS:
            values = [cells.get((arm, n), []) for n in counts]
            table.add_row(
                arm,
                *(
                    f"{mean(v):.{digits}f} ± {stdev(v) if len(v) > 1 else 0.0:.{digits}f}"
                    if v
                    else ""
                    for v in values
                ),
            )
        console.print(table)
    own = [row["own_share"] for (_, n, arm), row in rows.items() if n == 4 and arm == "adaptive"]
    if own:
        console.print(f"the worker's own time at 4 requests, adaptive: {mean(own):.2%} of the run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("results", type=Path)
    parser.add_argument("--drafter", choices=("draft", "eagle"), default="draft")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    parser.add_argument("--parameters", type=int, default=PARAMETERS, help="of the target")
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS))
    options = vars(parser.parse_args())
    results = options.pop("results")
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    measure(results, **options)
    report(read(results), Console(width=150))


if __name__ == "__main__":
    main()
