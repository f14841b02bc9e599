"""The real actor on a real Ray: frames a second, replicas that it sustains, and a tier below it."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from msgspec import structs
from rich.console import Console
from rich.table import Table

from estimator_service.actor import EstimatorLink, find_or_create
from estimator_service.messages import (
    CoefficientSet,
    Frame,
    PairKey,
    Reply,
    StratumRound,
    decode,
    decode_array,
    encode,
    encode_array,
)
from estimator_service.service import ServiceConfig
from estimator_service.sketch import Sketch
from estimator_service.statistics import WIDTH, Statistics
from tests.estimator_service.fleet import Truth, frame_of

ROOT = Path(__file__).parents[2]
K = 16
PAIR = PairKey("org/target", "org/draft", "eagle3", K)
TRUTH = Truth(0.6, tuple(np.linspace(1.2, 0.4, K)))
DRAFTS = 100
"""In a frame: about what 16 requests draft in a second."""
PROCESSES = 2
"""That send."""
IN_FLIGHT = 8
"""Calls of each of them that wait at once, when it sends all it can."""
FRAMES = 20_000
FLEETS = (100, 250, 500, 750, 1_000, 1_500)
SECONDS = 10
MERGED = 64
"""Replicas below one aggregator."""


def run(console: Console) -> None:
    """Print the tables."""
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=8,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    try:
        asyncio.run(_run(console))
    finally:
        ray.shutdown()


async def _run(console: Console) -> None:
    process: Any = ray.remote(num_cpus=0)(Senders)
    senders = [process.remote(seed) for seed in range(PROCESSES)]
    await asyncio.gather(*(sender.ready.remote() for sender in senders))
    table = Table(title=f"the real actor at K = {K}, {PROCESSES} sending processes, all they can")
    for column in ("frames a call", "calls/s", "frames/s", "estimator's CPU, us a frame"):
        table.add_column(column, justify="right")
    costs = {}
    for batch in (1, 4, 16, 64):
        async with Estimator() as estimator:
            calls = FRAMES // batch // PROCESSES // (8 if batch == 1 else 1)
            answers = await asyncio.gather(
                *(sender.flood.remote(batch, calls) for sender in senders)
            )
            cpu, wall = estimator.spent()
            frames = sum(answers)
        costs[batch] = cpu / frames
        table.add_row(
            f"{batch}",
            f"{frames / batch / wall:,.0f}",
            f"{frames / wall:,.0f}",
            f"{1e6 * cpu / frames:,.0f}",
        )
    console.print(table)

    table = Table(title=f"one call and one frame a second from each replica, for {SECONDS} s")
    for column in (
        "replicas",
        "frames/s answered",
        "of those asked",
        "median, ms",
        "99%, ms",
        "slowest, ms",
        "estimator's CPU",
    ):
        table.add_column(column, justify="right")
    for replicas in FLEETS:
        async with Estimator() as estimator:
            answers = await asyncio.gather(
                *(sender.pace.remote(replicas // PROCESSES, SECONDS) for sender in senders)
            )
            cpu, wall = estimator.spent()
        waits = 1e3 * np.concatenate(answers)
        asked = replicas // PROCESSES * PROCESSES * SECONDS
        table.add_row(
            f"{replicas:,}",
            f"{len(waits) / wall:,.0f}",
            f"{len(waits) / asked:.1%}",
            f"{np.median(waits):,.1f}",
            f"{np.quantile(waits, 0.99):,.1f}",
            f"{waits.max():,.0f}",
            f"{cpu / wall:.0%}",
        )
    console.print(table)

    # A tier: its aggregators take frames as the estimator does, and send one for all of them.
    async with Estimator() as estimator:
        calls = FRAMES // 8 // PROCESSES
        below = await asyncio.gather(*(s.flood.remote(1, calls, MERGED) for s in senders))
        cpu, _ = estimator.spent()
    merging = merge_seconds()
    above = cpu / sum(below)
    table = Table(title="what a tier of aggregators would save the estimator, in one run")
    for column in ("below it", "estimator's CPU, us a replica's frame", "against one by one"):
        table.add_column(column, justify="right")
    for name, cost in (
        ("replicas, one frame a call", costs[1]),
        (f"batches of {MERGED} frames, unmerged", costs[64]),
        (f"{MERGED} replicas' frames merged to one", above),
    ):
        table.add_row(name, f"{1e6 * cost:,.1f}", f"{costs[1] / cost:,.1f}x")
    console.print(table)
    console.print(
        f"An aggregator that merges spends {1e6 * merging:,.0f} us of its own node on each frame, "
        "beside receiving it. It would have to be trusted: the estimator no longer sees who sent "
        "what, so it can neither judge one replica, cap its weight, nor count its frames once.\n"
    )


class Estimator:
    """A new actor on a store of its own, and what it has spent since it served."""

    async def __aenter__(self) -> Estimator:
        self._folder = tempfile.TemporaryDirectory()
        config = ServiceConfig(store=f"sqlite:///{Path(self._folder.name) / 'store.db'}")
        self._link = EstimatorLink(config, timeout=60.0)
        while (status := await self._link.status())["state"] != "serving":
            await asyncio.sleep(0.05)
        self._pid = status["pid"]
        self._at, self._cpu = time.perf_counter(), cpu_seconds(self._pid)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._link.end()
        self._link.close()
        self._folder.cleanup()

    def spent(self) -> tuple[float, float]:
        """Seconds of CPU, and by the clock."""
        return cpu_seconds(self._pid) - self._cpu, time.perf_counter() - self._at


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Senders:
    """A process that sends for many replicas."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._templates = templates(seed)
        self._sources = 0

    async def ready(self) -> None:
        """Answer."""

    async def flood(self, batch: int, calls: int, merged: int = 1) -> int:
        """Frames answered: `calls` calls as fast as they are, each frame of `merged` replicas."""
        actor = find_or_create(ServiceConfig())
        frames = self._frames(50, merged)
        left = iter(range(calls))

        async def some() -> None:
            for _ in left:
                await send(actor, [next(frames) for _ in range(batch)])

        await asyncio.gather(*(some() for _ in range(IN_FLIGHT)))
        return calls * batch * merged

    async def pace(self, replicas: int, seconds: int) -> list[float]:
        """How long each answer took: one call a second from each replica, spread over it."""
        actor = find_or_create(ServiceConfig())
        frames = self._frames(replicas)
        start, waits = time.perf_counter(), list[float]()

        async def call(due: float, frame: bytes) -> None:
            await send(actor, [frame])
            waits.append(time.perf_counter() - due)  # a call that was made late has waited too

        async with asyncio.TaskGroup() as group:
            for i in range(replicas * seconds):
                due = start + i / replicas
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(call(due, next(frames)))
        return waits

    def _frames(self, replicas: int, merged: int = 1) -> Iterator[bytes]:
        self._sources += 1
        made = self._templates
        if merged > 1:
            made = [merge([made[(i + j) % len(made)] for j in range(merged)]) for i in range(8)]
        seq = 0
        while True:
            seq += 1
            for replica in range(replicas):
                name = f"{self._seed}-{self._sources}-{replica}"
                frame = made[(seq + replica) % len(made)]
                yield encode(structs.replace(frame, replica=name, seq=seq, oldest=max(1, seq - 64)))


async def send(actor: Any, frames: list[bytes]) -> None:
    """Send frames; each of them is to be merged."""
    for reply in await actor.exchange.remote(PAIR, frames):
        if (answer := decode(reply, Reply)).status != "merged":
            raise RuntimeError(f"{answer.status}: {answer.detail}")


def templates(seed: int) -> list[Frame]:
    """Frames to choose from."""
    rng = np.random.default_rng(seed)
    initial = CoefficientSet.initial(K)
    return [
        frame_of({"sampled": TRUTH.drafts(rng, DRAFTS)}, initial, pair=PAIR.id) for _ in range(32)
    ]


def merge(frames: Sequence[Frame]) -> Frame:
    """One frame for many that were graded under the same version."""
    statistics, sketch = Statistics.empty(K), Sketch.empty(K)
    for frame in frames:
        part = frame.strata["sampled"]
        statistics = statistics.merge(Statistics(decode_array(part.statistics).reshape(K, WIDTH)))
        sketch = sketch.merge(Sketch.unpack(K, part.sketch))
    first = frames[0]
    intercepts = first.strata["sampled"].intercepts
    whole = StratumRound(intercepts, encode_array(statistics.sums), sketch.pack())
    return structs.replace(
        first, strata={"sampled": whole}, steps=sum(frame.steps for frame in frames)
    )


def merge_seconds(repeats: int = 50) -> float:
    """CPU seconds that an aggregator spends on reading, merging and writing, for each frame."""
    data = [encode(frame) for frame in (templates(0) * 2)[:MERGED]]
    start = time.process_time()
    for _ in range(repeats):
        encode(merge([decode(frame, Frame) for frame in data]))
    return (time.process_time() - start) / repeats / len(data)


if __name__ == "__main__":
    run(Console(width=150))
