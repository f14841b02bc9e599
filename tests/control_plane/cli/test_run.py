"""`specfleet run` as its users see it, against a server that can be made to fail."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from control_plane.cli.run import run
from control_plane.load import settle
from tests.control_plane.load.broken_server import BrokenServer, broken_server

app = typer.Typer()
app.command()(run)
PAIR = {
    "key": {"target": "good"},
    "counters": {
        "steps": 10.0,
        "admitted": [8.0, 4.0],
        "observed": [8.0, 3.0],
        "accepted": [3.0, 1.0],
    },
}


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns, no colour, and counters that are not waited for: these do not move."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(settle, "QUIET", 0.0)


@pytest.fixture
def server() -> Iterator[BrokenServer]:
    with broken_server() as broken:
        yield broken


def specfleet_run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout, parse_constant=pytest.fail)
    return found


def test_all_workloads_are_sent_in_turn_at_the_set_concurrency(server: BrokenServer) -> None:
    result = specfleet_run("all", "--url", server.url, "-n", 20, "-c", 4, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    said = document(result)
    assert (said["model"], said["requests"], said["failed"]) == ("good", 20, 0)
    assert (said["output_tokens"], said["prompt_tokens"]) == (40, 60)
    assert said["tokens_per_second"] == pytest.approx(40 / said["seconds"])
    assert {name: part["requests"] for name, part in said["workloads"].items()} == dict.fromkeys(
        ("code", "math", "prose", "chat", "structured"), 4
    )
    for name in ("latency", "time_to_first_token", "time_per_output_token"):
        assert said[name]["p50"] <= said[name]["p90"] <= said[name]["p99"]
    assert server.most_under_way == 4
    sampled = {body["vllm_xargs"]["workload"]: body["temperature"] for body in server.bodies}
    assert sampled == {"code": 0.0, "math": 0.0, "structured": 0.0, "prose": 1.0, "chat": 1.0}


def test_options_reach_the_server(server: BrokenServer) -> None:
    options = ("--chat", "--no-stream", "--max-tokens", 5, "--temperature", 0.3, "--model", "m")
    result = specfleet_run("chat", "--url", server.url, "-n", 1, *options, "--json")
    assert result.exit_code == 0
    (sent,) = server.bodies
    assert (sent["model"], sent["max_tokens"], sent["temperature"]) == ("m", 5, 0.3)
    assert "stream" not in sent
    assert document(result)["time_to_first_token"] is None


def test_emitted_tokens_are_what_the_fleets_counters_grew_by(server: BrokenServer) -> None:
    server.pairs = [PAIR]
    still = document(specfleet_run("math", "--url", server.url, "-n", 1, "--json"))
    assert still["emitted_tokens_per_verified_draft"] is None
    assert still["fleet_unknown_because"] == "no draft was verified"

    def grow() -> None:
        counters: Any = PAIR["counters"]
        twice = {
            name: 2 * value if name == "steps" else [2 * x for x in value]
            for name, value in counters.items()
        }
        server.pairs = [{**PAIR, "counters": twice}]

    server.on_request = grow
    grown = document(specfleet_run("math", "--url", server.url, "-n", 1, "--json"))
    assert grown["emitted_tokens_per_verified_draft"] == 1.5
    assert grown["admitted_tokens_per_verified_draft"] == 1.5
    assert grown["output_tokens_per_engine_step"] == 0.2
    server.pairs = [PAIR]
    shown = specfleet_run("math", "--url", server.url, "-n", 1)
    assert "1.50 per verified draft of 1.50 tokens, over 8 drafts" in shown.stdout


def test_without_the_operators_api_emitted_tokens_are_not_available(server: BrokenServer) -> None:
    result = specfleet_run("math", "--url", server.url, "-n", 1)
    assert result.exit_code == 0
    assert "n/a: http" in result.stdout.replace("\n", "")
    assert "HTTP 503" in result.stdout


def test_the_report_fits_80_columns(server: BrokenServer) -> None:
    result = specfleet_run("all", "--url", server.url, "-n", 10)
    assert result.exit_code == 0
    assert "tokens/s" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("shape", [(), ("--json",)])
def test_failures_are_counted_by_reason_and_make_the_exit_code_1(
    server: BrokenServer, shape: tuple[str, ...]
) -> None:
    result = specfleet_run("code", "--url", server.url, "-n", 3, "--model", "error", *shape)
    assert result.exit_code == 1
    if shape:
        failure = {"requests": 3, "example": "the engine is dead"}
        assert document(result)["failures"] == {"HTTP 500": failure}
        assert document(result)["latency"] is None
    else:
        assert "HTTP 500" in result.stdout
        assert "the engine is dead" in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_server_that_does_not_answer_is_a_failure(server: BrokenServer) -> None:
    options = ("-n", 2, "--model", "hang", "--timeout", 0.3, "--json")
    result = specfleet_run("code", "--url", server.url, *options)
    assert result.exit_code == 1
    assert document(result)["failures"] == {
        "no answer within 0.3 s": {"requests": 2, "example": None}
    }


def test_nobody_there_is_one_line_and_no_traceback() -> None:
    with broken_server() as gone:
        url = gone.url
    result = specfleet_run("code", "--url", url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"specfleet run: {url}: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("verse",), 1, "is no workload"),
        (("code", "-n", 1, "--seconds", 1), 2, "exclude each other"),
        (("code", "--seconds", 0), 2, "above 0"),
        (("code", "--temperature", -1), 2, "from 0 on"),
        (("code", "--url", "localhost:8000"), 2, "does not begin with http"),
        ((), 2, "Missing argument"),
    ],
)
def test_wrong_usage_is_said(arguments: tuple[object, ...], code: int, why: str) -> None:
    result = specfleet_run(*arguments)
    assert result.exit_code == code
    assert why in " ".join(result.stderr.replace("│", " ").split())


def test_ctrl_c_reports_what_was_done(server: BrokenServer, tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("one\n")
    program = (
        "import typer; from control_plane.cli.run import run; "
        "app = typer.Typer(pretty_exceptions_enable=False); app.command()(run); app()"
    )
    options = ["--url", server.url, "--model", "hang", "--json", "-c", "3"]
    with subprocess.Popen(
        [sys.executable, "-c", program, str(prompts), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert server.arrived.wait(60.0)
        while server.under_way < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60.0)
    assert (process.returncode, err) == (130, "")
    said = json.loads(out)
    assert (said["interrupted"], said["cancelled"], said["requests"]) == (True, 3, 0)
