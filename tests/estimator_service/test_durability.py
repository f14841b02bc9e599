"""Exactly once: every observation counts, and counts once, whatever is killed and whenever."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import pytest

from estimator_service.delivery import Outbox
from estimator_service.estimator import Estimator
from estimator_service.logistic import Array
from estimator_service.messages import (
    CoefficientSet,
    Frame,
    FrameStatus,
    Reply,
    Snapshot,
    Version,
    decode,
    encode,
)
from estimator_service.store import FencedError, Store
from tests.estimator_service import estimator_process
from tests.estimator_service.estimator_process import CONFIG, SNAPSHOT, STORE, Point
from tests.estimator_service.fleet import PAIR, ManualClock, Truth, frame_of

TRUTH = Truth(0.6, (0.6, 0.4, 0.3, 0.2, 0.1, 0.0, -0.1))
K = TRUTH.positions
# Forked from a process that has done nothing but import, so a restart takes no second.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.estimator_service.estimator_process"])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    found: str = request.getfixturevalue("postgres_url")
    return found


class Died(Exception):
    """The estimator's process is gone."""


class Process:
    """One incarnation of the estimator, as its clients see it."""

    def __init__(self, url: str, point: Point | None = None, after: int = 1) -> None:
        self._connection, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(
            target=estimator_process.serve, args=(theirs, url, point, after), daemon=True
        )
        self._process.start()
        theirs.close()

    def ask(self, data: bytes) -> bytes:
        """Raises Died if no answer came."""
        connection: Connection = self._connection
        try:
            connection.send_bytes(data)
            return connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise Died from error

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int | None:
        """Wait until it is gone; returns how it ended, negative for a signal."""
        self._connection.close()
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        return code


@contextmanager
def running(url: str, point: Point | None = None, after: int = 1) -> Iterator[Process]:
    process = Process(url, point, after)
    try:
        yield process
    finally:
        process.kill()
        process.end()


class Sender:
    """A replica over a network that duplicates, delays and reorders."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name = name
        self.outbox = Outbox[Frame](capacity=1024)
        self.sent = np.zeros(K)
        self.epochs: list[int] = []
        self.versions = [Version()]
        self._coefficients = CoefficientSet.initial(K)
        self._last: tuple[int, Frame] | None = None
        self._chance = chance
        self._rng = np.random.default_rng(chance.randrange(2**32))

    def observe(self) -> None:
        """Make a round, and hold it until it is stored."""
        labels = TRUTH.drafts(self._rng, self._chance.randint(1, 8))
        self.sent += np.bincount(labels.position.astype(int), minlength=K)
        frame = frame_of({"sampled": labels}, self._coefficients, replica=self.name)
        self._last = self.outbox.put(frame), frame

    def ask_what_is_stored(self, process: Process) -> None:
        """Send the last frame once more, for the sake of the reply."""
        if self._last:
            self.send(process, *self._last)

    def deliver(self, process: Process, everything: bool = False) -> None:
        """Send what is due: in any order, some of it twice, and some not now."""
        due = self.outbox.due()
        self._chance.shuffle(due)
        for seq, frame in due:
            if not everything and self._chance.random() < 0.3:
                continue
            for _ in range(2 if self._chance.random() < 0.2 else 1):
                self.send(process, seq, frame)

    def send(self, process: Process, seq: int, frame: Frame) -> None:
        data = encode(msgspec.structs.replace(
            frame, seq=seq, oldest=self.outbox.oldest, applied=self._coefficients.version
        ))  # fmt: skip
        reply = decode(process.ask(data), Reply)
        assert reply.status in (FrameStatus.MERGED, FrameStatus.DUPLICATE), reply
        self.outbox.answered(seq, reply.epoch, reply.durable_seq)
        self.epochs.append(reply.epoch)
        if reply.coefficients is not None:
            self._coefficients = reply.coefficients
            self.versions.append(reply.coefficients.version)


class Fleet:
    """Senders that go on whatever becomes of the estimator."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.chance = random.Random(seed)
        self.senders = [Sender(f"r{i}", self.chance) for i in range(3)]

    def work(self, process: Process, rounds: int) -> None:
        """Raises Died when the process does."""
        for _ in range(rounds):
            for sender in self.senders:
                sender.observe()
                sender.deliver(process)
            if self.chance.random() < 0.3:
                process.ask(STORE)

    def settle(self) -> Snapshot:
        """Deliver all that is left to a process that nobody kills, and look at the outcome."""
        with running(self.url) as process:
            for _ in range(20):
                if not any(len(sender.outbox) for sender in self.senders):
                    return decode(process.ask(SNAPSHOT), Snapshot)
                for sender in self.senders:
                    sender.deliver(process, everything=True)
                process.ask(STORE)
                for sender in self.senders:
                    sender.ask_what_is_stored(process)
        pytest.fail("what was sent is never said to be stored")

    def assert_counted_once(self, snapshot: Snapshot) -> None:
        sent: Array = np.sum([sender.sent for sender in self.senders], axis=0)
        pair = snapshot.pairs[0]
        assert list(pair.labels) == sent.tolist()
        np.testing.assert_allclose(pair.scores.observations, sent.sum(), rtol=1e-6)
        for sender in self.senders:
            assert sender.epochs == sorted(sender.epochs)
            assert sender.versions == sorted(set(sender.versions))


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("point", Point)
def test_killed_at_any_point_every_observation_counts_once(
    url: str, point: Point, after: int
) -> None:
    fleet = Fleet(url, seed=hash(point.value) % 1000 + after)
    process = Process(url, point, after)
    with pytest.raises(Died):
        fleet.work(process, 1000)
    assert process.end() == -9
    with running(url) as successor:
        fleet.work(successor, 3)
    fleet.assert_counted_once(fleet.settle())


def test_killed_again_and_again_at_random_every_observation_counts_once(url: str) -> None:
    fleet = Fleet(url, seed=7)
    kills = 20
    for _ in range(kills):
        process = Process(url)
        process.ask(SNAPSHOT)  # it is up
        timer = threading.Timer(fleet.chance.uniform(0.0, 0.15), process.kill)
        timer.start()
        with pytest.raises(Died):
            fleet.work(process, 100_000)
        timer.join()
        assert process.end() == -9
    snapshot = fleet.settle()
    labels = sum(snapshot.pairs[0].labels)
    print(f"\n{kills} kills, {labels:.0f} labels, epoch {snapshot.epoch}")
    assert snapshot.epoch == kills + 1
    fleet.assert_counted_once(snapshot)


def test_an_estimator_that_was_replaced_can_change_nothing(url: str) -> None:
    with closing(Store.open(url)) as first_store, closing(Store.open(url)) as second_store:
        clock = ManualClock()
        old = Estimator(first_store, CONFIG, clock)
        old.register(PAIR)
        outbox = Outbox[Frame]()
        rng = np.random.default_rng(3)
        labels = [TRUTH.drafts(rng, 20) for _ in range(6)]

        def send(estimator: Estimator, seq: int, frame: Frame) -> None:
            whole = msgspec.structs.replace(frame, seq=seq, oldest=outbox.oldest)
            reply = estimator.submit(whole)
            outbox.answered(seq, reply.epoch, reply.durable_seq)

        def observe(count: int) -> list[tuple[int, Frame]]:
            made = [frame_of({"s": labels.pop()}, CoefficientSet.initial(K)) for _ in range(count)]
            return [(outbox.put(frame), frame) for frame in made]

        for seq, frame in observe(2):
            send(old, seq, frame)
        old.refit()
        old.checkpoint()
        new = Estimator(second_store, CONFIG, clock)
        assert new.epoch == old.epoch + 1
        # It lives on, answers, learns and is told orders; nothing of it reaches the store.
        for seq, frame in observe(2):
            send(old, seq, frame)
        old.refit()
        old.freeze(PAIR.id, True, actor="ann", reason="to the wrong one")
        before = second_store.load()
        for _ in range(2):
            with pytest.raises(FencedError):
                old.checkpoint()
        assert second_store.load() == before
        assert second_store.audit() == []
        # Its sender meets the new one, and sends again what only the old one had counted.
        for seq, frame in observe(1):
            send(new, seq, frame)
        assert [seq for seq, _ in outbox.due()] == [3, 4]
        send(old, *outbox.due()[0])  # a late answer of the old one says nothing any more
        for seq, frame in outbox.due():
            send(new, seq, frame)
        new.refit()
        new.checkpoint()
        counted = sum(new.snapshot().pairs[0].labels)
        third = Estimator(second_store, CONFIG, clock)
        assert sum(third.snapshot().pairs[0].labels) == counted
        sent = 5 * 20  # drafts, each of which has a label at position 0
        assert new.snapshot().pairs[0].labels[0] == sent
