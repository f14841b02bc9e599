"""Frames per second through one estimator, and what a pair takes of memory, by fleet size."""

from __future__ import annotations

import gc
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import structs
from rich.console import Console
from rich.table import Table

from estimator_service.estimator import Estimator
from estimator_service.messages import CoefficientSet, Frame, PairKey, encode
from estimator_service.store import Store
from tests.estimator_service.fleet import ManualClock, Truth, frame_of

K = 16
PAIR = PairKey("org/target", "org/draft", "eagle3", K)
TRUTH = Truth(0.6, tuple(np.linspace(1.2, 0.4, K)))
FLEETS = (10, 100, 1_000, 10_000)
FRAMES_PER_REFIT = 5
"""One a second, refits every five."""
DRAFTS = 100
"""In a frame: about what 16 requests draft in a second."""
REPEATS = 3


def run(console: Console) -> None:
    """Print the table."""
    rng = np.random.default_rng(0)
    templates = [
        frame_of({"sampled": TRUTH.drafts(rng, DRAFTS)}, CoefficientSet.initial(K), pair=PAIR.id)
        for _ in range(32)
    ]
    size = np.mean([len(encode(t)) for t in templates])
    table = Table(title=f"frames at K = {K}, one stratum, {size:.0f} bytes, one process")
    for column in (
        "replicas",
        "frames/s, in memory",
        "frames/s, SQLite",
        "refit + fold, ms",
        "checkpoint, ms",
        "pair, MiB",
        "before a fold, MiB",
    ):
        table.add_column(column, justify="right")
    for replicas in FLEETS:
        frames = list(encoded(templates, replicas))
        memory = [once(frames, replicas, "sqlite://") for _ in range(REPEATS)]
        with tempfile.TemporaryDirectory() as folder:
            stored = [
                once(frames, replicas, f"sqlite:///{Path(folder) / f'{i}.db'}")
                for i in range(REPEATS)
            ]
        held, pending = footprint(frames, replicas)
        receive = [m.receive for m in memory]
        whole = [m.receive + m.refit + m.checkpoint for m in stored]
        table.add_row(
            f"{replicas:,}",
            spread([len(frames) / t for t in receive]),
            spread([len(frames) / t for t in whole]),
            f"{1e3 * min(m.refit / m.intervals for m in stored):,.1f}",
            f"{1e3 * min(m.checkpoint / m.intervals for m in stored):,.1f}",
            f"{held / 2**20:,.1f}",
            f"{pending / 2**20:,.1f}",
        )
    console.print(table)
    console.print(
        "in memory: decode, validate, dedupe and merge. SQLite: with a refit and a committed "
        f"checkpoint for every {FRAMES_PER_REFIT} frames of each replica.\n"
    )


def encoded(templates: list[Frame], replicas: int) -> Iterator[bytes]:
    """Frames of a fleet in the order of time, at least 20,000, in whole intervals."""
    per_interval = replicas * FRAMES_PER_REFIT
    intervals = -(-20_000 // per_interval)
    for i in range(intervals * per_interval):
        seq, replica = 1 + i // replicas, i % replicas
        yield encode(
            structs.replace(
                templates[i % len(templates)], replica=f"replica-{replica}", seq=seq, oldest=seq
            )
        )


class Timing:
    """Seconds spent in each part, over all intervals."""

    def __init__(self) -> None:
        self.receive = self.refit = self.checkpoint = 0.0
        self.intervals = 0


def once(frames: list[bytes], replicas: int, url: str) -> Timing:
    """One pass of all frames through a new estimator."""
    store, clock, timing = Store.open(url), ManualClock(), Timing()
    estimator = Estimator(store, clock=clock)
    estimator.register(PAIR)
    step = replicas * FRAMES_PER_REFIT
    gc.collect()
    for start in range(0, len(frames), step):
        t0 = time.perf_counter()
        for data in frames[start : start + step]:
            estimator.receive(data)
        clock.advance(FRAMES_PER_REFIT)
        t1 = time.perf_counter()
        estimator.refit()
        t2 = time.perf_counter()
        estimator.checkpoint()
        t3 = time.perf_counter()
        timing.receive += t1 - t0
        timing.refit += t2 - t1
        timing.checkpoint += t3 - t2
        timing.intervals += 1
    merged = estimator.snapshot().pairs[0].counters["frames_merged"]
    if merged != len(frames):
        raise RuntimeError(f"{merged:.0f} of {len(frames)} frames were merged")
    store.close()
    return timing


def footprint(frames: list[bytes], replicas: int) -> tuple[int, int]:
    """Bytes that one pair holds after a fold, and just before it."""
    store, clock = Store.open("sqlite://"), ManualClock()
    gc.collect()
    tracemalloc.start()
    estimator = Estimator(store, clock=clock)
    estimator.register(PAIR)
    for data in frames[: replicas * FRAMES_PER_REFIT]:
        estimator.receive(data)
    gc.collect()
    pending = tracemalloc.get_traced_memory()[0]
    estimator.refit()
    estimator.checkpoint()
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    store.close()
    return held, pending


def spread(values: list[float]) -> str:
    """Median, and the range of the repeats."""
    return f"{np.median(values):,.0f} ({min(values):,.0f}-{max(values):,.0f})"
