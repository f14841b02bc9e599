"""The real actor on a real Ray, killed, hung, moved and locked out; and the link to it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    find_or_create,
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
CLIENTS, PROCESSES, ROUNDS, WHOLE_ROUNDS = 32, 8, 100, 5
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


def process(kind: type, num_cpus: int = 0, **options: Any) -> Any:
    """An actor class; calling its `remote` starts a process."""
    return ray.remote(num_cpus=num_cpus, **options)(kind)


# Exactly one


class Clients:
    """A process with several links, as replicas have one each."""

    def __init__(self, links: int) -> None:
        self._links = links

    async def find(self, config: ServiceConfig) -> set[tuple[int, int]]:
        """What estimators the links find, all at once: process and epoch."""
        links = [EstimatorLink(config, timeout=30.0) for _ in range(self._links)]
        found = await asyncio.gather(*(serving(link) for link in links))
        for link in links:
            link.close()
        return {(status["pid"], status["epoch"]) for status in found}

    async def look_up(self, config: ServiceConfig) -> set[str]:
        """The same, without waiting for its process: Ray's ids of the actors."""
        with ThreadPoolExecutor(self._links) as threads:
            found = threads.map(find_or_create, [config] * self._links)
            return {actor._actor_id.hex() for actor in found}


@pytest.fixture(scope="module")
def clients(cluster: Cluster) -> Iterator[list[Any]]:
    found: list[Any] = [process(Clients).remote(CLIENTS // PROCESSES) for _ in range(PROCESSES)]
    yield found
    for client in found:
        ray.kill(client)


def test_clients_that_start_at_once_find_one_actor(
    clients: list[Any], config: ServiceConfig
) -> None:
    actors = set()
    for _ in range(ROUNDS):
        found = set().union(*ray.get([client.look_up.remote(config) for client in clients]))
        assert len(found) == 1
        actors |= found
        ray.kill(ray.get_actor(ESTIMATOR, namespace=NAMESPACE))
    assert len(actors) == ROUNDS


def test_clients_that_start_at_once_find_one_estimator(
    clients: list[Any], config: ServiceConfig
) -> None:
    async def test() -> None:
        link = EstimatorLink(config, timeout=30.0)
        for epoch in range(1, WHOLE_ROUNDS + 1):
            answers = await asyncio.gather(*(client.find.remote(config) for client in clients))
            [(_, found)] = set().union(*answers)
            # Whatever else had been begun on the store would have taken an epoch.
            assert (found, epoch_of(config)) == (epoch, epoch)
            assert await link.end()
        assert not await link.end()

    run(test())


# Killed, moved, hung, locked out


def test_killed_again_and_again_under_load_every_label_counts_once(
    cluster: Cluster, config: ServiceConfig
) -> None:
    chance = random.Random(7)
    senders = [Sender(f"r{i}", i) for i in range(4)]
    failed = 0

    async def send(sender: Sender, ending: asyncio.Event) -> None:
        """As a replica does, with a link of its own, only a hundred times as often."""
        nonlocal failed
        link = EstimatorLink(config, timeout=10.0)
        while not ending.is_set():
            try:
                await exchange(link, sender)
            except EstimatorAway:
                failed += 1
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.01)
        link.close()

    async def test() -> None:
        async with linked(config) as link:
            ending = asyncio.Event()
            sending = [asyncio.create_task(send(sender, ending)) for sender in senders]
            epochs, killed = [], set()
            for _ in range(KILLS):
                status = await serving(link)
                await asyncio.sleep(chance.uniform(0.0, 0.5))
                os.kill(status["pid"], signal.SIGKILL)
                epochs.append(status["epoch"])
                killed.add(status["pid"])
                while (await serving(link))["pid"] == status["pid"]:
                    await asyncio.sleep(0.02)
            ending.set()
            await asyncio.gather(*sending)
            snapshot = await settle(link, senders)
            assert epochs == sorted(set(epochs))
            assert len(killed) == KILLS
            assert_settled(config, senders, snapshot)
            # What one of them might still want to write comes too late.
            with closing(Store.open(config.store)) as store:
                for epoch in epochs:
                    with pytest.raises(FencedError):
                        store.save(Checkpoint(epoch, (), (), (), None))
            labels = sum(sender.labels.sum() for sender in senders)
            print(f"{KILLS} kills, {failed} calls failed, {labels:.0f} labels, each counted once")

    run(test())


@pytest.mark.parametrize("graceful", [True, False])
def test_when_its_node_is_removed_it_goes_on_elsewhere(
    cluster: Cluster, config: ServiceConfig, graceful: bool
) -> None:
    senders = [Sender("r0", 0), Sender("r1", 1)]

    async def test() -> None:
        node = cluster.add_node(num_cpus=1)
        link = EstimatorLink(config, timeout=10.0)
        while (await serving(link))["node"] != node.node_id:  # Ray chooses where it goes
            await link.end()
        for sender in senders:
            await exchange(link, sender, drafts=200)
        await settle(link, senders)
        for sender in senders:
            await exchange(link, sender, drafts=200)  # may be lost with the node
        before = await link.status()
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=graceful)
        # Without grace its process lives on for a moment, and answers.
        while (await serving(link))["node"] == before["node"]:
            with suppress(EstimatorAway):
                await exchange(link, senders[0])
        snapshot = await settle(link, senders)
        assert snapshot.epoch == (await link.status())["epoch"] == before["epoch"] + 1
        assert_settled(config, senders, snapshot)
        await link.end()

    run(test())


def test_it_outlives_the_placement_group_of_the_replica_that_made_it(
    cluster: Cluster, config: ServiceConfig
) -> None:
    group = placement_group([{"CPU": 1}])
    ray.get(group.ready())
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    replica: Any = process(Clients, num_cpus=1, scheduling_strategy=strategy).remote(1)
    [(pid, epoch)] = ray.get(replica.find.remote(config))
    remove_placement_group(group)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(replica.find.remote(config))

    async def test() -> None:
        async with linked(config) as link:
            status = await link.status()
            assert (status["pid"], status["epoch"]) == (pid, epoch)

    run(test())


def test_while_it_hangs_calls_end_in_time_and_do_not_pile_up(
    cluster: Cluster, config: ServiceConfig
) -> None:
    async def test() -> None:
        sender = Sender("r0")
        async with linked(config) as link:
            await exchange(link, sender)
            status = await link.status()
            hurried = EstimatorLink(config, timeout=HANG_SECONDS)
            os.kill(status["pid"], signal.SIGSTOP)
            try:
                async with Ticker() as ticker:
                    with pytest.raises(EstimatorAway, match="no answer within"):
                        await exchange(hurried, sender)
                assert ticker.ticks > 10
                calls = 3 * MAX_UNANSWERED
                hurried._timeout = 0.05
                for _ in range(calls):
                    with pytest.raises(EstimatorAway):
                        await hurried.exchange(PAIR, sender.due(1))
            finally:
                os.kill(status["pid"], signal.SIGCONT)
            snapshot = await settle(link, [sender])
            assert_settled(config, [sender], snapshot)
            after = await link.status()
            assert (after["pid"], after["epoch"]) == (status["pid"], status["epoch"])
            assert after["exchanges"] - status["exchanges"] < calls
            hurried.close()

    run(test())


def test_a_link_blocks_nothing_else_while_the_actor_is_made_or_away(
    cluster: Cluster, config: ServiceConfig
) -> None:
    async def test() -> None:
        link = EstimatorLink(config, timeout=10.0)
        async with Ticker() as made:
            status = await serving(link)
        os.kill(status["pid"], signal.SIGKILL)
        async with Ticker() as away:
            while (await serving(link))["pid"] == status["pid"]:
                await asyncio.sleep(0.01)
        # Each takes about a second, in which it would not have ticked more than once or twice.
        assert min(made.ticks, away.ticks) > 10
        await link.end()

    run(test())


def test_while_its_store_is_locked_it_answers_as_ever(
    cluster: Cluster, config: ServiceConfig
) -> None:
    async def test() -> None:
        sender = Sender("r0")
        async with linked(config) as link:
            await exchange(link, sender)
            await settle(link, [sender])
            path = config.store.removeprefix("sqlite:///")
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                before = await link.status()
                loop = asyncio.get_running_loop()
                end = loop.time() + LOCK_SECONDS
                stuck = set[int]()
                while loop.time() < end or len(stuck) < 3:
                    [*_, reply] = await exchange(link, sender)  # raises if it is away
                    stuck.add(reply.durable_seq)
                    failures = (await link.status())["save_failures"]
                    if failures == before["save_failures"]:
                        stuck.clear()  # what was being stored when the lock was taken
                        end = loop.time() + LOCK_SECONDS
                    elif len(stuck) == 1 and loop.time() >= end:
                        break
                    await asyncio.sleep(0.02)
                assert len(stuck) == 1
                status = await link.status()
                assert status["refits"] > before["refits"]
                assert status["seconds_behind"] > 0.0
                other.execute("ROLLBACK")
            snapshot = await settle(link, [sender])
            assert sender.outbox.oldest > max(stuck) + 1
            assert_settled(config, [sender], snapshot)
            assert (await link.status())["epoch"] == before["epoch"]

    run(test())


def test_one_that_was_fenced_does_not_come_back(cluster: Cluster, config: ServiceConfig) -> None:
    async def test() -> None:
        sender = Sender("r0")
        async with linked(config) as link:
            await exchange(link, sender)
            snapshot = await settle(link, [sender])
            with closing(Store.open(config.store)) as store:
                newer = Estimator(store, EXACT)
                assert newer.epoch == snapshot.epoch + 1
                before = store.load()
                pid = (await link.status())["pid"]
                while not (await link.status())["fenced"]:
                    with suppress(EstimatorAway):
                        await exchange(link, sender)
                    await asyncio.sleep(0.02)
                for _ in range(20):
                    with pytest.raises(EstimatorAway, match=r"^fenced: epoch"):
                        await exchange(link, sender)
                    with pytest.raises(EstimatorAway, match=r"^fenced: epoch"):
                        await link.snapshot()
                    await asyncio.sleep(0.02)
                status = await link.status()
                assert (status["pid"], status["state"]) == (pid, "fenced")
                assert (store.load(), epoch_of(config)) == (before, newer.epoch)
            # A person who ends it has the next one begin, with nothing lost.
            assert await link.end()
            await serving(link)
            snapshot = await settle(link, [sender])
            assert snapshot.epoch == newer.epoch + 1
            assert_settled(config, [sender], snapshot)

    run(test())


def test_one_whose_store_cannot_be_opened_says_why_and_serves_once_it_can(
    cluster: Cluster, tmp_path: Path, config: ServiceConfig
) -> None:
    async def test() -> None:
        folder = tmp_path / "folder"
        folder.write_text("a file, where a folder should be")
        elsewhere = config.model_copy(update={"store": f"sqlite:///{folder / 'store.db'}"})
        link = EstimatorLink(elsewhere)
        while not (status := await patiently(link.status))["save_failures"]:
            await asyncio.sleep(0.02)
        assert status["state"] == "opening"
        sender = Sender("r0")
        with pytest.raises(EstimatorAway, match=r"^the store cannot be opened: .*folder"):
            await exchange(link, sender)
        folder.unlink()
        assert (await serving(link))["pid"] == status["pid"]
        assert_settled(elsewhere, [sender], await settle(link, [sender]))
        await link.end()

    run(test())


def test_a_caller_out_of_bounds_is_told_and_harms_nobody(
    cluster: Cluster, config: ServiceConfig
) -> None:
    async def test() -> None:
        sender = Sender("r0")
        async with linked(config) as link:
            sender.observe()
            [frame] = [encode(frame) for frame in sender.due()]
            actor = ray.get_actor(ESTIMATOR, namespace=NAMESPACE)
            for call, error in (
                ((PAIR, [frame] * (MAX_FRAMES + 1)), "above 64"),
                ((PAIR, [b"\0" * MAX_FRAME_BYTES] * 17), "bytes in one exchange"),
                (({"no": "key"}, [frame]), "cannot be registered"),
                ((), "missing"),
            ):
                with pytest.raises(Exception, match=error):
                    await actor.exchange.remote(*call)
            garbage = await actor.exchange.remote(PAIR, [b"garbage", b"\0" * MAX_FRAME_BYTES])
            assert {decode(reply, Reply).reason for reply in garbage} == {"malformed"}
            with pytest.raises(EstimatorAway, match="65 frames in one exchange"):
                await link.exchange(PAIR, sender.due() * (MAX_FRAMES + 1))
            assert_settled(config, [sender], await settle(link, [sender]))

    run(test())


def test_without_a_cluster_there_is_no_estimator_and_none_is_started() -> None:
    script = """
import asyncio, ray
from estimator_service.actor import EstimatorLink
from estimator_service.service import EstimatorAway, ServiceConfig
try:
    asyncio.run(EstimatorLink(ServiceConfig()).status())
except EstimatorAway as away:
    print(away, ray.is_initialized())
"""
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert found.stdout == "this process is in no Ray cluster False\n"
