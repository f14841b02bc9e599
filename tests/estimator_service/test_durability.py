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
    decode_array,
    encode,
)
from estimator_service.pair_state import PairState
from estimator_service.sketch import ACCEPTED, BINS, COUNT
from estimator_service.statistics import WIDTH, N
from estimator_service.store import FencedError, Store
from tests.estimator_service import estimator_process
from tests.estimator_service.estimator_process import (
    CONFIG,
    FENCED,
    OPENING,
    SNAPSHOT,
    STEPS,
    Point,
)
from tests.estimator_service.fleet import PAIR, ManualClock, Truth, frame_of

TRUTH = Truth(0.6, (0.6, 0.4, 0.3, 0.2, 0.1, 0.0, -0.1))
STRATA = ("sampled", "greedy")
K = TRUTH.positions
KILLS = 30
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
def running(url: str) -> Iterator[Process]:
    """A process that nobody kills before the block's end."""
    process = Process(url)
    try:
        yield process
    finally:
        process.kill()
        process.end()


class Sender:
    """A replica over a network that duplicates, delays, reorders, and outlives estimators."""

    def __init__(
        self, name: str, chance: random.Random, published: dict[Version, CoefficientSet]
    ) -> None:
        self.name = name
        self.outbox = Outbox[Frame](capacity=1024)
        self.labels = np.zeros(K)
        self.accepted = np.zeros(K)
        self.steps = 0
        self.versions = [Version()]
        self._coefficients = CoefficientSet.initial(K)
        self._late: list[tuple[int, bytes]] = []
        self._published = published
        self._chance = chance
        self._rng = np.random.default_rng(chance.randrange(2**32))

    def observe(self) -> None:
        """Make a round, and hold it until it is stored."""
        strata = {}
        for stratum in self._chance.sample(STRATA, self._chance.randint(1, len(STRATA))):
            labels = TRUTH.drafts(self._rng, self._chance.randint(1, 8))
            position = labels.position.astype(np.intp)
            self.labels += np.bincount(position, minlength=K)
            self.accepted += np.bincount(position, labels.accepted, K)
            strata[stratum] = labels
        steps = self._chance.randint(0, 9)
        self.steps += steps
        self.outbox.put(frame_of(strata, self._coefficients, replica=self.name, steps=steps))

    def sign_of_life(self) -> None:
        """Make a frame that says nothing: its answer says what is stored."""
        self.outbox.put(frame_of({}, self._coefficients, replica=self.name))

    def deliver(self, process: Process, everything: bool = False) -> None:
        """Send what is due: in any order, some of it twice, some not now, and some again later."""
        due = self.outbox.due()
        self._chance.shuffle(due)
        for seq, frame in due:
            if not everything and self._chance.random() < 0.3:
                continue
            data = self._written(seq, frame)
            if self._chance.random() < 0.2:
                self._late.append((seq, data))
            for _ in range(2 if self._chance.random() < 0.2 else 1):
                self._send(process, seq, data)
        while self._late and (everything or self._chance.random() < 0.3):
            at = self._chance.randrange(len(self._late))
            self._send(process, *self._late[at])
            del self._late[at]

    def _written(self, seq: int, frame: Frame) -> bytes:
        now = {"oldest": self.outbox.oldest, "applied": self._coefficients.version}
        return encode(msgspec.structs.replace(frame, seq=seq, **now))

    def _send(self, process: Process, seq: int, data: bytes) -> None:
        reply = decode(process.ask(data), Reply)
        assert reply.status in (FrameStatus.MERGED, FrameStatus.DUPLICATE), reply
        self.outbox.answered(seq, reply.epoch, reply.durable_seq)
        # A late frame says what was in force when it was written.
        new = reply.coefficients
        if new is not None and new.version > self._coefficients.version:
            self._coefficients = new
            self.versions.append(new.version)
            # One version has one content, whoever published it and whatever became of it since.
            assert self._published.setdefault(new.version, new) == new


class Fleet:
    """Senders that go on whatever becomes of the estimator."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.chance = random.Random(seed)
        published: dict[Version, CoefficientSet] = {}
        self.senders = [Sender(f"r{i}", self.chance, published) for i in range(3)]
        self.epochs = [0]
        self.storing = False
        """Whether the process was storing when last heard of."""

    def work(self, process: Process, rounds: int) -> None:
        """Raises Died when the process does."""
        self.storing = False
        self.epochs.append(decode(process.ask(SNAPSHOT), Snapshot).epoch)
        for _ in range(rounds):
            for sender in self.senders:
                if self.chance.random() < 0.6:
                    sender.observe()
                    sender.deliver(process)
            while self.chance.random() < 0.3:
                self.store(process, between=self.chance.choice([0.0, 0.5]))

    def store(self, process: Process, between: float = 0.0) -> bool:
        """A checkpoint, with the chance that frames come between its steps; False if fenced."""
        self.storing = True
        for step in STEPS:
            if process.ask(step) == FENCED:
                return False
            for sender in self.senders:
                if self.chance.random() < between:
                    sender.observe()
                    sender.deliver(process)
        self.storing = False
        return True

    def settle(self) -> None:
        """Deliver all that is left to a process that nobody kills, then hold it to account."""
        with running(self.url) as process:
            for sender in self.senders:
                sender.observe()  # the answer tells of the new estimator, and what it lacks
                sender.deliver(process, everything=True)
                sender.deliver(process, everything=True)
                assert sender.outbox.due() == []
            assert self.store(process)
            for sender in self.senders:
                sender.sign_of_life()
                sender.deliver(process, everything=True)
                # What is stored is forgotten, and nothing was ever given up.
                assert (len(sender.outbox), sender.outbox.dropped) == (1, 0)
            snapshot = decode(process.ask(SNAPSHOT), Snapshot)
        self.epochs.append(snapshot.epoch)
        assert self.epochs == sorted(set(self.epochs))
        for sender in self.senders:
            assert sender.versions == sorted(set(sender.versions))
            assert sender.versions[-1] == snapshot.pairs[0].coefficients.version
        labels: Array = np.sum([sender.labels for sender in self.senders], axis=0)
        accepted: Array = np.sum([sender.accepted for sender in self.senders], axis=0)
        [pair] = snapshot.pairs
        assert (list(pair.labels), list(pair.accepted)) == (labels.tolist(), accepted.tolist())
        assert pair.counters["steps"] == sum(sender.steps for sender in self.senders)
        assert_held(self.url, labels, accepted)


def assert_held(url: str, labels: Array, accepted: Array) -> None:
    """The store holds these labels [K], and neither more nor less, in each place it holds them."""
    with closing(Store.open(url)) as store:
        stored = store.load()
    [pair] = stored.pairs
    tally = msgspec.json.decode(pair.state, type=PairState).tally
    assert (tally.labels, tally.accepted) == (labels.tolist(), accepted.tolist())
    quadratics = [decode_array(e.quadratic).reshape(K, WIDTH) for e in stored.evidence]
    assert np.sum([sums[:, N] for sums in quadratics], axis=0).tolist() == labels.tolist()
    cells = np.sum([decode_array(e.sketch).reshape(3, K, BINS) for e in stored.evidence], axis=0)
    assert cells[COUNT].sum(axis=1).tolist() == labels.tolist()
    assert cells[ACCEPTED].sum(axis=1).tolist() == accepted.tolist()


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("point", [point for point in Point if point not in OPENING])
def test_killed_at_any_point_every_observation_counts_once(
    url: str, point: Point, after: int
) -> None:
    fleet = Fleet(url, seed=after)
    process = Process(url, point, after)
    with pytest.raises(Died):
        fleet.work(process, 1000)
    assert process.end() == -9
    with running(url) as successor:
        fleet.work(successor, 3)
    fleet.settle()


@pytest.mark.parametrize("point", OPENING)
def test_killed_while_it_starts_every_observation_counts_once(url: str, point: Point) -> None:
    fleet = Fleet(url, seed=11)
    for _ in range(3):
        with running(url) as process:
            fleet.work(process, 3)
        process = Process(url, point)
        with pytest.raises(Died):
            fleet.work(process, 3)
        assert process.end() == -9
    fleet.settle()
    # An epoch that was committed was begun, even if nobody ever heard of it.
    assert fleet.epochs == [0, *([1, 3, 5, 7] if point is Point.OPENED else [1, 2, 3, 4])]


def test_killed_again_and_again_at_random_every_observation_counts_once(url: str) -> None:
    fleet = Fleet(url, seed=7)
    at_work = while_storing = 0
    for i in range(KILLS):
        process = Process(url)
        if i % 5 > 0:  # the others are killed at any moment of their start
            process.ask(SNAPSHOT)
        timer = threading.Timer(fleet.chance.uniform(0.0, 0.15), process.kill)
        timer.start()
        with pytest.raises(Died):
            fleet.work(process, 100_000)
        timer.join()
        assert process.end() == -9
        at_work += i % 5 > 0
        while_storing += fleet.storing
    fleet.settle()
    labels = sum(sender.labels.sum() for sender in fleet.senders)
    print(f"{KILLS} kills, {at_work} at work, {while_storing} in a checkpoint; {labels:.0f} labels")
    assert len(fleet.epochs) > at_work // 2


def test_two_estimators_alive_at_once_count_every_observation_once(url: str) -> None:
    fleet = Fleet(url, seed=5)
    with running(url) as old:
        fleet.work(old, 5)
        assert fleet.store(old)
        with running(url) as new:
            for _ in range(20):
                for sender in fleet.senders:
                    sender.observe()
                    sender.deliver(fleet.chance.choice([old, new]))
                # The old one learns, publishes and answers as ever, and stores nothing.
                assert not fleet.store(old)
                if fleet.chance.random() < 0.3:
                    assert fleet.store(new, between=0.3)
            assert decode(old.ask(SNAPSHOT), Snapshot).epoch == 1
        fleet.settle()
    assert fleet.epochs == [0, 1, 3]


def test_an_estimator_that_was_replaced_can_change_nothing(url: str) -> None:
    with closing(Store.open(url)) as first_store, closing(Store.open(url)) as second_store:
        clock = ManualClock()
        old = Estimator(first_store, CONFIG, clock)
        old.register(PAIR)
        outbox = Outbox[Frame]()
        rng = np.random.default_rng(3)
        sent, accepted = np.zeros(K), np.zeros(K)

        def send(estimator: Estimator, seq: int, frame: Frame) -> Reply:
            whole = msgspec.structs.replace(frame, seq=seq, oldest=outbox.oldest)
            reply = estimator.submit(whole)
            outbox.answered(seq, reply.epoch, reply.durable_seq)
            return reply

        def observe(count: int) -> list[tuple[int, Frame]]:
            made = []
            for _ in range(count):
                labels = TRUTH.drafts(rng, 20)
                position = labels.position.astype(np.intp)
                sent[:] += np.bincount(position, minlength=K)
                accepted[:] += np.bincount(position, labels.accepted, K)
                frame = frame_of({"sampled": labels}, CoefficientSet.initial(K))
                made.append((outbox.put(frame), frame))
            return made

        for seq, frame in observe(2):
            send(old, seq, frame)
        old.refit()
        old.checkpoint()
        new = Estimator(second_store, CONFIG, clock)
        assert new.epoch == old.epoch + 1
        # It lives on, answers, learns and is told orders; nothing of it reaches the store.
        for seq, frame in observe(2):
            reply = send(old, seq, frame)
            assert (reply.status, reply.epoch) == (FrameStatus.MERGED, old.epoch)
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
        assert [seq for seq, _ in outbox.due()] == [3, 4]
        for seq, frame in outbox.due():
            assert send(new, seq, frame).status is FrameStatus.MERGED
        new.refit()
        new.checkpoint()
        with pytest.raises(FencedError):
            old.checkpoint()
        assert list(new.snapshot().pairs[0].labels) == sent.tolist()
    assert_held(url, sent, accepted)


def test_replicas_return_from_what_was_published_and_never_stored(url: str) -> None:
    with closing(Store.open(url)) as store:
        rng, clock = np.random.default_rng(3), ManualClock()
        dying = Estimator(store, CONFIG, clock)
        dying.register(PAIR)
        adopted = CoefficientSet.initial(K)
        for seq in (1, 2):
            frame = frame_of({"sampled": TRUTH.drafts(rng, 500)}, adopted, seq=seq)
            dying.submit(frame)
            dying.refit()
            if seq == 1:
                dying.checkpoint()
                stored = dying.coefficients(PAIR.id)
            adopted = dying.coefficients(PAIR.id)
        assert adopted.version > stored.version
        successor = Estimator(store, CONFIG, clock)
        reply = successor.submit(frame_of({}, adopted, seq=3))
        assert reply.coefficients is not None
        assert reply.coefficients.version > adopted.version
        again = msgspec.structs.replace(reply.coefficients, version=stored.version)
        assert again == stored


def test_what_a_rollback_forgot_stays_forgotten_after_a_restart(url: str) -> None:
    with closing(Store.open(url)) as store:
        estimator = Estimator(store, CONFIG, ManualClock())
        estimator.register(PAIR)
        labels = TRUTH.drafts(np.random.default_rng(3), 500)
        estimator.submit(frame_of({"sampled": labels}, CoefficientSet.initial(K)))
        estimator.refit()
        estimator.checkpoint()
        estimator.rollback(PAIR.id, Version(), actor="ann", reason="a bad fit")
        estimator.checkpoint()
        again = Estimator(store, CONFIG, ManualClock())
        for held in (estimator, again):
            assert held.snapshot().pairs[0].scores.observations == 0.0
