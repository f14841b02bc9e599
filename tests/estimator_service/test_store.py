"""The store: whole checkpoints, one writer, and nothing lost, on each database.

Run as a program it is the other process of the tests that need one: see `serve`.
"""

from __future__ import annotations

import logging
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from estimator_service import migrations, schema
from estimator_service.database import StoreBusyError, StoreError
from estimator_service.delivery import Source, Watermark
from estimator_service.messages import CoefficientSet, PairKey, Scores, Version
from estimator_service.messages import Source as Origin
from estimator_service.records import (
    Action,
    AuditRecord,
    Checkpoint,
    EvidenceRecord,
    Gathered,
    PairRecord,
    Stored,
    VersionRecord,
)
from estimator_service.store import ADVISORY_LOCK, FencedError, Store

ROOT = Path(__file__).parent.parent.parent
KILLS = 15

KEYS = [PairKey("org/Target", drafter, "eagle3", 2) for drafter in ("a", "b", "c")]
PAIR, OTHER = KEYS[0].id, KEYS[1].id

Urls = Callable[[], AbstractContextManager[str]]
Result = TypeVar("Result")


# Databases


POSTGRES = pytest.param("postgresql", marks=pytest.mark.postgres)


def urls_of(kind: str, request: pytest.FixtureRequest) -> Urls:
    """A maker of empty databases."""
    if kind == "memory":
        return lambda: nullcontext("sqlite://")
    if kind == "sqlite":
        folder: Path = request.getfixturevalue("tmp_path")
        serial = count()
        return lambda: nullcontext(f"sqlite:///{folder}/{next(serial)}/store.db")
    url: str = request.getfixturevalue("postgres_url")

    @contextmanager
    def emptied() -> Iterator[str]:
        with raw(url) as connection:  # quicker than another database
            connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
            connection.commit()
        yield url

    return emptied


@pytest.fixture(params=["sqlite", "memory", POSTGRES])
def urls(request: pytest.FixtureRequest) -> Urls:
    return urls_of(request.param, request)


@pytest.fixture(params=["sqlite", POSTGRES])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database that several processes can reach."""
    with urls_of(request.param, request)() as url:
        yield url


@pytest.fixture
def store(urls: Urls) -> Iterator[Store]:
    """In its first epoch."""
    with urls() as url, closing(Store.open(url)) as store:
        assert store.begin_epoch() == 1
        yield store


# Records


def pair(key: PairKey = KEYS[0], state: bytes = b"{}") -> PairRecord:
    return PairRecord(key, state)


def version(epoch: int, number: int, pair: str = PAIR) -> VersionRecord:
    coefficients = CoefficientSet(Version(epoch, number), Origin.FITTED, 0.5, (0.1, 1 / 3))
    return VersionRecord(pair, coefficients, at=float(number), reason="", scores=None)


def line(serial: int, pair: str = PAIR) -> AuditRecord:
    actor, at = "ann", float(serial)
    return AuditRecord(
        pair, at, actor, Action.FREEZE, "test", Version(), Version(), "{}", serial=serial
    )


def gathered(
    number: int = 1, *, strata: tuple[str, ...] = ("sampled", "greedy"), pair: str = PAIR
) -> Gathered:
    """Evidence and watermarks that say `number`, all of them."""
    cells = number.to_bytes(8, "little")
    return Gathered(
        evidence=tuple(EvidenceRecord(pair, stratum, cells, cells) for stratum in strata),
        pairs=(pair,),
        sources=tuple(Source(f"r{i}", 1, Watermark(number), float(number)) for i in range(5)),
        forgotten=(),
    )


def checkpoint(epoch: int, number: int = 1, **changes: Any) -> Checkpoint:
    whole = Checkpoint(
        epoch=epoch,
        pairs=(pair(),),
        versions=(version(epoch, number),),
        audit=(line(number),),
        gathered=gathered(number),
    )
    return msgspec.structs.replace(whole, **changes)


def everything(store: Store) -> tuple[Any, ...]:
    histories = [store.history(key.id, limit=10_000) for key in KEYS]
    return store.load(), histories, store.audit(limit=10_000)


class Held(tuple[VersionRecord, ...]):
    """Versions that are given only when told: they stop a `save` within its transaction."""

    def __init__(self, _: tuple[VersionRecord, ...]) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __iter__(self) -> Iterator[VersionRecord]:
        self.reached.set()
        assert self.go_on.wait(60)
        return super().__iter__()


@contextmanager
def held(store: Store, whole: Checkpoint) -> Iterator[Future[None]]:
    """A `save` that holds its transaction open inside this block; the block's end lets it go on."""
    versions = Held(whole.versions)
    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(store.save, msgspec.structs.replace(whole, versions=versions))
        try:
            assert versions.reached.wait(60)
            yield saving
        finally:
            versions.go_on.set()


@contextmanager
def raw(url: str) -> Iterator[sa.Connection]:
    """A connection that knows nothing of the store, in a transaction that can write."""
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection
    finally:
        engine.dispose()


def until(seen: Callable[[], Result], seconds: float = 60) -> Result:
    """Ask again and again until it is so."""
    deadline = time.monotonic() + seconds
    while not (result := seen()):
        assert time.monotonic() < deadline, "never came to pass"
        time.sleep(0.01)
    return result


# Round trip, against a model that is a handful of dictionaries


finite = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=8)
prose = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)  # NUL is in it
blobs = st.binary(max_size=100)
strata = st.sampled_from(["sampled", "greedy", "sampled:code", "A_1"])
sides = st.tuples(finite, finite)
lives = st.tuples(st.sampled_from(["r-0", "r-1", "Ωmega"]), st.sampled_from([1, 2**62]))
marks = st.builds(
    lambda through, beyond: Watermark(through, beyond << 1),
    st.integers(0, 2**62),
    st.integers(0, 2**64) | st.integers(0, 2**4095 - 1),
)
scores = st.builds(Scores, finite, *[st.none() | finite] * 6)
refs = st.builds(Version, st.integers(0, 2**40), st.integers(0, 2**40))


@st.composite
def checkpoints(draw: st.DrawFn, epoch: int, numbers: Iterator[int]) -> Checkpoint:
    keys = draw(st.lists(st.sampled_from(KEYS), unique=True))
    ids = st.sampled_from([key.id for key in keys])
    versions: list[VersionRecord] = []
    audit: list[AuditRecord] = []
    for _ in range(draw(st.integers(0, 3)) if keys else 0):
        coefficients = CoefficientSet(
            Version(epoch, next(numbers)),
            draw(st.sampled_from(Origin)),
            draw(finite),
            draw(sides),
            draw(st.dictionaries(strata, sides, max_size=2)),
        )
        at, why, worth = draw(finite), draw(prose), draw(st.none() | scores)
        versions.append(VersionRecord(draw(ids), coefficients, at, why, worth))
        entry = st.builds(
            AuditRecord,
            ids,
            finite,
            names,
            st.sampled_from(Action),
            prose,
            refs,
            refs,
            prose,
            st.just(next(numbers)),
        )
        audit.append(draw(entry))
    rows = st.builds(EvidenceRecord, ids, strata, blobs, blobs)
    sources = st.builds(
        lambda life, mark, at: Source(life[0], life[1], mark, at), lives, marks, finite
    )
    whole = st.builds(
        Gathered,
        st.lists(rows, max_size=4, unique_by=lambda x: (x.pair, x.stratum)).map(tuple)
        if keys
        else st.just(()),
        st.just(tuple(key.id for key in keys)),
        st.lists(sources, max_size=4, unique_by=lambda x: x.key).map(tuple),
        st.lists(lives, max_size=2).map(tuple),
    )
    pairs = tuple(PairRecord(key, draw(blobs)) for key in keys)
    return Checkpoint(epoch, pairs, tuple(versions), tuple(audit), draw(st.none() | whole))


class Model:
    """What the store should hold."""

    def __init__(self) -> None:
        self.pairs: dict[str, PairRecord] = {}
        self.evidence: dict[tuple[str, str], EvidenceRecord] = {}
        self.sources: dict[tuple[str, int], Source] = {}
        self.versions: list[VersionRecord] = []
        self.audit: list[AuditRecord] = []

    def save(self, whole: Checkpoint) -> None:
        self.pairs |= {record.key.id: record for record in whole.pairs}
        self.versions += whole.versions
        self.audit += whole.audit
        if (news := whole.gathered) is None:
            return
        kept = {key: x for key, x in self.evidence.items() if x.pair not in news.pairs}
        self.evidence = kept | {(x.pair, x.stratum): x for x in news.evidence}
        known = {key: x for key, x in self.sources.items() if key not in news.forgotten}
        self.sources = known | {x.key: x for x in news.sources}

    def history(self, pair: str) -> list[VersionRecord]:
        return [x for x in reversed(self.versions) if x.pair == pair]

    def load(self) -> Stored:
        newest = [self.history(pair)[:1] for pair in sorted(self.pairs)]
        return Stored(
            tuple(self.pairs[pair] for pair in sorted(self.pairs)),
            tuple(self.evidence[key] for key in sorted(self.evidence)),
            tuple(self.sources[key] for key in sorted(self.sources)),
            tuple(record for found in newest for record in found),
        )


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_is_saved_is_what_is_loaded(urls: Urls, data: st.DataObject) -> None:
    model, epoch, numbers = Model(), 0, count(1)
    with urls() as url, closing(Store.open(url)) as store:
        for _ in range(data.draw(st.integers(1, 4))):
            if not epoch or data.draw(st.booleans()):
                epoch += 1
                assert store.begin_epoch() == epoch
                numbers = count(1)
            whole = data.draw(checkpoints(epoch, numbers))
            for _ in range(data.draw(st.integers(1, 2))):  # once more: the commit was not heard of
                store.save(whole)
            model.save(whole)
            assert in_order(store.load()) == in_order(model.load())
            assert [x.record for x in store.audit()] == model.audit[::-1]
            for key in KEYS:
                assert store.history(key.id) == model.history(key.id)
        for record in model.versions:
            assert store.version(record.pair, record.coefficients.version) == record


def in_order(found: Stored) -> Stored:
    """Each database sorts text as it likes."""
    return Stored(
        found.pairs,
        found.evidence,
        tuple(sorted(found.sources, key=lambda x: x.key)),
        found.versions,
    )


def test_what_is_saved_survives_reopening(url: str) -> None:
    with closing(Store.open(url)) as store:
        store.save(checkpoint(store.begin_epoch()))
        before = everything(store)
    with closing(Store.open(url)) as store:
        assert everything(store) == before
        assert store.begin_epoch() == 2


def test_empty_store_loads_as_empty(store: Store) -> None:
    assert store.load() == Stored((), (), (), ())
    assert store.history(PAIR) == []
    assert store.version(PAIR, Version(1, 1)) is None
    assert store.audit() == []


# What a checkpoint replaces


def test_evidence_of_a_dropped_stratum_disappears_and_other_pairs_keep_theirs(store: Store) -> None:
    both = (pair(), pair(KEYS[1]))
    store.save(checkpoint(1, pairs=both, gathered=gathered(1, pair=OTHER)))
    store.save(checkpoint(1, gathered=gathered(1, strata=("greedy", "sampled"))))
    store.save(checkpoint(1, gathered=gathered(2, strata=("sampled", "sampled:code"))))
    found = {(x.pair, x.stratum): x.quadratic[0] for x in store.load().evidence}
    assert found == {
        (PAIR, "sampled"): 2,
        (PAIR, "sampled:code"): 2,
        (OTHER, "sampled"): 1,
        (OTHER, "greedy"): 1,
    }


def test_orders_alone_leave_evidence_and_watermarks_as_they_are(store: Store) -> None:
    store.save(checkpoint(1, 1))
    before = store.load()
    store.save(checkpoint(1, 2, gathered=None))
    after = store.load()
    assert (after.evidence, after.sources) == (before.evidence, before.sources)
    assert after.versions == (version(1, 2),)


def test_a_source_that_was_forgotten_and_came_back_is_kept(store: Store) -> None:
    store.save(checkpoint(1))
    news = msgspec.structs.replace(gathered(2), forgotten=(("r1", 1), ("r7", 1)))
    back, gone = news.sources[:2], news.sources[2:]
    store.save(
        checkpoint(
            1,
            gathered=msgspec.structs.replace(
                news, sources=back, forgotten=(*news.forgotten, *(x.key for x in gone))
            ),
        )
    )
    assert store.load().sources == back


def test_versions_beyond_the_newest_are_dropped(store: Store) -> None:
    store.save(checkpoint(1, pairs=(pair(), pair(KEYS[1])), versions=(version(1, 9, OTHER),)))
    for number in range(1, 8):
        store.save(checkpoint(1, number), keep_versions=3)
    store.begin_epoch()
    store.save(checkpoint(2, 1), keep_versions=3)
    kept = [str(x.coefficients.version) for x in store.history(PAIR)]
    assert kept == ["2.1", "1.7", "1.6"]
    newest = {x.pair: str(x.coefficients.version) for x in store.load().versions}
    assert newest == {PAIR: "2.1", OTHER: "1.9"}


# Reading in pages


def test_pages_of_the_history_are_the_history(store: Store) -> None:
    for epoch in (1, 2):
        versions = tuple(version(epoch, n, key.id) for n in range(1, 8) for key in KEYS[:2])
        store.save(checkpoint(epoch, versions=versions))
        store.begin_epoch()
    read: list[VersionRecord] = []
    last = None
    while page := store.history(PAIR, limit=4, before=last):
        assert len(page) <= 4
        read += page
        last = page[-1].coefficients.version
    assert read == [version(epoch, n) for epoch in (2, 1) for n in range(7, 0, -1)]


def test_the_audit_log_is_whole_in_order_and_its_pages_do_not_shift(store: Store) -> None:
    for number in range(1, 10):
        lines = tuple(line(2 * number + i, key.id) for i, key in enumerate(KEYS[:2]))
        store.save(checkpoint(1, number, audit=lines))
    store.begin_epoch()
    read, last = [], None
    while page := store.audit(limit=4, before=last):
        read += page
        last = page[-1].id
        # A line that is written while somebody pages through the log is on no older page.
        store.save(checkpoint(2, len(read), audit=(line(len(read)),)))
    assert [x.id for x in read] == [Version(1, serial) for serial in range(19, 1, -1)]
    of_other = [x.record for x in store.audit(OTHER, before=Version(1, 9))]
    assert of_other == [line(serial, OTHER) for serial in (7, 5, 3)]


# Whole or not at all


def test_a_checkpoint_that_fails_midway_leaves_nothing(store: Store) -> None:
    store.save(checkpoint(1, 1))
    before = everything(store)
    news = gathered(2)
    worse: Any = None
    last = msgspec.structs.replace(news.sources[-1], heard_at=worse)
    broken = msgspec.structs.replace(news, sources=(*news.sources[:-1], last))
    with pytest.raises(StoreError, match="heard_at"):
        store.save(checkpoint(1, 2, gathered=broken))
    assert everything(store) == before
    store.save(checkpoint(1, 2))
    assert everything(store) != before


def test_a_record_that_could_not_be_read_again_is_refused(store: Store) -> None:
    coefficients = msgspec.structs.replace(version(1, 1).coefficients, slope=float("nan"))
    unreadable = msgspec.structs.replace(version(1, 1), coefficients=coefficients)
    with pytest.raises(StoreError, match="slope"):
        store.save(checkpoint(1, versions=(unreadable,)))
    assert store.load() == Stored((), (), (), ())


def test_threads_may_share_a_store(store: Store) -> None:
    def work(first: int) -> None:
        for number in range(first, first + 5):
            store.save(checkpoint(1, number))
            assert version(1, number) in store.history(PAIR)
            store.load()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(10, 50, 10)))
    assert len(store.history(PAIR)) == len(store.audit()) == 20


def test_a_load_during_writes_is_of_one_moment(url: str) -> None:
    numbers = count(1)
    with closing(Store.open(url)) as writer, closing(Store.open(url)) as reader:
        epoch = writer.begin_epoch()

        def save_between_statements(*_: object) -> None:
            writer.save(checkpoint(epoch, next(numbers)))

        writer.save(checkpoint(epoch, next(numbers)))
        sa.event.listen(reader._reader, "after_cursor_execute", save_between_statements)
        assert len(numbers_in(reader.load())) == 1
    assert next(numbers) > 4


# Fencing


def test_an_old_epoch_changes_nothing(store: Store) -> None:
    store.save(checkpoint(1, 1))
    assert store.begin_epoch() == 2
    store.save(checkpoint(2, 1))
    before = everything(store)
    for stale in (1, 3):  # 3: the store was put back to an older backup
        with pytest.raises(FencedError, match="at epoch 2") as caught:
            store.save(checkpoint(stale, 2))
        assert (caught.value.epoch, caught.value.current) == (stale, 2)
        assert everything(store) == before


def test_a_fence_crosses_processes_whole() -> None:
    error = pickle.loads(pickle.dumps(FencedError(1, 2)))
    assert (error.epoch, error.current) == (1, 2)


def test_the_epoch_waits_for_a_writer_in_its_transaction(url: str) -> None:
    with closing(Store.open(url)) as old, closing(Store.open(url, busy_timeout=0.1)) as new:
        old.begin_epoch()
        with held(old, checkpoint(1)) as saving:
            with pytest.raises(StoreBusyError):
                new.begin_epoch()
            assert not saving.done()
        saving.result()
        assert new.begin_epoch() == 2
        assert new.load().versions == (version(1, 1),)
        with pytest.raises(FencedError):
            old.save(checkpoint(1, 2))


def test_a_writer_waits_for_the_epoch_and_is_then_fenced(url: str) -> None:
    with closing(Store.open(url)) as old, ThreadPoolExecutor(1) as thread:
        old.begin_epoch()
        with raw(url) as successor:
            successor.execute(sa.update(schema.epoch).values(epoch=2))
            saving = thread.submit(old.save, checkpoint(1))
            if successor.dialect.name == "postgresql":
                until(lambda: waiting(successor))
            successor.commit()
        with pytest.raises(FencedError):
            saving.result()
        assert old.load() == Stored((), (), (), ())


def waiting(connection: sa.Connection) -> int:
    """Sessions of this database that wait for a lock."""
    found: int = connection.exec_driver_sql(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    ).scalar_one()
    return found


@pytest.mark.postgres
def test_a_writer_that_stalls_cannot_keep_its_successor_out(postgres_url: str) -> None:
    with (
        closing(Store.open(postgres_url, busy_timeout=0.2)) as old,
        closing(Store.open(postgres_url)) as new,
    ):
        old.begin_epoch()
        with held(old, checkpoint(1)) as saving:
            assert new.begin_epoch() == 2
        with pytest.raises(StoreError):
            saving.result()
        assert new.load() == Stored((), (), (), ())
        with pytest.raises(FencedError):
            old.save(checkpoint(1))


def test_a_fenced_process_changes_nothing_from_the_moment_on(url: str) -> None:
    chance = random.Random(7)
    with closing(Store.open(url, busy_timeout=60)) as store, Other(url) as other:
        for _ in range(5):
            other.start("write")
            number = other.saved(chance.randint(1, 5))
            time.sleep(chance.uniform(0, 0.01))  # any moment will do
            epoch = store.begin_epoch()
            before = everything(store)
            *saved, last = other.rest()
            assert last == f"fenced {epoch - 1} {epoch}"
            assert everything(store) == before
            number += len(saved)
            assert store.load().versions[0].coefficients.version == Version(epoch - 1, number)
            store.save(checkpoint(epoch, number + 1))


# Locks and lost connections


def test_a_database_that_stays_locked_is_busy_and_then_works_again(url: str) -> None:
    with closing(Store.open(url, busy_timeout=0.1)) as store:
        epoch = store.begin_epoch()
        store.save(checkpoint(epoch, 1))
        before = everything(store)
        with raw(url) as stranger:
            stranger.execute(sa.select(schema.epoch).with_for_update())
            with pytest.raises(StoreBusyError):
                store.save(checkpoint(epoch, 2))
            with pytest.raises(StoreBusyError):
                store.begin_epoch()
            assert everything(store) == before  # readers do not wait
        store.save(checkpoint(epoch, 2))
        assert store.load().versions == (version(epoch, 2),)


def test_a_locked_database_cannot_be_made(url: str) -> None:
    with closing(Store.open(url)):
        pass
    with raw(url) as stranger:
        stranger.exec_driver_sql(f"DROP TABLE {migrations.VERSION_TABLE}")
        stranger.commit()
    with raw(url) as stranger:
        if stranger.dialect.name == "postgresql":
            stranger.execute(sa.select(sa.func.pg_advisory_xact_lock(ADVISORY_LOCK)))
        with pytest.raises(StoreBusyError):
            Store.open(url, busy_timeout=0.1)


@pytest.mark.postgres
def test_a_lost_connection_is_an_error_once_and_the_next_call_reconnects(postgres_url: str) -> None:
    def disconnect_all() -> None:
        with raw(postgres_url) as stranger:
            stranger.exec_driver_sql(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    with closing(Store.open(postgres_url)) as store:
        store.begin_epoch()
        with held(store, checkpoint(1)) as saving:
            disconnect_all()
        with pytest.raises(StoreError):
            saving.result()
        assert store.load() == Stored((), (), (), ())
        store.save(checkpoint(1))
        disconnect_all()  # while idle: not noticed at all
        assert store.load().versions == (version(1, 1),)


# Opening


def test_many_processes_may_open_an_empty_database_at_once(url: str) -> None:
    with Other(url) as other:
        other.start(*["open"] * 6)
        assert sorted(other.rest()) == [f"opened {epoch}" for epoch in range(1, 7)]


def test_opening_waits_for_one_who_is_making_the_same_database(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "store.db")) as first, ThreadPoolExecutor(1) as thread:
        first.execute("BEGIN IMMEDIATE")
        opening = thread.submit(Store.open, f"sqlite:///{tmp_path}/store.db", busy_timeout=60)
        with pytest.raises(TimeoutError):
            opening.result(timeout=0.2)
        first.commit()
        with closing(opening.result()) as store:
            assert store.begin_epoch() == 1


def test_a_newer_databases_tables_are_refused_and_left_alone(url: str) -> None:
    with closing(Store.open(url)) as store:
        store.save(checkpoint(store.begin_epoch()))
        before = everything(store)
        with raw(url) as stranger:
            stranger.exec_driver_sql(f"UPDATE {migrations.VERSION_TABLE} SET version_num = '9999'")
            stranger.commit()
        with pytest.raises(StoreError, match=r"revision 9999.*newer version of SpecFleet"):
            Store.open(url)
        assert everything(store) == before


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "cannot be parsed"),
        ("store.db", "cannot be parsed"),
        ("postgresql://host:port/database", "cannot be parsed"),
        ("mysql://root:secret@host/database", "`sqlite` or `postgresql`, got 'mysql'"),
        ("sqlite:////dev/null/store.db", "folder cannot be made"),
        ("sqlite:///{folder}", "unable to open"),
        ("sqlite:///{folder}/text", "not a database"),
        ("postgresql://me:secret@/database?host={folder}", "connection"),
    ],
)
def test_a_url_of_no_use_is_refused_without_telling_the_password(
    url: str, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("This is not a database. " * 100)
    with pytest.raises(StoreError, match=complaint) as caught:
        Store.open(url.format(folder=tmp_path))
    assert "secret" not in str(caught.value)


@pytest.mark.postgres
@pytest.mark.parametrize("scheme", ["postgres", "postgresql"])
def test_a_url_need_not_name_the_driver(postgres_url: str, scheme: str) -> None:
    url = postgres_url.replace("postgresql+psycopg", scheme)
    with closing(Store.open(url)) as store:
        assert store.begin_epoch() == 1


def test_sqlite_writes_ahead_and_synchronizes_every_commit(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    with closing(Store.open(url)) as store, store._writer.begin() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    with closing(sqlite3.connect(tmp_path / "store.db")) as plain:
        assert plain.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# Migrations


def test_migrations_lead_to_the_tables_and_back(urls: Urls) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with urls() as url, closing(Store.open(url)) as store, store._writer.begin() as connection:
        for _ in range(2):
            context = MigrationContext.configure(
                connection, opts={"version_table": migrations.VERSION_TABLE}
            )
            assert compare_metadata(context, schema.metadata) == []
            assert migrations.revision(connection) == migrations.HEAD
            migrations.migrate(connection, "base")
            assert sa.inspect(connection).get_table_names() == [migrations.VERSION_TABLE]
            migrations.migrate(connection)


def test_the_comparison_of_tables_can_fail() -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    other = sa.MetaData()
    for table in schema.metadata.tables.values():
        table.to_metadata(other)
    other.tables["specfleet_pairs"].append_column(sa.Column("more", sa.Text))
    other.tables["specfleet_audit"].indexes.clear()
    other.tables["specfleet_sources"].c.through.type = sa.Text()
    options = {"version_table": migrations.VERSION_TABLE}
    with closing(Store.open("sqlite://")) as store, store._writer.begin() as connection:
        found = compare_metadata(MigrationContext.configure(connection, opts=options), other)
    assert len(found) == 3


def test_the_newest_revision_is_the_one_that_is_named() -> None:
    revisions = sorted(Path(migrations.__file__).parent.glob("versions/[0-9]*.py"))
    assert revisions[-1].name.startswith(f"{migrations.HEAD}_")


def test_opening_says_nothing_and_leaves_logging_alone(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> list[object]:
        loggers = [logging.getLogger(x) for x in ("alembic", "alembic.runtime", "sqlalchemy")]
        return [
            (x.level, x.disabled, x.propagate, list(x.handlers)) for x in (logging.root, *loggers)
        ]

    before = state()
    monkeypatch.chdir(tmp_path)  # and no alembic.ini is needed
    with closing(Store.open("sqlite:///here/store.db")):
        pass
    assert state() == before
    assert capfd.readouterr() == ("", "")
    assert sorted(x.name for x in (tmp_path / "here").iterdir()) == ["store.db"]


# kill -9


@pytest.mark.slow
def test_evidence_and_watermarks_agree_after_every_kill(url: str) -> None:
    chance = random.Random(19)
    stored = 0
    with Other(url) as other:
        for turn in range(KILLS):
            writer = other.start("write")
            if turn % 4:  # else: while it opens the store, perhaps
                stored = other.saved(chance.randint(1, 10))
            time.sleep(chance.uniform(0, 0.03))  # any moment will do
            os.kill(writer, signal.SIGKILL)
            stored += len(other.rest())
            with closing(Store.open(url)) as store:
                found, log = store.load(), store.audit(limit=10_000)
            (number,) = numbers_in(found) or {0}
            # One more may be stored than was heard of, and no fewer.
            assert stored <= number <= stored + 1
            assert len(found.sources) == (5 if number else 0)
            assert [x.record.serial for x in log] == list(range(number, 0, -1))
            stored = number
    assert stored > KILLS


def numbers_in(found: Stored) -> set[int]:
    """What everything in a `checkpoint` says: one number, if it was stored as one."""
    numbers = {x.mark.through for x in found.sources}
    numbers |= {int.from_bytes(x.quadratic, "little") for x in found.evidence}
    return numbers | {x.coefficients.version.number for x in found.versions}


# The other process


class Other:
    """A process that forks on command, so that a test need not wait for imports each time."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> Other:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.estimator_service.test_store", self._url],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # end of input: it ends by itself
        assert self._process.returncode == 0

    def start(self, *deeds: str) -> int:
        """Fork a child for each deed; returns the last one's process id."""
        assert self._process.stdin is not None
        print(*deeds, file=self._process.stdin, flush=True)
        return int(self._line())

    def saved(self, times: int) -> int:
        """Wait until a child has saved so many checkpoints; returns the last one's number."""
        for _ in range(times):
            deed, number = self._line().split()
            assert deed == "saved"
        return int(number)

    def rest(self) -> list[str]:
        """What the children have said and say until all of them are gone."""
        return list(iter(self._line, "gone"))

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip()


def serve(url: str) -> None:
    """Fork for every deed of a line of input, say the last child's id, and when all are gone."""
    for deeds in sys.stdin:
        children = []
        for deed in deeds.split():
            children.append(os.fork())
            if not children[-1]:
                {"open": open_once, "write": write_until_fenced}[deed](url)
                os._exit(0)
        say(children[-1])
        for child in children:
            os.waitpid(child, 0)
        say("gone")


def open_once(url: str) -> None:
    store = Store.open(url, busy_timeout=60)
    say("opened", store.begin_epoch())


def write_until_fenced(url: str) -> None:
    """Save checkpoints that agree with themselves, each one more than the last that is stored."""
    store = Store.open(url)
    epoch = store.begin_epoch()
    found = store.load().sources
    for number in count(found[0].mark.through + 1 if found else 1):
        try:
            store.save(checkpoint(epoch, number))
        except FencedError as error:
            return say("fenced", error.epoch, error.current)
        say("saved", number)
        time.sleep(0.001)  # SQLite's lock goes to whoever asks at the right moment: let others


def say(*words: object) -> None:
    """In one write, so that lines of several processes do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


if __name__ == "__main__":
    serve(sys.argv[1])
