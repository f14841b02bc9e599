"""The real actor on a real Ray, killed, hung, moved and locked out; and the link to it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from estimator_service.actor import (
    ESTIMATOR,
    MAX_UNANSWERED,
    NAMESPACE,
    ActorStatus,
    EstimatorLink,
)
from estimator_service.estimator import Estimator
from estimator_service.messages import MAX_FRAME_BYTES, Reply, Snapshot, decode, encode
from estimator_service.pair_state import PairState
from estimator_service.records import Checkpoint
from estimator_service.service import MAX_FRAMES, EstimatorAway, ServiceConfig
from estimator_service.store import FencedError, Store
from tests.estimator_service.fleet import PAIR
from tests.estimator_service.sending import EXACT, Sender, assert_counted_once

ROOT = Path(__file__).parents[2]
CLIENTS, PROCESSES, ROUNDS = 32, 8, 100
KILLS = 20
# `make soak` asks for more patience.
HANG_SECONDS = float(os.environ.get("SPECFLEET_HANG_SECONDS", "1"))
LOCK_SECONDS = float(os.environ.get("SPECFLEET_LOCK_SECONDS", "2"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300 + 2 * (HANG_SECONDS + LOCK_SECONDS)),
    # Ray's own: the pipes and sockets of the processes that it starts here.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 16,
            "include_dashboard": False,
            # A node that is gone is known to be so after a second or two, not after half a minute.
            "_system_config": {"health_check_period_ms": 500, "health_check_failure_threshold": 3},
        },
    )
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def config(tmp_path: Path) -> ServiceConfig:
    return ServiceConfig(
        store=f"sqlite:///{tmp_path / 'store.db'}",
        estimator=EXACT,
        refit_seconds=0.1,
        store_timeout=0.5,
    )


@asynccontextmanager
async def linked(config: ServiceConfig, timeout: float = 10.0) -> AsyncIterator[EstimatorLink]:
    """A link to an estimator that serves; it ends with the block."""
    link = EstimatorLink(config, timeout=timeout)
    try:
        await serving(link)
        yield link
    finally:
        await link.end()


async def patiently(call: Callable[[], Awaitable[Any]]) -> Any:
    """Again, as long as the estimator is away; the test's own limit ends it."""
    while True:
        try:
            return await call()
        except EstimatorAway:
            await asyncio.sleep(0.05)


async def serving(link: EstimatorLink) -> ActorStatus:
    while True:
        status: ActorStatus = await patiently(link.status)
        if status["state"] == "serving":
            return status
        await asyncio.sleep(0.02)


async def exchange(link: EstimatorLink, sender: Sender, drafts: int = 5) -> list[Reply]:
    sender.observe(drafts)
    frames = sender.due()
    replies = await link.exchange(PAIR, frames)
    sender.hear(frames, replies)
    return replies


async def settle(link: EstimatorLink, senders: list[Sender]) -> Snapshot:
    """Exchange until all that they hold now is known to be stored."""
    for sender in senders:
        last = sender.outbox.oldest + len(sender.outbox) - 1
        while sender.outbox.oldest <= last:
            with suppress(EstimatorAway):
                await exchange(link, sender, drafts=0)
            await asyncio.sleep(0.02)
    snapshot: Snapshot = await patiently(link.snapshot)
    return snapshot


def assert_settled(config: ServiceConfig, senders: list[Sender], snapshot: Snapshot) -> None:
    """Every label is in the estimator and in its store, once, and nobody ever went back."""
    [pair] = snapshot.pairs
    assert_counted_once(senders, pair.labels)
    with closing(Store.open(config.store)) as store:
        [stored] = store.load().pairs
    tally = msgspec.json.decode(stored.state, type=PairState).tally
    assert_counted_once(senders, tuple(tally.labels))
    for sender in senders:
        sender.assert_never_went_back()
        assert sender.epochs[-1] == snapshot.epoch


def epoch_of(config: ServiceConfig) -> int:
    with closing(sqlite3.connect(config.store.removeprefix("sqlite:///"))) as connection:
        found: int = connection.execute("SELECT epoch FROM specfleet_epoch").fetchone()[0]
    return found


class Ticker:
    """Counts what else its event loop gets done, at most a hundred times a second."""

    ticks = 0

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.ticks += 1


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


# Exactly one


@ray.remote(num_cpus=0)
class Clients:
    """A process with several links, as replicas have one each."""

    def __init__(self, links: int) -> None:
        self._links = links

    async def find(self, config: ServiceConfig) -> list[tuple[int, int]]:
        """What estimator each of them finds, all at once: its process and its epoch."""
        links = [EstimatorLink(config, timeout=30.0) for _ in range(self._links)]
        found = await asyncio.gather(*(self._find(link) for link in links))
        for link in links:
            link.close()
        return found

    async def _find(self, link: EstimatorLink) -> tuple[int, int]:
        status = await serving(link)
        return status["pid"], status["epoch"]


def test_clients_that_start_at_once_find_one_estimator(
    cluster: Cluster, config: ServiceConfig
) -> None:
    clients = [Clients.remote(CLIENTS // PROCESSES) for _ in range(PROCESSES)]

    async def test() -> None:
        link = EstimatorLink(config, timeout=30.0)
        for epoch in range(1, ROUNDS + 1):
            answers = await asyncio.gather(*(client.find.remote(config) for client in clients))
            found = [one for answer in answers for one in answer]
            assert len(found) == CLIENTS
            # One process, and whatever else was ever begun on the store would have an epoch.
            assert len(set(found)) == 1
            assert (found[0][1], epoch_of(config)) == (epoch, epoch)
            assert await link.end()

    run(test())
    for client in clients:
        ray.kill(client)
