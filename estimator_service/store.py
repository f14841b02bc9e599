"""The estimator's memory in SQL: SQLite on a path, SQLite in memory, or PostgreSQL by URL.

A checkpoint is one transaction, and the evidence in it is stored together with the watermarks of
what is counted in it. So whatever kills the process, the next one finds both as of one moment.

*Fencing.* `specfleet_epoch` has one row. `begin_epoch` raises it, and from then on only that
incarnation may write: `save` reads the row first and keeps it locked until it has committed (on
SQLite by `BEGIN IMMEDIATE`, which admits one writer; on PostgreSQL by `FOR UPDATE`). An old writer
therefore either commits before the epoch moves, or is refused. One that stalls inside its
transaction is cut off by PostgreSQL after `busy_timeout`, or a second; on SQLite it has the lock
until it goes on or its process ends, and the others get `StoreBusyError`.

*Durability.* SQLite writes its log ahead (WAL) with `synchronous=FULL`: a commit is on the disk
before `save` returns. With `NORMAL` it would outlive a `kill -9` as well, but not a power loss, and
more than the last seconds would be gone: replicas have dropped what they were told is stored, and
an epoch that falls back makes the same version numbers again, for other coefficients. The price is
one fsync a checkpoint. On PostgreSQL this is `synchronous_commit`, on by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from msgspec import Struct
from sqlalchemy import (
    Connection,
    Engine,
    Executable,
    Table,
    bindparam,
    case,
    delete,
    func,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from estimator_service import migrations, schema
from estimator_service.database import StoreError, connect, transaction
from estimator_service.messages import PairKey, Version
from estimator_service.records import (
    AuditRecord,
    Checkpoint,
    EvidenceRecord,
    Gathered,
    PairRecord,
    Stored,
    VersionRecord,
)

ADVISORY_LOCK = 0x5EC_F1EE7
"""Held on PostgreSQL while the tables are made."""


class FencedError(Exception):
    """A newer incarnation of the estimator writes now. Nothing was changed; do not try again."""

    def __init__(self, epoch: int, current: int) -> None:
        super().__init__(epoch, current)  # these two, so that it can be pickled
        self.epoch = epoch
        """The one that wanted to write."""
        self.current = current
        """The one that may."""

    def __str__(self) -> str:
        return f"epoch {self.epoch} may not write: the store is at epoch {self.current}"


class AuditEntry(Struct, frozen=True):
    """A line of the audit log and its place in it."""

    id: Version
    """The epoch that wrote it, and its `serial`. Ordered by time, and never given twice."""
    record: AuditRecord


class Store:
    """What outlives the estimator's process. Made by `Store.open`; threads may share one."""

    def __init__(self, engine: Engine, read: str, write: str) -> None:
        self._reader = engine.execution_options(opening=read)
        self._writer = engine.execution_options(opening=write)
        self._insert: Callable[[Table], sqlite.Insert | postgresql.Insert] = (
            sqlite.insert if engine.dialect.name == "sqlite" else postgresql.insert
        )

    @classmethod
    def open(cls, url: str, *, busy_timeout: float = 5.0) -> Store:
        """Connect, and make or update the tables; any number of processes may do so at once.

        Args:
            url: `sqlite:///relative.db`, `sqlite:////absolute.db`, `sqlite://` (in memory), or
                `postgresql://user:password@host/database`.
            busy_timeout: seconds to wait for another process's lock.

        Raises:
            StoreError: the URL is of no use, or the tables are a newer SpecFleet's.
            StoreBusyError: locked for longer than the timeout.
        """
        store = cls(*connect(url, busy_timeout))
        try:
            store._migrate()
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close every connection."""
        self._writer.dispose()

    def begin_epoch(self, above: int = 0) -> int:
        """Start an incarnation: from now on no older one can write. The first epoch is 1.

        Call `load` after it, never before: what an older one stored in between would be lost.

        Args:
            above: an epoch that the new one must be newer than, whatever the store says.
        """
        current = schema.epoch.c.epoch
        least = case((current > above, current), else_=above)
        with transaction(self._writer) as connection:
            following = update(schema.epoch).values(epoch=least + 1)
            begun: int = connection.execute(following.returning(schema.epoch.c.epoch)).scalar_one()
        return begun

    def load(self) -> Stored:
        """What a new incarnation starts from, as of one moment."""
        pairs, versions = schema.pairs.c, schema.versions.c
        newest = (
            select(versions.record)
            .where(versions.pair == pairs.pair)
            .order_by(versions.epoch.desc(), versions.number.desc())
            .limit(1)
            .scalar_subquery()
        )
        with transaction(self._reader) as connection:
            found = connection.execute(
                select(pairs.key, pairs.state, newest).order_by(pairs.pair)
            ).all()
            evidence = connection.execute(
                select(schema.evidence).order_by(*schema.evidence.primary_key)
            )
            marks = connection.execute(select(schema.sources).order_by(*schema.sources.primary_key))
            return Stored(
                pairs=tuple(PairRecord(schema.from_json(x, PairKey), y) for x, y, _ in found),
                evidence=tuple(EvidenceRecord(*row) for row in evidence),
                sources=tuple(schema.source_of(row) for row in marks),
                versions=tuple(schema.from_json(x, VersionRecord) for *_, x in found if x),
            )

    def save(self, checkpoint: Checkpoint, *, keep_versions: int | None = None) -> None:
        """Store a checkpoint, whole or not at all. To store the same one again changes nothing.

        Args:
            checkpoint: its epoch is the one that `begin_epoch` gave.
            keep_versions: how many versions of a pair to keep when new ones come; None keeps all.

        Raises:
            FencedError: a newer epoch has begun.
        """
        with transaction(self._writer) as connection:
            current = connection.execute(select(schema.epoch.c.epoch).with_for_update())
            if (epoch := current.scalar_one()) != checkpoint.epoch:
                raise FencedError(checkpoint.epoch, epoch)
            self._upsert(connection, schema.pairs, map(schema.pair_cells, checkpoint.pairs))
            self._append(
                connection, schema.versions, map(schema.version_cells, checkpoint.versions)
            )
            lines = (schema.audit_cells(line, epoch) for line in checkpoint.audit)
            self._append(connection, schema.audit, lines)
            if keep_versions is not None:
                for pair in {version.pair for version in checkpoint.versions}:
                    _prune(connection, pair, keep_versions)
            if checkpoint.gathered is not None:
                self._gather(connection, checkpoint.gathered)

    def history(
        self, pair: str, *, limit: int = 100, before: Version | None = None
    ) -> list[VersionRecord]:
        """Versions of a pair, newest first; `before` is the last version of the previous page."""
        table = schema.versions.c
        place = table.epoch, table.number
        query = select(table.record).where(table.pair == pair).limit(limit)
        if before is not None:
            query = query.where(tuple_(*place) < (before.epoch, before.number))
        with transaction(self._reader) as connection:
            found = connection.scalars(query.order_by(*(x.desc() for x in place)))
            return [schema.from_json(record, VersionRecord) for record in found]

    def version(self, pair: str, version: Version) -> VersionRecord | None:
        """One version of a pair; None if there is none, or none any more."""
        if max(version.epoch, version.number) > schema.LARGEST_INTEGER:
            return None
        table = schema.versions.c
        query = select(table.record).where(
            table.pair == pair, table.epoch == version.epoch, table.number == version.number
        )
        with transaction(self._reader) as connection:
            record = connection.scalar(query)
            return None if record is None else schema.from_json(record, VersionRecord)

    def audit(
        self, pair: str | None = None, *, limit: int = 100, before: Version | None = None
    ) -> list[AuditEntry]:
        """The audit log, or a pair's, newest first; `before` is the previous page's last id."""
        table = schema.audit.c
        place = table.epoch, table.serial
        query = select(*place, table.record).limit(limit)
        if pair is not None:
            query = query.where(table.pair == pair)
        if before is not None:
            query = query.where(tuple_(*place) < (before.epoch, before.number))
        with transaction(self._reader) as connection:
            found = connection.execute(query.order_by(*(x.desc() for x in place)))
            return [
                AuditEntry(Version(epoch, serial), schema.from_json(record, AuditRecord))
                for epoch, serial, record in found
            ]

    def _migrate(self) -> None:
        try:
            with transaction(self._reader) as connection:
                if migrations.revision(connection) == migrations.HEAD:
                    return
            with transaction(self._writer) as connection:
                if connection.dialect.name == "postgresql":
                    connection.execute(select(func.pg_advisory_xact_lock(ADVISORY_LOCK)))
                migrations.migrate(connection)
        except migrations.UnknownRevisionError as error:
            raise StoreError(str(error)) from error

    def _gather(self, connection: Connection, gathered: Gathered) -> None:
        table = schema.evidence
        named = delete(table).where(table.c.pair == bindparam("of"))
        _execute(connection, named, ({"of": pair} for pair in gathered.pairs))
        self._upsert(connection, table, map(msgspec.structs.asdict, gathered.evidence))
        # Forgotten ones first: a source may have been forgotten and have come back since.
        table = schema.sources
        named = delete(table).where(
            table.c.replica == bindparam("of"), table.c.incarnation == bindparam("life")
        )
        _execute(connection, named, ({"of": x, "life": life} for x, life in gathered.forgotten))
        self._upsert(connection, table, map(schema.source_cells, gathered.sources))

    def _upsert(self, connection: Connection, table: Table, rows: Iterable[schema.Cells]) -> None:
        statement = self._insert(table)
        new = {x.name: statement.excluded[x.name] for x in table.columns if not x.primary_key}
        key = [x.name for x in table.primary_key]
        _execute(connection, statement.on_conflict_do_update(index_elements=key, set_=new), rows)

    def _append(self, connection: Connection, table: Table, rows: Iterable[schema.Cells]) -> None:
        _execute(connection, self._insert(table).on_conflict_do_nothing(), rows)


def _execute(connection: Connection, statement: Executable, rows: Iterable[schema.Cells]) -> None:
    """Once for each row; with no row, not at all."""
    if parameters := list(rows):
        connection.execute(statement, parameters)


def _prune(connection: Connection, pair: str, keep: int) -> None:
    table = schema.versions.c
    place = table.epoch, table.number
    last = select(*place).where(table.pair == pair).order_by(*(x.desc() for x in place))
    oldest = last.limit(1).offset(keep - 1).scalar_subquery()
    connection.execute(delete(schema.versions).where(table.pair == pair, tuple_(*place) < oldest))
