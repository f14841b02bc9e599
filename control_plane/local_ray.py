"""A Ray of our own on this machine, that outlives the command which started it.

`ray start --head --block` is one process whose end ends everything below it, so its id is all that
has to be remembered. Directory, ports and token are its own: it neither meets another Ray of this
machine nor lets anybody in who cannot read the token.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 120.0
STOP_SECONDS = 30.0
_POLL_SECONDS = 0.1
_LONGEST_DIRECTORY = 30
"""Ray makes sockets below it, whose paths may have 107 characters."""
_ADDRESS_FILE = "ray_current_cluster"
"""Written by `ray start` into its directory when it is ready."""


class LocalRayError(Exception):
    """Ray did not start; the text says why and where its log is."""


@dataclass(frozen=True)
class LocalRay:
    """A Ray that `start` started."""

    pid: int
    born: int
    """When, in clock ticks since the machine started: another process may get the same id."""
    directory: str
    """Its logs, sockets and token."""
    address: str

    @property
    def alive(self) -> bool:
        """Whether that very process is running."""
        return _born(self.pid) == self.born

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment, before it imports Ray, to be let in."""
        return _access(Path(self.directory))

    @property
    def logs(self) -> str:
        """The directory of its logs."""
        return f"{self.directory}/session_latest/logs"


def start(num_cpus: int, *, seconds: float = START_SECONDS) -> LocalRay:
    """Start a Ray with `num_cpus` logical CPUs, and wait until it can be used.

    Whatever interrupts the wait ends it again. Raises LocalRayError.
    """
    directory = _directory()
    log = directory / "ray-start.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(num_cpus, directory),
            env={**os.environ, **_environment(directory)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in this terminal is not meant for it
        )
    try:
        born = _born(process.pid)
        deadline = time.monotonic() + seconds
        while not (directory / _ADDRESS_FILE).exists():
            if born is None or process.poll() is not None:
                raise LocalRayError(f"Ray did not start: {_last_line(log)} (all of it: {log})")
            if time.monotonic() > deadline:
                raise LocalRayError(f"Ray was not ready within {seconds:g} s; see {log}")
            time.sleep(_POLL_SECONDS)
        address = (directory / _ADDRESS_FILE).read_text().strip()
        assert born is not None
        return LocalRay(process.pid, born, str(directory), address)
    except BaseException:
        process.kill()
        process.wait()
        raise


def stop(ray: LocalRay, *, seconds: float = STOP_SECONDS) -> None:
    """End it and everything that runs in it, and remove its directory. Does nothing if it is gone.

    First politely; after `seconds` not so.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not ray.alive:
            break
        os.kill(ray.pid, number)
        _wait_for_end(ray, seconds)
    shutil.rmtree(ray.directory, ignore_errors=True)


def _wait_for_end(ray: LocalRay, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while ray.alive and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _command(num_cpus: int, directory: Path) -> list[str]:
    options = {
        "--port": "0",
        "--temp-dir": str(directory),
        "--num-cpus": str(num_cpus),
        "--include-dashboard": "false",
        "--dashboard-agent-listen-port": "0",
        # Ray refuses 0 for this one.
        "--ray-client-server-port": str(_free_port()),
        "--min-worker-port": "0",
        "--max-worker-port": "0",
    }
    flags = ["--head", "--block", "--disable-usage-stats", "--no-monitor"]
    words = [word for option in options.items() for word in option]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *flags, *words]


def _environment(directory: Path) -> dict[str, str]:
    return {
        **_access(directory),
        # Or Ray hides the accelerators from whoever asks for no share of them.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Serve asks replicas how busy they are before it sends them a request, and by default waits
        # a tenth of a second for the answer. With fewer cores than processes that is too little,
        # and what it does then takes seconds.
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
        "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5",
        # There is no other node that could take over.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_ADDRESS": "",
    }


def _access(directory: Path) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(directory / "token")}


def _directory() -> Path:
    """A new one with a token in it, that only this user can enter."""
    usual = tempfile.gettempdir()
    parent = usual if len(usual) + len("/specfleet-12345678") <= _LONGEST_DIRECTORY else "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="specfleet-", dir=parent))
    (directory / "token").write_text(secrets.token_hex(32))
    return directory


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _born(pid: int) -> int | None:
    """When a process started; None if there is none, or only what is left of one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
