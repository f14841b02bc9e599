"""The asyncio shell: it learns and stores by itself, and nothing of that delays a reply."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from estimator_service.config import EstimatorConfig
from estimator_service.estimator import MAX_LEAP, Estimator
from estimator_service.messages import (
    MAX_FRAME_BYTES,
    FrameStatus,
    PairKey,
    Refusal,
    Reply,
    Version,
    decode,
    encode,
)
from estimator_service.pair_state import PairState
from estimator_service.records import Checkpoint
from estimator_service.service import (
    LAST_RETRY,
    MAX_EXCHANGE_BYTES,
    MAX_FRAMES,
    EstimatorAway,
    EstimatorService,
    ExchangeRefused,
    ServiceConfig,
)
from estimator_service.store import Store
from tests.estimator_service.fleet import PAIR, ManualClock
from tests.estimator_service.sending import EXACT, Sender, assert_counted_once

NEVER = 1e6
"""Seconds that no test waits."""

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def config(path: Path, refit_seconds: float = 0.02, **settings: Any) -> ServiceConfig:
    return ServiceConfig(
        store=f"sqlite:///{path}",
        estimator=EXACT,
        refit_seconds=refit_seconds,
        store_timeout=0.1,
        **settings,
    )


async def until(true: Callable[[], bool]) -> None:
    """Let others go on until it is; the test's own limit ends it."""
    while not true():
        await asyncio.sleep(0.005)


async def quickly(_: float) -> None:
    """Instead of waiting for the next retry."""
    await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(service: EstimatorService) -> AsyncIterator[EstimatorService]:
    service.start()
    try:
        await until(lambda: service.status()["state"] == "serving")
        yield service
    finally:
        await service.stop()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process keeps everybody else from writing."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")


def exchange(service: EstimatorService, sender: Sender, drafts: int = 5) -> list[Reply]:
    sender.observe(drafts)
    frames = sender.due()
    data = service.exchange(PAIR, [encode(frame) for frame in frames])
    replies = [decode(reply, Reply) for reply in data]
    sender.hear(frames, replies)
    return replies


async def until_stored(service: EstimatorService, sender: Sender) -> None:
    """Exchange until all that it holds now is known to be stored."""
    last = sender.outbox.oldest + len(sender.outbox) - 1
    while sender.outbox.oldest <= last:
        exchange(service, sender, drafts=0)
        await asyncio.sleep(0.005)


def held(path: Path) -> list[float]:
    """Labels [K] in the store."""
    with closing(Store.open(f"sqlite:///{path}")) as store:
        [pair] = store.load().pairs
    return msgspec.json.decode(pair.state, type=PairState).tally.labels


def epoch_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        found: int = connection.execute("SELECT epoch FROM specfleet_epoch").fetchone()[0]
    return found


def begin_another(path: Path) -> int:
    """A newer estimator takes the store over; its epoch."""
    with closing(Store.open(f"sqlite:///{path}")) as store:
        return Estimator(store, EXACT).epoch


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


# Learning and storing


def test_it_learns_stores_and_says_so_by_itself(path: Path) -> None:
    async def test() -> None:
        sender = Sender("r0")
        async with serving(EstimatorService(config(path))) as service:
            [reply] = exchange(service, sender, drafts=200)
            assert (reply.status, reply.epoch) == (FrameStatus.MERGED, 1)
            await until_stored(service, sender)
            assert sender.versions[-1] > Version()
            assert held(path) == sender.labels.tolist()
            [pair] = service.snapshot().pairs
            assert_counted_once([sender], pair.labels)
            status = service.status()
            assert (status["epoch"], status["state"], status["reason"]) == (1, "serving", "")
            assert min(status["refits"], status["saves"]) > 0

    run(test())


def test_many_labels_bring_the_refit_forward(path: Path) -> None:
    async def test() -> None:
        sender = Sender("r0")
        service = EstimatorService(config(path, refit_seconds=NEVER, refit_labels=500))
        async with serving(service):
            while sender.labels.sum() < 500:
                assert service.status()["refits"] == 0
                exchange(service, sender)
            await until(lambda: service.status()["refits"] == 1)
            assert service.estimator.waiting == 0.0

    run(test())


def test_while_nothing_comes_it_refits_and_stores_once_a_minute(path: Path) -> None:
    async def test() -> None:
        clock = ManualClock()
        async with serving(EstimatorService(config(path), clock=clock)) as service:
            exchange(service, Sender("r0"))
            await until(lambda: service.status()["saves"] == 1)
            for _ in range(20):  # twenty cadences at least
                await asyncio.sleep(0.02)
            assert service.status()["refits"] == 1
            clock.advance(60.0)
            await until(lambda: service.status()["saves"] == 2)

    run(test())


def test_a_refit_that_fails_is_counted_and_the_next_one_is_made(path: Path) -> None:
    async def test() -> None:
        sender = Sender("r0")
        async with serving(EstimatorService(config(path))) as service:
            refit = service.estimator.refit

            def failing() -> Any:
                service.estimator.refit = refit  # type: ignore[method-assign]
                raise FloatingPointError

            service.estimator.refit = failing  # type: ignore[method-assign]
            exchange(service, sender)
            await until(lambda: service.status()["refit_failures"] == 1)
            await until_stored(service, sender)
            assert held(path) == sender.labels.tolist()

    run(test())


def test_what_came_last_is_stored_when_it_stops(path: Path) -> None:
    async def test() -> None:
        sender = Sender("r0")
        async with serving(EstimatorService(config(path, refit_seconds=NEVER))) as service:
            exchange(service, sender)
        assert held(path) == sender.labels.tolist()
        with pytest.raises(EstimatorAway, match="was stopped"):
            exchange(service, sender)
        assert service.status()["state"] == "stopped"

    run(test())


# The store


def test_a_locked_store_delays_no_reply(path: Path) -> None:
    async def test() -> None:
        sender = Sender("r0")
        service = EstimatorService(config(path), sleep=quickly)
        async with serving(service):
            exchange(service, sender)
            await until_stored(service, sender)
            with locked(path):
                failures = service.status()["save_failures"]
                exchange(service, sender)
                # One that was being stored when the lock was taken is done with then.
                await until(lambda: service.status()["save_failures"] > failures)
                before = service.status()
                while service.status()["save_failures"] < before["save_failures"] + 3:
                    [reply] = exchange(service, sender)
                    assert reply.status is FrameStatus.MERGED
                    await asyncio.sleep(0.005)
                stuck = reply.durable_seq
                now = service.status()
                assert now["refits"] > before["refits"]
                assert now["saves"] == before["saves"]
                assert now["seconds_behind"] > 0.0
            await until_stored(service, sender)
            assert sender.outbox.oldest > stuck + 1
            assert service.status()["epoch"] == 1
        assert held(path) == sender.labels.tolist()
        sender.assert_never_went_back()

    run(test())


def test_a_store_that_takes_its_time_delays_neither_replies_nor_refits(path: Path) -> None:
    release = threading.Event()

    class Slow(Store):
        def save(self, checkpoint: Checkpoint, *, keep_versions: int | None = None) -> None:
            release.wait()
            super().save(checkpoint, keep_versions=keep_versions)

    async def test() -> None:
        clock, sender = ManualClock(), Sender("r0")
        service = EstimatorService(
            config(path), clock=clock, open_store=lambda: Slow.open(f"sqlite:///{path}")
        )
        async with serving(service):
            while service.status()["refits"] < 5:
                [reply] = exchange(service, sender)
                assert reply.durable_seq == 0
                await asyncio.sleep(0.005)
            assert service.status()["saves"] == 0
            clock.advance(7.0)
            assert service.status()["seconds_behind"] == 7.0
            release.set()
            await until_stored(service, sender)
        assert service.status()["seconds_behind"] == 0.0
        assert held(path) == sender.labels.tolist()

    run(test())


def test_a_store_that_cannot_be_opened_is_tried_until_it_can(tmp_path: Path) -> None:
    async def test() -> None:
        folder, delays = tmp_path / "folder", list[float]()
        folder.write_text("a file, where a folder should be")

        async def sleep(seconds: float) -> None:
            delays.append(seconds)
            await asyncio.sleep(0.001)

        service = EstimatorService(config(folder / "store.db"), sleep=sleep)
        service.start()
        await until(lambda: len(delays) > 8)
        with pytest.raises(EstimatorAway, match=r"the store cannot be opened: .*folder"):
            exchange(service, Sender("r0"))
        status = service.status()
        assert (status["state"], status["epoch"]) == ("opening", 0)
        assert status["save_failures"] >= len(delays) - 1
        assert delays[:3] == [0.1, 0.2, 0.4]
        assert max(delays) == LAST_RETRY
        folder.unlink()
        await until(lambda: service.status()["state"] == "serving")
        [reply] = exchange(service, Sender("r0"))
        assert reply.epoch == 1
        await service.stop()

    run(test())


def test_a_store_that_is_locked_at_first_is_tried_until_it_is_free(path: Path) -> None:
    async def test() -> None:
        assert begin_another(path) == 1
        with locked(path):
            service = EstimatorService(config(path), sleep=quickly)
            service.start()
            await until(lambda: service.status()["save_failures"] > 1)
            with pytest.raises(EstimatorAway, match="locked"):
                service.snapshot()
        await until(lambda: service.status()["state"] == "serving")
        assert service.snapshot().epoch == 2
        await service.stop()

    run(test())


def test_an_order_can_be_acknowledged_once_it_is_stored(path: Path) -> None:
    async def test() -> None:
        service = EstimatorService(config(path, refit_seconds=NEVER), sleep=quickly)
        async with serving(service):
            exchange(service, Sender("r0"), drafts=0)
            with locked(path):
                service.estimator.freeze(PAIR.id, True, actor="ann", reason="to look at it")
                acknowledged = asyncio.create_task(service.stored())
                await until(lambda: service.status()["save_failures"] > 1)
                assert not acknowledged.done()
                assert service.status()["seconds_behind"] > 0.0
            await acknowledged
            with closing(Store.open(f"sqlite:///{path}")) as store:
                assert [entry.record.actor for entry in store.audit()] == ["ann"]

    run(test())


# The end of an incarnation


def test_once_a_newer_one_has_begun_it_answers_and_writes_nothing(path: Path) -> None:
    async def test() -> None:
        sender = Sender("r0")
        async with serving(EstimatorService(config(path))) as service:
            exchange(service, sender)
            await until_stored(service, sender)
            with closing(Store.open(f"sqlite:///{path}")) as store:
                newer = Estimator(store, EXACT)
                before = store.load()
                acknowledged = asyncio.create_task(service.stored())
                exchange(service, sender)
                await until(lambda: service.status()["fenced"])
                with pytest.raises(EstimatorAway, match="epoch 1 may not write"):
                    await acknowledged
                for _ in range(10):
                    with pytest.raises(EstimatorAway, match=r"fenced"):
                        exchange(service, sender)
                    with pytest.raises(EstimatorAway, match=r"fenced"):
                        service.snapshot()
                    with pytest.raises(EstimatorAway, match=r"fenced"):
                        await service.stored()
                await service.stop()
                assert (store.load(), epoch_of(path)) == (before, newer.epoch)

    run(test())


def test_a_lost_store_is_healed_by_those_who_have_heard_of_more(path: Path) -> None:
    async def test() -> None:
        senders = [Sender("r0", 0), Sender("r1", 1)]
        for _ in range(6):
            begin_another(path)
        async with serving(EstimatorService(config(path))) as service:
            for sender in senders:
                exchange(service, sender, drafts=300)
                await until_stored(service, sender)
        assert [sender.epochs for sender in senders] == [[0, 7], [0, 7]]
        for file in path.parent.iterdir():
            file.unlink()
        for sender in senders:  # what was in the store is lost; what was not is to be counted
            sender.labels[:] = 0.0
            sender.observe()
        async with serving(EstimatorService(config(path))) as service:
            assert service.status()["epoch"] == 1
            senders[0].fit_alone()
            for sender in senders:
                exchange(service, sender)
            await until(lambda: service.status()["epoch"] == 8)
            for sender in senders:
                exchange(service, sender, drafts=300)
                await until_stored(service, sender)
                assert sender.epochs == [0, 7, 8]
                assert sender.versions[-1].epoch == 8
            assert epoch_of(path) == 8
            assert_counted_once(senders, service.snapshot().pairs[0].labels)
        assert_counted_once(senders, tuple(held(path)))

    run(test())


@pytest.mark.parametrize("field", ["heard", "applied"])
@pytest.mark.parametrize("claim", [MAX_LEAP + 2, 2**62, 2**63 - 1, 2**64 - 1])
def test_an_absurd_claim_moves_no_epoch(path: Path, field: str, claim: int) -> None:
    async def test() -> None:
        sender = Sender("r0")
        async with serving(EstimatorService(config(path))) as service:
            sender.observe()
            [frame] = sender.due()
            value = Version(claim, 1) if field == "applied" else claim
            absurd = msgspec.structs.replace(frame, **{field: value})
            [data] = service.exchange(PAIR, [encode(absurd)])
            assert decode(data, Reply).status is FrameStatus.MERGED
            await until(lambda: service.status()["saves"] == 1)
            exchange(service, sender)
            await until_stored(service, sender)
            assert epoch_of(path) == 1

    run(test())


def test_one_that_was_replaced_does_not_take_the_store_back(path: Path) -> None:
    # Its senders have heard of its successor, as they would have if its store had been lost.
    async def test() -> None:
        sender = Sender("r0")
        async with serving(EstimatorService(config(path))) as service:
            begun = begin_another(path)
            sender.observe()
            [frame] = sender.due()
            service.exchange(PAIR, [encode(msgspec.structs.replace(frame, heard=begun))])
            await until(lambda: service.status()["fenced"])
            assert epoch_of(path) == begun

    run(test())


# What comes from outside


def test_what_is_above_the_limits_is_refused_whole(path: Path) -> None:
    async def test() -> None:
        sender = Sender("r0")
        async with serving(EstimatorService(config(path))) as service:
            sender.observe()
            [frame] = [encode(frame) for frame in sender.due()]
            big = b"\x00" * MAX_FRAME_BYTES
            for frames, message in (
                ([frame] * (MAX_FRAMES + 1), f"{MAX_FRAMES + 1} frames"),
                ([frame, *[big] * 16], f"{MAX_EXCHANGE_BYTES + len(frame)} bytes"),
                ([frame, "text"], "a frame is bytes"),
            ):
                with pytest.raises(ExchangeRefused, match=message):
                    service.exchange(PAIR, frames)  # type: ignore[arg-type]
            assert service.status()["frames"] == 0
            exchange(service, sender)
            await until_stored(service, sender)
            assert_counted_once([sender], service.snapshot().pairs[0].labels)

    run(test())


@pytest.mark.parametrize(
    "key",
    [
        PairKey("t", "d", "draft_model", 10**9),
        PairKey("t", "d", "draft_model", 0),
        PairKey("x" * 1000, "d", "draft_model", 7),
        PairKey(["t"], "d", "draft_model", 7),  # type: ignore[arg-type]
        {"target": "t"},
        None,
    ],
)
def test_a_key_that_is_none_is_refused(path: Path, key: PairKey) -> None:
    async def test() -> None:
        async with serving(EstimatorService(config(path))) as service:
            with pytest.raises(ExchangeRefused, match="the pair cannot be registered"):
                service.exchange(key, [])
            assert service.snapshot().pairs == ()

    run(test())


def test_more_pairs_than_allowed_are_refused(path: Path) -> None:
    async def test() -> None:
        few = ServiceConfig(store=f"sqlite:///{path}", estimator=EstimatorConfig(max_pairs=1))
        async with serving(EstimatorService(few)) as service:
            exchange(service, Sender("r0"))
            with pytest.raises(ExchangeRefused, match="the most allowed"):
                service.exchange(PairKey("t", "d", "draft_model", 7), [])
            exchange(service, Sender("r1"))

    run(test())


def test_garbage_hurts_nobody_else_in_the_same_exchange(path: Path) -> None:
    async def test() -> None:
        rng, sender = np.random.default_rng(0), Sender("r0")
        async with serving(EstimatorService(config(path))) as service:
            for _ in range(50):
                sender.observe()
                [frame] = sender.due()
                good = encode(frame)
                bad = [
                    rng.bytes(int(rng.integers(0, 500))),
                    good[: int(rng.integers(len(good)))],
                    b"\x00" * (MAX_FRAME_BYTES + 1),
                    encode(msgspec.structs.replace(frame, schema=99)),
                ]
                data = service.exchange(PAIR, [*bad[:2], good, *bad[2:]])
                replies = [decode(reply, Reply) for reply in data]
                sender.hear([frame], [replies.pop(2)])
                assert {reply.reason for reply in replies} == {
                    Refusal.MALFORMED,
                    Refusal.UNKNOWN_SCHEMA,
                }
            await until_stored(service, sender)
            assert_counted_once([sender], service.snapshot().pairs[0].labels)

    run(test())


def test_the_settings_name_the_key_that_is_unknown() -> None:
    with pytest.raises(ValueError, match="refit_second\n"):
        ServiceConfig.model_validate({"refit_second": 1.0})
