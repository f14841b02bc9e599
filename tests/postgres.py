"""A PostgreSQL server of the tests' own, from Debian's package."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg


class MissingPostgresError(Exception):
    """There is no PostgreSQL server to start on this machine; the message says what is missing."""


class Server:
    """A running server, reached through a socket in its folder: no port, no password."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._serial = itertools.count(1)

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a new, empty database."""
        name = f"test_{next(self._serial)}"
        self.execute(f"CREATE DATABASE {name}")
        yield f"postgresql+psycopg://postgres@/{name}?host={self._folder}"
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, statement: str) -> None:
        """Run one statement as the superuser, outside a transaction."""
        with psycopg.connect(
            host=str(self._folder), user="postgres", dbname="postgres", autocommit=True
        ) as connection:
            connection.execute(statement.encode())


@contextmanager
def server() -> Iterator[Server]:
    """Start a server, and stop it at the end.

    Raises:
        MissingPostgresError: its programs are not here.
    """
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=_release)
    if not programs:
        raise MissingPostgresError("no /usr/lib/postgresql/*/bin/initdb: run .ci/debian-packages")
    initdb, postgres = programs[-1], programs[-1].with_name("postgres")
    folder = Path(tempfile.mkdtemp(prefix="specfleet-pg-"))
    try:
        # If this process is killed, the server shuts down too.
        run = ["setpriv", "--pdeathsig", "INT"]
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            user = _unprivileged()
            os.chown(folder, user.pw_uid, user.pw_gid)
            run += [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        data = folder / "data"
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C"]
        subprocess.run(
            [*run, initdb, "--no-sync", *options, "-D", data],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )
        listening = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*run, postgres, "-D", data, *listening], stdout=log, stderr=log, cwd="/"
            )
        try:
            running = Server(folder)
            _wait(running, process, folder / "log")
            yield running
        finally:
            process.send_signal(signal.SIGINT)  # disconnect everybody and stop
            process.wait(timeout=60)
    finally:
        shutil.rmtree(folder)


def _release(program: Path) -> float:
    return float(program.parts[-3])


def _unprivileged() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _wait(running: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return running.execute("SELECT 1")
        except psycopg.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text()}") from error
        time.sleep(0.05)
