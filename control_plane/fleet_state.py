"""What `specfleet up` remembers for `down`, `status` and the next `up`."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from control_plane.config import state_directory
from control_plane.local_ray import LocalRay

HOST = "127.0.0.1"
DEFAULT_URL = f"http://{HOST}:8000"


class FleetBusyError(Exception):
    """Another command is changing the fleet."""


@dataclass(frozen=True)
class FleetState:
    """A fleet that `up` brought up, or began to."""

    ray: LocalRay | None
    """The Ray that was started for it; None if there was one already."""
    address: str
    """Of Ray."""
    port: int
    config: dict[str, Any] | None
    """`FleetConfig` in plain data, once it was handed to Serve."""
    started_serve: bool
    """Whether Ray Serve was started for it."""

    @property
    def url(self) -> str:
        """Of the HTTP server."""
        return f"http://{HOST}:{self.port}"


def read_state() -> FleetState | None:
    """The fleet that is remembered; None if none is, or nobody can read what is written there."""
    try:
        document = json.loads(_file().read_text())
        ray = document.pop("ray")
        return FleetState(ray=LocalRay(**ray) if ray else None, **document)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_state(state: FleetState) -> None:
    """Remember a fleet. The file may hold secrets of the configuration, so only its owner reads."""
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(json.dumps(asdict(state), indent=2))
    os.replace(new, file)


def forget_state() -> None:
    """Remember none."""
    _file().unlink(missing_ok=True)


@contextmanager
def exclusively() -> Iterator[None]:
    """Keep other commands from changing the fleet meanwhile. Raises FleetBusyError."""
    path = state_directory() / "fleet.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FleetBusyError(
                "another specfleet up or down is at work; wait for it, or end it"
            ) from None
        yield


def _file() -> Path:
    return state_directory() / "fleet.json"
