"""Connections to SQLite and PostgreSQL, their transactions, and their failures as ours."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

# A server that went away without a word must not hold a checkpoint for TCP's quarter of an hour.
NETWORK = {"connect_timeout": "10", "tcp_user_timeout": "20000", "keepalives_idle": "20"}


class StoreError(Exception):
    """The store cannot be used, or a call to it failed; a call that failed changed nothing.

    One exception: where the connection broke during a commit, nobody knows. Saving the same
    checkpoint again is right in either case.
    """


class StoreBusyError(StoreError):
    """Another process kept the database locked for longer than the timeout. Try again."""


def connect(url: str, busy_timeout: float) -> tuple[Engine, str, str]:
    """An engine, and the statements that open a reading and a writing transaction on it.

    Raises:
        StoreError: the URL is of no use.
        StoreBusyError: locked for longer than `busy_timeout` seconds.
    """
    try:
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError) as error:
        raise StoreError("the store's URL cannot be parsed") from error
    match parsed.get_backend_name():
        case "sqlite":
            return _sqlite(parsed, busy_timeout)
        case "postgresql" | "postgres":
            return _postgresql(parsed, busy_timeout)
        case other:
            raise StoreError(f"the store is `sqlite` or `postgresql`, got {other!r}")


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """Commit on leaving, roll back on an exception; those of the database become ours."""
    try:
        with engine.begin() as connection:
            yield connection
    except (SQLAlchemyError, sqlite3.Error, msgspec.MsgspecError) as error:
        raise _failure(error) from error


def _failure(error: Exception) -> StoreError:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig else error
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF  # the module's own errors have none
        busy = code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
    else:
        # Not available, deadlock, serialization failure.
        busy = getattr(cause, "sqlstate", None) in {"55P03", "40P01", "40001"}
    return (StoreBusyError if busy else StoreError)(f"the store failed: {cause}")


def _sqlite(url: URL, busy_timeout: float) -> tuple[Engine, str, str]:
    path = None if url.database in (None, "", ":memory:") else Path(str(url.database))
    # One connection is all there is of a database in memory. This pool lends it to one thread at a
    # time, which `StaticPool` would not.
    pool = {} if path else {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0}
    engine = create_engine(
        url.set(drivername="sqlite"),
        hide_parameters=True,  # an error would quote every blob
        connect_args={"timeout": busy_timeout, "check_same_thread": False},
        **pool,
    )
    if path is not None:
        _make_with_wal(path, busy_timeout)
        event.listen(engine, "connect", _synchronize_fully)
    event.listen(engine, "begin", _open_transaction)
    return engine, "BEGIN", "BEGIN IMMEDIATE"


def _make_with_wal(path: Path, busy_timeout: float) -> None:
    deadline = time.monotonic() + busy_timeout
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the store's folder cannot be made: {error}") from error
    while True:
        try:
            with closing(sqlite3.connect(path, timeout=busy_timeout)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")  # once for the file's life
                return
        except sqlite3.Error as error:
            failure = _failure(error)
            # SQLite does not wait for another process here, whatever the timeout.
            if not isinstance(failure, StoreBusyError) or time.monotonic() > deadline:
                raise failure from error
        time.sleep(0.01)


def _synchronize_fully(connection: DBAPIConnection, _record: object) -> None:
    connection.cursor().execute("PRAGMA synchronous = FULL")


def _postgresql(url: URL, busy_timeout: float) -> tuple[Engine, str, str]:
    try:
        engine = create_engine(
            url.set(drivername="postgresql+psycopg"),
            hide_parameters=True,
            pool_pre_ping=True,
            connect_args={x: value for x, value in NETWORK.items() if x not in url.query},
        )
    except ImportError as error:
        raise StoreError("PostgreSQL needs psycopg: pip install 'specfleet[postgres]'") from error
    event.listen(engine, "begin", _open_transaction)
    # Set for each transaction, not for the connection: so it also holds behind a pooler.
    wait = max(1, round(busy_timeout * 1000))  # 0 would be for ever
    stall = max(1000, wait)  # a process on a busy machine may well be silent for a moment
    return (
        engine,
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY",
        f"SET LOCAL lock_timeout = '{wait}ms'; "
        f"SET LOCAL idle_in_transaction_session_timeout = '{stall}ms'",
    )


def _open_transaction(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options()["opening"])
