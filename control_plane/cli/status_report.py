"""What `specfleet status` prints for people, within 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

MAX_STRATA = 24
"""Strata that are listed, those with the most labels first."""


def report(fleet: dict[str, Any]) -> RenderableType:
    """Every pair of the document of `GET /v1/pairs`."""
    parts: list[RenderableType] = []
    for pair in fleet["pairs"]:
        parts += ["", *_pair(pair)]
    if not fleet["pairs"]:
        parts.append("No replica has reported yet.")
    if fleet["unattributed"]:
        refused = ", ".join(f"{n:,.0f} {why}" for why, n in fleet["unattributed"].items())
        parts += ["", Text(f"Refused before it was known what they are of: {refused}", "yellow")]
    return Group(*parts)


def _pair(pair: dict[str, Any]) -> Iterator[RenderableType]:
    yield _heading(pair)
    yield ""
    yield _positions(pair)
    if pair["strata"]:
        yield ""
        yield _strata(pair)
    yield ""
    yield _replicas(pair)


def _heading(pair: dict[str, Any]) -> Text:
    key, scores = pair["key"], pair["calibration"]
    text = Text.assemble((pair["id"], "bold"), "\n")
    text.append(
        f"{key['target']} with {key['drafter']}, {key['method']}, "
        f"K = {key['num_speculative_tokens']}, {key['draft_sample_method']}\n"
    )
    text.append("P(accepted) = sigmoid(")
    text.append(f"{pair['slope']:.4f}", "bold cyan")
    text.append(" feature + intercept)   version ")
    text.append(pair["version"], "bold cyan")
    text.append(f", {pair['source']}\n")
    text.append(f"{scores['observations']:,.0f} labels held, ECE ")
    text.append(_number(scores["ece"]), "bold")
    text.append(
        f", log-loss {_number(scores['log_loss'])}; {pair['counters']['labels']:,.0f} merged"
    )
    for note in _notes(pair):
        text.append(f"\n{note}", "yellow")
    return text


def _notes(pair: dict[str, Any]) -> Iterator[str]:
    """What is not as usual."""
    policy, override = pair["policy"], pair["override"]
    if policy["policy"] != "adaptive":
        length = "" if policy["length"] is None else f" {policy['length']}"
        yield f"Policy: {policy['policy']}{length}"
    if pair["frozen"]:
        yield "Frozen: nothing is refitted"
    if override:
        yield f"Override by {override['actor']}: {override['reason']}"
    if pair["drifting"]:
        yield "Drifting: the traffic has changed, old labels are being dropped"
    if pair["exploring"]:
        yield f"Exploring: {len(pair['exploring'])} replicas verify some drafts whole"
    if pair["last_fit"] and pair["last_fit"]["outcome"] in ("refused", "singular"):
        yield f"The last fit failed ({pair['last_fit']['outcome']}); the coefficients stay"
    for reason, count in pair["counters"]["skipped"].items():
        yield f"{count:,.0f} requests not observed: {reason}"


def _positions(pair: dict[str, Any]) -> Table:
    counters = pair["counters"]
    columns = ("position", "intercept", "admitted", "labels", "accepted", "share")
    table = _table("By position", right=columns)
    for position, intercept in enumerate(pair["intercepts"]):
        admitted, labels, accepted = (
            counters[name][position] for name in ("admitted", "observed", "accepted")
        )
        table.add_row(
            str(position),
            Text(f"{intercept:.4f}", "bold cyan" if labels else "dim"),
            f"{admitted:,.0f}",
            f"{labels:,.0f}",
            f"{accepted:,.0f}",
            f"{accepted / labels:.3f}" if labels else "-",
        )
    return table


def _strata(pair: dict[str, Any]) -> Table:
    names = sorted(pair["strata"], key=lambda name: -pair["strata"][name]["observations"])
    hidden = len(names) - MAX_STRATA
    title = "By stratum" + (f", the {MAX_STRATA} of {len(names)} with most" if hidden > 0 else "")
    table = _table(title, left=("stratum",), right=("labels", "ECE", "accepted", "predicted"))
    table.add_column("intercepts", overflow="fold")
    for name in names[:MAX_STRATA]:
        stratum = pair["strata"][name]
        table.add_row(
            name,
            f"{stratum['observations']:,.0f}",
            _number(stratum["ece"]),
            _number(stratum["observed"], 3),
            _number(stratum["predicted"], 3),
            " ".join(f"{value:.2f}" for value in stratum["intercepts"]),
        )
    return table


def _replicas(pair: dict[str, Any]) -> Table:
    table = _table("Replicas", left=("replica",), right=("applied", "age", "labels"))
    table.add_column("state")
    for replica in pair["replicas"]:
        table.add_row(
            replica["name"],
            replica["applied"],
            _age(replica["age"]),
            f"{replica['labels']:,.0f}",
            _standing(replica),
        )
    if not pair["replicas"]:
        table.add_row("none is known", "", "", "", "")
    return table


def _standing(replica: dict[str, Any]) -> Text:
    notes = [
        (name, style)
        for name, style in (
            ("stale", "bold red"),
            ("quarantined", "bold red"),
            ("held", "bold yellow"),
            ("exploring", "cyan"),
        )
        if replica[name]
    ]
    return Text(", ").join(Text(*note) for note in notes) if notes else Text("ok", "green")


def _age(seconds: float) -> str:
    """How long ago.

    >>> _age(0.42), _age(75.0), _age(7260.0)
    ('0.4 s', '1 m 15 s', '2 h 1 m')
    """
    if seconds < 60.0:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} m" if hours else f"{minutes} m {rest} s"


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(title: str, *, left: tuple[str, ...] = (), right: tuple[str, ...] = ()) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
