"""What `specfleet fit` prints for people."""

import math
from collections import defaultdict

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from estimator_service.calibration import Calibration, ReliabilityBin
from estimator_service.offline import OfflineFit
from estimator_service.trace import Reason, Trace

LINES_NAMED = 4
"""Of each reason for which rows were rejected."""
BAR_WIDTH = 36
MAX_PADDED = 7
"""Columns that fit into a terminal of 80 with space between them."""


def report(trace: Trace, fit: OfflineFit) -> RenderableType:
    """Everything about a fit, at most 80 columns wide."""
    sections = [_summary(trace, fit), _positions(fit)]
    if len(fit.strata) > 1:
        sections += [_strata(fit), _strata_intercepts(fit)]
    sections.append(_reliability(fit.reliability))
    if trace.rejected_rows:
        sections.append(rejected_rows(trace))
    sections.append(verdict(fit))
    return Group(*(part for section in sections for part in ("", section)))


def rejected_rows(trace: Trace) -> RenderableType:
    """How many rows were rejected, why, and where the first ones are."""
    title = f"WARNING: {trace.rejected_rows:,} of {trace.rows:,} rows rejected, and not used"
    lines: dict[Reason, list[int]] = defaultdict(list)
    for rejection in trace.rejections:
        lines[rejection.reason].append(rejection.line)
    table = _table(Text(title, "bold yellow"), left=("reason", "lines"), right=("rows",))
    for reason, count in trace.rejection_reasons.items():
        named = [str(line) for line in lines[reason][:LINES_NAMED]]
        more = ["..."] if count > len(named) else []
        table.add_row(reason, ", ".join(named + more), f"{count:,}")
    return table


def _summary(trace: Trace, fit: OfflineFit) -> RenderableType:
    labels = int(fit.calibration.observations)
    return Text.assemble(
        f"{trace.rows:,} rows, {labels:,} labels, K = {len(fit.intercepts)}\n",
        "P(accepted) = sigmoid(",
        (f"{fit.slope:.4f}", "bold cyan"),
        " feature + intercept)",
    )


def _positions(fit: OfflineFit) -> Table:
    table = _table("Fit by position", right=("position", "intercept", *SCORES))
    for position, (intercept, scores) in enumerate(
        zip(fit.intercepts, fit.per_position, strict=True)
    ):
        value = Text(f"{intercept:.4f}", "bold cyan" if scores.observations else "dim")
        table.add_row(str(position), value, *_scores(scores))
    table.add_section()
    table.add_row("all", "", *_scores(fit.calibration), style="bold")
    return table


def _strata(fit: OfflineFit) -> Table:
    table = _table("Fit by stratum", left=("stratum",), right=SCORES)
    for name, stratum in fit.strata.items():
        table.add_row(name, *_scores(stratum.calibration))
    return table


def _strata_intercepts(fit: OfflineFit) -> Table:
    table = _table("Intercepts by stratum", left=("stratum", "position 0, 1, ..."))
    for name, stratum in fit.strata.items():
        table.add_row(name, "  ".join(f"{value:7.4f}" for value in stratum.intercepts))
    return table


def _reliability(bars: list[ReliabilityBin]) -> Table:
    title = "Reliability: bar = share accepted, | = predicted"
    table = _table(title, left=("predicted", "accepted"), right=("share", "labels"))
    for bar in bars:
        table.add_row(
            f"{bar.lower:.2f} to {bar.upper:.2f}",
            _bar(bar.observed, bar.predicted),
            f"{bar.observed:.3f}",
            f"{bar.observations:,.0f}",
        )
    return table


def _bar(observed: float, predicted: float) -> Text:
    filled = round(observed * BAR_WIDTH)
    text = Text("=" * filled + " " * (BAR_WIDTH - filled), "green")
    mark = min(int(predicted * BAR_WIDTH), BAR_WIDTH - 1)
    return Text.assemble(text[:mark], ("|", "bold red"), text[mark + 1 :])


def verdict(fit: OfflineFit) -> Text:
    """Whether the fit converged, and if not, why not."""
    if fit.converged:
        return Text(f"Converged in {fit.iterations} steps.", "green")
    problems = "".join(f"\n  {problem}" for problem in fit.problems)
    return Text.assemble(("NOT CONVERGED", "bold red"), problems)


SCORES = ("labels", "observed", "predicted", "log-loss", "Brier", "ECE", "AUC")


def _scores(scores: Calibration) -> tuple[str, ...]:
    values = (
        scores.observed,
        scores.predicted,
        scores.log_loss,
        scores.brier,
        scores.ece,
        scores.auc,
    )
    return (
        f"{scores.observations:,.0f}",
        *("-" if math.isnan(value) else f"{value:.4f}" for value in values),
    )


def _table(title: str | Text, *, left: tuple[str, ...] = (), right: tuple[str, ...] = ()) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0 if len(left + right) > MAX_PADDED else (0, 1),
    )
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
