"""`specfleet up`: a fleet on this machine, or on the Ray that runs already."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from control_plane import local_ray
from control_plane.cli.steps import Say, Steps, no_chatter
from control_plane.config import FleetConfig
from control_plane.config_errors import ConfigError
from control_plane.config_file import read_config
from control_plane.engine_arguments import check_worker_settings
from control_plane.fleet_state import (
    HOST,
    FleetBusyError,
    FleetState,
    exclusively,
    read_state,
    write_state,
)
from control_plane.local_ray import LocalRay, LocalRayError
from control_plane.operator_client import OperatorApiError, OperatorClient

EXAMPLES = """
Example: specfleet up

Example: specfleet up fleet.yaml --json | jq -r .openai
"""

AUTO, LOCAL = "auto", "local"
POLL_SECONDS = 0.5
SPARE_CPUS = 6
"""Logical ones beside the replicas': ingress, and whoever else wants to run something there."""


class UpError(Exception):
    """The fleet did not come up; the text says why."""


@dataclass(frozen=True)
class Outcome:
    """A fleet that is up."""

    state: FleetState
    config: FleetConfig
    already: bool
    """It had been up before."""
    seconds: float


def up(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            show_default="the reference pair on two replicas",
            help="A .yaml file.",
        ),
    ] = None,
    ray: Annotated[
        str,
        typer.Option(
            metavar="auto|local|ADDRESS",
            help="Deploy to the Ray that runs, or else to one of its own; or to which.",
        ),
    ] = AUTO,
    timeout: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="How long replicas may take to start.")
    ] = 900.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Bring up a fleet: replicas, their estimator, the OpenAI API and the operator's API.

    If no Ray runs on this machine, one is started, which `specfleet down` ends. Run again, it \
    finds the fleet, or deploys it anew if CONFIG has changed. It listens on the loopback \
    interface only.

    CONFIG has [bold]models[/], each with [bold]name[/], [bold]target[/], [bold]drafter[/], and \
    perhaps [bold]method[/], [bold]num_speculative_tokens[/], [bold]replicas[/] or \
    [bold]autoscaling[/], [bold]device[/], [bold]engine[/], [bold]worker[/]; and perhaps \
    [bold]estimator[/], [bold]exchange[/], [bold]port[/].
    """
    messages = Console(stderr=True)
    try:
        fleet = read_config(config) if config else FleetConfig.of({})
        check_worker_settings(fleet)
        with exclusively(), no_chatter():
            outcome = _bring_up(fleet, ray, timeout, Steps(messages, quiet=quiet))
    except (ConfigError, FleetBusyError, LocalRayError, UpError) as error:
        _fail(messages, str(error))
    except KeyboardInterrupt:
        _fail(messages, "interrupted; specfleet up goes on with it, specfleet down ends it")
    if as_json:
        typer.echo(json.dumps(_document(outcome), indent=2))
    else:
        Console().print(_report(outcome))


def _bring_up(config: FleetConfig, where: str, timeout: float, steps: Steps) -> Outcome:
    began = time.monotonic()
    state = _living(read_state())
    plain = config.model_dump(mode="json")
    if state is not None:
        _check_same_place(state, config, where)
    with steps.step("Looking for Ray", "Ray is there") as say:
        state = state or _find_ray(config, where, say)
        # Written before anything else happens, so that `down` finds it whatever does.
        write_state(state)
    # Only now: importing Ray fixes how it is talked to.
    from control_plane import deployment

    already = False
    try:
        deployment.join(state)
        now = deployment.progress(config)
        already = state.config == plain and now.ready and _healthy(state.url)
        if state.config != plain or now.failed or not now.deployed:
            state = _deploy(state, config, plain, steps)
        if not already:
            with steps.step("Starting replicas", "The fleet is up") as say:
                _wait(config, state, time.monotonic() + timeout, say)
    except deployment.DeploymentError as error:
        raise UpError(str(error)) from error
    finally:
        deployment.disconnect()
    return Outcome(state, config, already, seconds=time.monotonic() - began)


def _living(state: FleetState | None) -> FleetState | None:
    """What is remembered, unless its Ray has ended meanwhile."""
    if state is None or state.ray is None or state.ray.alive:
        return state
    local_ray.stop(state.ray)
    return None


def _check_same_place(state: FleetState, config: FleetConfig, where: str) -> None:
    mine = LOCAL if state.ray else state.address
    if where not in (AUTO, mine, state.address):
        raise UpError(f"a fleet is up on Ray at {state.address}; end it with specfleet down first")
    if config.port != state.port:
        raise UpError(
            f"the fleet listens on port {state.port}, and Serve cannot change to {config.port} "
            "while it runs; end it with specfleet down first"
        )


def _find_ray(config: FleetConfig, where: str, say: Say) -> FleetState:
    address = where
    if where == AUTO:
        from control_plane.deployment import running_ray

        address = running_ray() or LOCAL
    started: LocalRay | None = None
    if address == LOCAL:
        _check_port(config.port)
        say("Starting Ray")
        started = local_ray.start(_logical_cpus(config))
        address = started.address
    return FleetState(
        ray=started, address=address, port=config.port, config=None, started_serve=bool(started)
    )


def _deploy(
    state: FleetState, config: FleetConfig, plain: dict[str, Any], steps: Steps
) -> FleetState:
    from control_plane import deployment

    if not state.started_serve and state.config is None and not deployment.serve_is_running():
        _check_port(config.port)
        state = FleetState(state.ray, state.address, state.port, None, started_serve=True)
        write_state(state)
    if state.config is not None and state.config["estimator"] != plain["estimator"]:
        with steps.step("Ending the estimator, whose settings have changed", "Estimator ended"):
            deployment.end_estimator()
    with steps.step("Loading vLLM, which may take half a minute", "Applications deployed"):
        deployment.deploy(config)
    state = FleetState(state.ray, state.address, state.port, plain, state.started_serve)
    write_state(state)
    return state


def _wait(config: FleetConfig, state: FleetState, deadline: float, say: Say) -> None:
    from control_plane import deployment

    while True:
        now = deployment.progress(config)
        if now.failed:
            raise UpError(f"it did not start: {now.failed}{_logs(state)}")
        if now.ready and _healthy(state.url):
            return
        if time.monotonic() > deadline:
            raise UpError(f"not up in time; specfleet up goes on waiting{_logs(state)}")
        counts = ", ".join(f"{m.name}: {m.running} of {m.wanted} up" for m in now.models)
        trouble = next((f"; trying again after {m.trouble}" for m in now.models if m.trouble), "")
        say(
            f"Waiting for the API{trouble}"
            if now.ready
            else f"Starting replicas, {counts}{trouble}"
        )
        time.sleep(POLL_SECONDS)


def _logs(state: FleetState) -> str:
    return f"; logs: {state.ray.logs}/serve" if state.ray else ""


def _healthy(url: str) -> bool:
    client = OperatorClient(url)
    try:
        client.health()
    except OperatorApiError:
        return False
    finally:
        client.close()
    return True


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UpError(
                f"port {port} is in use by another program ({error.strerror}); "
                "end it, or choose another with port in CONFIG"
            ) from error


def _logical_cpus(config: FleetConfig) -> int:
    """Ray starts nothing that it has no CPU for; a replica takes two, however few there are."""
    wanted = sum(2 * model.most for model in config.models) + SPARE_CPUS
    return max(wanted, os.cpu_count() or 1)


def _document(outcome: Outcome) -> dict[str, Any]:
    state = outcome.state
    return {
        "openai": f"{state.url}/v1",
        "operator": f"{state.url}/specfleet/v1",
        "docs": f"{state.url}/specfleet/docs",
        "openapi": f"{state.url}/specfleet/openapi.json",
        "models": [model.name for model in outcome.config.models],
        "store": outcome.config.estimator.store,
        "ray": state.address,
        "started_ray": state.ray is not None,
        "already_up": outcome.already,
        "seconds": round(outcome.seconds, 1),
    }


def _report(outcome: Outcome) -> Table:
    state = outcome.state
    models = ", ".join(model.name for model in outcome.config.models)
    title = "The fleet was up already" if outcome.already else "The fleet is up"
    table = Table.grid(padding=(0, 2))
    table.title = Text(f"{title}: {models}", "bold green")
    table.title_justify = "left"
    for name, value in (
        ("OpenAI API", f"{state.url}/v1"),
        ("Operator's API", f"{state.url}/specfleet/v1/pairs"),
        ("its description", f"{state.url}/specfleet/docs"),
        ("Watch it", "specfleet status --watch"),
        ("End it", "specfleet down"),
    ):
        table.add_row(name, Text(value, "cyan"))
    return table


def _fail(messages: Console, why: str) -> NoReturn:
    messages.print(Text(f"specfleet up: {why}", "bold red"), soft_wrap=True)
    raise typer.Exit(1)
