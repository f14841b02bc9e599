"""`specfleet down`: end what `specfleet up` brought up, and nothing else."""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from control_plane import local_ray
from control_plane.cli.steps import Steps, no_chatter
from control_plane.fleet_state import (
    FleetBusyError,
    FleetState,
    exclusively,
    forget_state,
    read_state,
)

EXAMPLES = """
Example: specfleet down
"""


class DownError(Exception):
    """Something of the fleet may still be there; the text says why."""


def down(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """End the fleet that `specfleet up` brought up.

    Replicas report their last labels, the estimator stores everything and ends; then Ray, if `up` \
    had started it. What was learned stays in the store, and the next `up` begins with it.
    """
    messages = Console(stderr=True)
    try:
        with exclusively(), no_chatter():
            ended = _take_down(Steps(messages, quiet=quiet))
    except (FleetBusyError, DownError) as error:
        _fail(messages, str(error))
    if as_json:
        typer.echo(json.dumps(ended, indent=2))
    elif ended["was_up"]:
        stays = f"; what it learned stays in {ended['store']}" if ended["store"] else ""
        Console().print(Text(f"The fleet has ended{stays}", "green"), soft_wrap=True)
    else:
        Console().print("No fleet is up.")


def _take_down(steps: Steps) -> dict[str, Any]:
    state = read_state()
    if state is None:
        return {"was_up": False, "ended": [], "stopped_ray": False, "store": None}
    ended: list[str] = []
    if state.ray is None or state.ray.alive:
        with steps.step("Ending replicas and the estimator", "Replicas and estimator have ended"):
            ended = _remove(state, steps)
    if state.ray is not None:
        with steps.step("Ending Ray", "Ray has ended"):
            local_ray.stop(state.ray)
    forget_state()
    return {
        "was_up": True,
        "ended": ended,
        "stopped_ray": state.ray is not None,
        "store": _store(state),
    }


def _remove(state: FleetState, steps: Steps) -> list[str]:
    from control_plane import deployment

    try:
        deployment.join(state)
        return deployment.remove(stop_serve=state.started_serve)
    except Exception as error:
        # A Ray of our own ends all the same, and with it everything in it.
        if state.ray is None:
            raise DownError(f"{error}; what is deployed there was not ended") from error
        return []
    finally:
        deployment.disconnect()


def _store(state: FleetState) -> str | None:
    """Without a password that may be in the URL."""
    if state.config is None:
        return None
    url = str(state.config["estimator"]["store"])
    return url.removeprefix("sqlite:///") if url.startswith("sqlite") else url.rpartition("@")[2]


def _fail(messages: Console, why: str) -> NoReturn:
    messages.print(Text(f"specfleet down: {why}", "bold red"), soft_wrap=True)
    raise typer.Exit(1)
