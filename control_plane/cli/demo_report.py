"""What `specfleet demo` shows: parts of its story, at most 80 columns wide.

A `pair` is one as `GET /specfleet/v1/pairs` has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from control_plane.load.comparison import Comparison, Ratio

POSITIONS = 5
"""The most that fit into a line; of a longer draft the first are shown."""
Pair = Mapping[str, Any]

INTRODUCTION = """\
A small draft model proposes {k} tokens, and the target verifies a prefix of
them in one step: what it accepts is text, the rest was wasted work. How much
is worth verifying depends on how likely each token is to be accepted:

    P(accepted at position k) = sigmoid(slope * f + intercept[k])

where f, the log-odds of the drafter's best token, says how sure it is. vLLM
learns slope and intercepts in each process alone. SpecFleet learns them from
all replicas together, and gives every replica the same."""

ROW = "{time:>5} {version:>7}  {labels:>9}  {slope:>6}  {intercepts:<{width}}  {ece:>5}  {cold:>5}"


def what_is_up(pair: Pair, epoch: int) -> RenderableType:
    """Replicas, estimator and pair."""
    key = pair["key"]
    live = [replica for replica in pair["replicas"] if not replica["stale"]]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("target", f"{key['target']}, drafted for by {key['drafter']} ({key['method']})")
    table.add_row("draft", f"{key['num_speculative_tokens']} tokens")
    for i, replica in enumerate(live):
        seen = f"heard {replica['age']:.1f} s ago, uses version {replica['applied']}"
        table.add_row("replicas" if i == 0 else "", f"{replica['name']}: {seen}")
    table.add_row("estimator", f"one for all of them, in life {epoch}")
    table.add_row("coefficients", _coefficients(pair))
    return table


def _coefficients(pair: Pair) -> Text:
    known = f"slope {pair['slope']:.3f}, intercepts {_intercepts(pair)}"
    if pair["source"] == "initial":
        return Text(f"{known}: every pair's first guess, nothing is learned yet")
    labels = pair["counters"]["labels"]
    return Text(
        f"{known}: version {pair['version']}, {pair['source']} to {labels:,.0f} labels so far"
    )


def _intercepts(pair: Pair) -> str:
    shown = " ".join(f"{value:+.2f}" for value in pair["intercepts"][:POSITIONS])
    return f"{shown} .." if len(pair["intercepts"]) > POSITIONS else shown


def heading(pair: Pair) -> str:
    """Above the lines that `line` makes."""
    return _row(pair, "", "version", "labels", "slope", "intercepts", "ECE", "first").rstrip()


def line(pair: Pair, seconds: float) -> str:
    """The pair's state after so many seconds."""
    first = pair.get("first_guess")
    return _row(
        pair,
        f"{seconds:.0f} s",
        pair["version"],
        f"{pair['counters']['labels']:,.0f}",
        f"{pair['slope']:.3f}",
        _intercepts(pair),
        _share(pair["calibration"]["ece"]),
        _share(first["ece"]) if first else "",
    ).rstrip()


def _row(pair: Pair, *values: str) -> str:
    names = ("time", "version", "labels", "slope", "intercepts", "ece", "cold")
    width = 6 * min(len(pair["intercepts"]), POSITIONS) + 2
    return ROW.format(width=width, **dict(zip(names, values, strict=True)))


def calibration(pair: Pair) -> str:
    """How far predictions are off now, and how far the first guess would be."""
    ece, first = pair["calibration"]["ece"], pair.get("first_guess")
    labels = pair["calibration"]["observations"]
    if ece is None:
        return "No label has arrived: nothing was learned."
    said = f"On {labels:,.0f} labels, predicted acceptance is off by {ece:.3f} on average (ECE)"
    if first and first["ece"] is not None:
        said += (
            f";\nwith the coefficients that every pair starts from it would be {first['ece']:.3f}"
        )
    return f"{said}."


def strata(pair: Pair) -> RenderableType:
    """Predicted and observed acceptance, by stratum and position."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("stratum", no_wrap=True)
    table.add_column("labels", justify="right", no_wrap=True)
    for k in range(min(pair["key"]["num_speculative_tokens"], POSITIONS)):
        table.add_column(f"{k}", justify="center", no_wrap=True)
    for name, stratum in sorted(pair["strata"].items()):
        cells = [
            f"{_short(p['predicted'])} {_short(p['observed'])}"
            for p in stratum["positions"][:POSITIONS]
        ]
        table.add_row(name, f"{stratum['observations']:,.0f}", *cells)
    return table


def _short(value: float | None) -> str:
    return _share(value, 2).removeprefix("0")


def _share(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def throughput(found: Comparison) -> RenderableType:
    """Every arm's throughput, and how the first compares with it."""
    first = found.arms[0].name
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("verified")
    for name in ("tokens/s", f"{first} / this", "least and most of a round"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm in found.arms:
        ratio = found.ratio(first, arm.name) if arm.name != first else None
        cells = ("", "") if ratio is None else (f"{ratio.mean:.3f}", _range(ratio))
        table.add_row(arm.name, f"{found.mean(arm.name):,.1f}", *cells)
    return table


def _range(ratio: Ratio) -> str:
    return f"{ratio.low:.3f} to {ratio.high:.3f}"


def verdict(found: Comparison) -> str:
    """What the comparison says, and no more than it says."""
    first, others = found.arms[0].name, [arm.name for arm in found.arms[1:]]
    said, slower = [], False
    for other in others:
        ratio = found.ratio(first, other)
        if ratio is None:
            said.append(f"Against {other} nothing can be said: no token came in some turn.")
        elif ratio.low > 1.0:
            said.append(f"{first} was faster than {other} in every round.")
        elif ratio.high < 1.0:
            said.append(f"{first} was slower than {other} in every round.")
            slower = True
        else:
            said.append(f"Between {first} and {other}, {found.rounds} rounds show no difference.")
    if slower:
        said.append(
            "With models as small as these, drafting costs about as much as verifying,\n"
            "so that verifying less saves little."
        )
    return "\n".join(sentence[0].upper() + sentence[1:] for sentence in said)


def addresses(url: str, operator: str, command: str) -> RenderableType:
    """Where everything is, and what to try next."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows: Sequence[tuple[str, str]] = (
        ("OpenAI API", url),
        ("operator's API", operator),
        ("", ""),
        (f"{command} status --watch", "the coefficients as they move"),
        (f"{command} run all", "more requests, and how they did"),
        (f"{command} down", "ends everything"),
    )
    for name, value in rows:
        table.add_row(name, value)
    return table
