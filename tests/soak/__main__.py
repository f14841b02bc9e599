"""Half an hour of load on a real fleet, with its estimator killed again and again.

    python -m tests.soak RESULTS.jsonl [--minutes 30] [--kill-every 90]

Brings up two replicas, sends them all five workloads, and appends a line to RESULTS.jsonl every ten
seconds or so: requests and failures, labels at both ends, versions, memory of every process. The
time that is in the file already counts, so a run that was stopped goes on. Ends with a report, and
with 1 if a request failed, a label was lost, or a version went back.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.e2e.conftest import Fleet, running_fleet

BATCH = 60
"""Requests between two lines of the results."""


def soak(mine: Fleet, results: Path, seconds: float, kill_every: float) -> None:
    """Fill `results` up to `seconds` of load."""
    done = sum(row["seconds"] for row in read(results))
    killed_at = time.monotonic()
    run = time.time()
    with Progress(console=Console(stderr=True)) as bars:
        bar = bars.add_task("Soaking", total=seconds, completed=done)
        while done < seconds:
            start = time.monotonic()
            report = mine.json(
                "run", "all", "--url", f"{mine.url}/v1", "--requests", str(BATCH), timeout=600.0
            )
            row = {
                "run": run,
                "seconds": time.monotonic() - start,
                "requests": report["requests"],
                "failures": report["failures"],
                **observe(mine),
            }
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            done += row["seconds"]
            bars.update(bar, completed=done)
            if time.monotonic() - killed_at >= kill_every:
                os.kill(row["estimator_pid"], signal.SIGKILL)
                killed_at = time.monotonic()


def observe(mine: Fleet) -> dict[str, Any]:
    """Labels at both ends once they agree, or after 30 s as they are; and memory."""
    deadline = time.monotonic() + 30.0
    while True:
        try:
            replicas, estimator, pair = mine.replicas(), mine.estimator(), mine.pair()
            graded = sum(replica["exchange"].get("labels", 0) for replica in replicas)
            merged = pair["counters"]["labels"]
            if graded == merged or time.monotonic() > deadline:
                break
        except Exception:
            # Just killed, perhaps.
            if time.monotonic() > deadline:
                raise
        time.sleep(1.0)
    return {
        "graded": graded,
        "merged": merged,
        "version": pair["version"],
        "epoch": estimator["epoch"],
        "estimator_pid": estimator["pid"],
        "estimator_mib": resident(estimator["pid"]),
        "replicas_mib": {r["exchange"]["replica"]: resident(r["pid"]) for r in replicas},
    }


def resident(pid: int) -> float:
    """Memory of a process, MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def read(results: Path) -> list[dict[str, Any]]:
    """What was measured."""
    return [json.loads(x) for x in results.read_text().splitlines()] if results.exists() else []


def report(rows: list[dict[str, Any]], console: Console) -> bool:
    """Print what it came to; whether all is well."""
    last = rows[-1]
    # A run that goes on where another was stopped has a fleet of its own.
    versions = [(row["run"], *map(int, row["version"].split("."))) for row in rows]
    table = Table(show_header=False)
    table.add_row("minutes", f"{sum(row['seconds'] for row in rows) / 60:.1f}")
    table.add_row("requests", str(sum(row["requests"] for row in rows)))
    failed = sum(len(row["failures"]) for row in rows)
    table.add_row("kinds of failure", str(failed))
    table.add_row("estimator incarnations", str(len({(row["run"], row["epoch"]) for row in rows})))
    table.add_row("labels graded, merged", f"{last['graded']:,} {last['merged']:,}")
    table.add_row("versions never go back", str(versions == sorted(versions)))
    for name in last["replicas_mib"]:
        memory = [row["replicas_mib"].get(name) for row in rows]
        known = [value for value in memory if value is not None]
        half = known[len(known) // 2]
        table.add_row(f"replica {name}, MiB", f"{known[0]:.0f} {half:.0f} {known[-1]:.0f}")
    longest = [
        row["estimator_mib"] for row in rows if row["estimator_pid"] == last["estimator_pid"]
    ]
    table.add_row("estimator, MiB", f"{longest[0]:.0f} {longest[-1]:.0f}")
    console.print(table)
    return not failed and last["graded"] == last["merged"] and versions == sorted(versions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("results", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-every", type=float, default=90.0, help="seconds; 0 never")
    options = parser.parse_args()
    every = options.kill_every or float("inf")
    with tempfile.TemporaryDirectory() as directory, running_fleet(Path(directory)) as mine:
        soak(mine, options.results, 60.0 * options.minutes, every)
    sys.exit(0 if report(read(options.results), Console()) else 1)


if __name__ == "__main__":
    main()
