"""The main job, end to end: real Ray, real Serve, real vLLM, real HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.conftest import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def wait_for(what: Callable[[], Any], seconds: float = 90.0) -> Any:
    """What it returns once that is true; the last answer if it never is."""
    deadline = time.monotonic() + seconds
    while True:
        found = what()
        if found or time.monotonic() > deadline:
            return found
        # Each look is a process that joins Ray, on cores that serve.
        time.sleep(3.0)


def settled(fleet: Fleet) -> tuple[float, float]:
    """Labels that the replicas graded, and labels that the estimator merged, once they agree."""

    def both() -> tuple[float, float] | None:
        graded = sum(replica["exchange"].get("labels", 0) for replica in fleet.replicas())
        merged = fleet.pair()["counters"]["labels"]
        last.append((graded, merged))
        return last[-1] if graded == merged else None

    last: list[tuple[float, float]] = []
    found: tuple[float, float] = wait_for(both, 30.0) or last[-1]
    return found


def run(fleet: Fleet, *arguments: str) -> Any:
    return fleet.json("run", "all", "--url", f"{fleet.url}/v1", *arguments)


def test_chat_and_completions_are_answered_whole_and_streamed(fleet: Fleet) -> None:
    client = OpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=60.0)
    question: dict[str, Any] = {"model": "reference", "max_tokens": 16, "temperature": 0.0}
    said: Any = {"messages": [{"role": "user", "content": "Hello"}]}
    whole = client.completions.create(prompt="def add(a, b):", **question)
    parts = client.completions.create(prompt="def add(a, b):", stream=True, **question)
    assert whole.choices[0].text == "".join(part.choices[0].text for part in parts)
    answer = client.chat.completions.create(**said, **question)
    deltas = client.chat.completions.create(**said, stream=True, **question)
    assert answer.choices[0].message.content == "".join(
        part.choices[0].delta.content or "" for part in deltas
    )


def test_labels_of_both_replicas_are_merged_once_and_learned_from(fleet: Fleet) -> None:
    cold = fleet.pair()
    report = run(fleet, "--requests", "100", "--max-tokens", "48")
    assert report["failures"] == {}, report
    figures = ("tokens_per_second", "latency", "time_to_first_token")
    print({name: report[name] for name in figures})
    graded, merged = settled(fleet)
    assert graded == merged > 1000
    pair = fleet.pair()
    assert pair["source"] == "fitted"
    assert numbers(pair["version"]) > numbers(cold["version"])
    assert {f"greedy:{w}" for w in ("code", "math", "structured")} <= pair["strata"].keys()
    assert {f"sampled:{w}" for w in ("prose", "chat")} <= pair["strata"].keys()
    replicas = pair["replicas"]
    assert len([r for r in replicas if not r["stale"]]) == 2
    assert all(r["labels"] > 0 for r in replicas)
    applied = wait_for(
        lambda: {r["applied"] for r in fleet.pair()["replicas"]} == {fleet.pair()["version"]}
    )
    assert applied


def test_an_estimator_that_is_killed_under_load_costs_no_request_and_no_label(
    fleet: Fleet,
) -> None:
    before = serving(fleet)
    command = ["run", "all", "--url", f"{fleet.url}/v1", "--requests", "120"]
    versions = [fleet.pair()["version"]]
    with subprocess.Popen(
        [sys.executable, "-m", "control_plane.cli", *command, "--max-tokens", "48", "--quiet"],
        env=fleet.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as load:
        for _ in range(2):
            time.sleep(3.0)
            os.kill(serving(fleet)["pid"], signal.SIGKILL)
            serving(fleet)
            versions.append(fleet.pair()["version"])
        output, _ = load.communicate(timeout=300.0)
    assert load.returncode == 0, output[-3000:]
    after = serving(fleet)
    assert after["epoch"] >= before["epoch"] + 2
    assert versions == sorted(versions, key=numbers)
    graded, merged = settled(fleet)
    assert graded == merged


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def serving(fleet: Fleet) -> dict[str, Any]:
    """The estimator's status, once it serves."""

    def status() -> dict[str, Any] | None:
        try:
            found = fleet.estimator()
        except AssertionError:
            return None
        return found if found["state"] == "serving" else None

    found: dict[str, Any] | None = wait_for(status)
    assert found is not None
    return found


def test_a_replica_that_is_killed_comes_back_with_the_fleets_coefficients(fleet: Fleet) -> None:
    first, second = fleet.replicas()
    names = {first["exchange"]["replica"], second["exchange"]["replica"]}
    os.kill(first["pid"], signal.SIGKILL)

    def replaced() -> list[dict[str, Any]]:
        try:
            found = fleet.replicas()
        except AssertionError:
            return []
        new = [r for r in found if r["exchange"]["replica"] not in names]
        return new if len(found) == 2 else []

    (new,) = wait_for(replaced, 240.0)
    assert new["exchange"]["applied"] == fleet.pair()["version"]
    (worker,) = new["workers"]
    # It has the fleet's fit, and has not drafted anything yet.
    assert worker["steps"] == 0
    assert worker["applied"][0] > 0


def test_up_finds_the_fleet_and_the_status_can_be_read(fleet: Fleet) -> None:
    again = fleet.json("up", str(fleet.directory / "fleet.yaml"), "--ray", "local")
    assert again["already_up"] is True
    table = fleet.command("status", "--url", fleet.url)
    assert table.returncode == 0
    assert fleet.pair()["id"] in table.stdout
