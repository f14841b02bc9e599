"""A real fleet, brought up by the command and shared by all tests of this directory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

WORKLOADS = ["code", "math", "prose", "chat", "structured"]


@dataclass(frozen=True)
class Fleet:
    """Two replicas of the reference pair, an estimator and the operator's API."""

    url: str
    environment: dict[str, str]
    directory: Path

    def command(self, *arguments: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        """`specfleet` with these arguments, in the fleet's environment."""
        return subprocess.run(
            [sys.executable, "-m", "control_plane.cli", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def json(self, *arguments: str, timeout: float = 300.0) -> Any:
        """What the command prints with `--json`; it must succeed."""
        done = self.command(*arguments, "--json", timeout=timeout)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    def python(self, code: str, timeout: float = 120.0) -> Any:
        """What a program that has joined the fleet's Ray prints last, as JSON.

        In a process of its own: Ray and Serve know one cluster in a process.
        """
        done = subprocess.run(
            [sys.executable, "-c", JOIN + code],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    def pair(self) -> dict[str, Any]:
        """The one pair's document."""
        answer = httpx.get(f"{self.url}/specfleet/v1/pairs", timeout=30.0)
        answer.raise_for_status()
        (pair,) = answer.json()["pairs"]
        found: dict[str, Any] = pair
        return found

    def replicas(self) -> list[dict[str, Any]]:
        """`specfleet_status` of every replica."""
        found: list[dict[str, Any]] = self.python(
            "print(json.dumps(Replicas.connect().call('specfleet_status')))"
        )
        return found

    def estimator(self) -> dict[str, Any]:
        """`status` of the estimator's actor."""
        found: dict[str, Any] = self.python(
            "import asyncio\n"
            "from estimator_service.actor import EstimatorLink\n"
            "from estimator_service.service import ServiceConfig\n"
            "print(json.dumps(asyncio.run(EstimatorLink(ServiceConfig()).status())))"
        )
        return found


JOIN = """
import json
from control_plane.deployment import join
from control_plane.fleet_state import read_state
from control_plane.replicas import Replicas
join(read_state())
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running_fleet(directory: Path) -> Iterator[Fleet]:
    """Two replicas that keep what they know in `directory`."""
    port = free_port()
    config = directory / "fleet.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "models": [
                    {
                        "name": "reference",
                        "target": "reference:target",
                        "drafter": "reference:draft",
                        "engine": {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16},
                        "worker": {"workloads": WORKLOADS, "record": 50_000},
                    }
                ],
                "port": port,
            }
        )
    )
    environment = {
        **os.environ,
        "XDG_STATE_HOME": str(directory),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    mine = Fleet(f"http://127.0.0.1:{port}", environment, directory)
    up = mine.command("up", str(config), "--ray", "local", "--quiet", timeout=600.0)
    try:
        assert up.returncode == 0, up.stderr[-3000:]
        yield mine
    finally:
        down = mine.command("down", "--quiet", timeout=120.0)
        assert down.returncode == 0, down.stderr[-3000:]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet")) as mine:
        yield mine
