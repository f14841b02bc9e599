"""What `specfleet reference check` prints for people."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from workers.reference.figures import Figures


def report(figures: Figures) -> RenderableType:
    """Everything that was measured, at most 80 columns wide."""
    sections: list[RenderableType] = [
        Text.assemble(
            "AUC ",
            (f"{figures.auc:.3f}", "bold cyan"),
            ", slope ",
            (f"{figures.slope:.3f}", "bold cyan"),
            "; first intercept against entropy: correlation ",
            (f"{figures.entropy_correlation:.2f}", "bold cyan"),
        ),
        _workloads(figures),
        _positions("Accepted, by position in the draft", figures.acceptance),
        _positions("Accepted once it was reached", figures.conditional_acceptance),
        _positions("Intercepts", figures.intercepts),
    ]
    if figures.fit_problems:
        sections.append(Text("\n".join(figures.fit_problems), "bold red"))
    return Group(*(part for section in sections for part in ("", section)))


def _workloads(figures: Figures) -> Table:
    models = list(figures.loss)
    table = _table(
        "Losses and draft's entropy in nats per token",
        [*models, "entropy", "AUC", "slope"],
    )
    for name in figures.acceptance:
        table.add_row(
            name,
            *(f"{figures.loss[model][name]:.2f}" for model in models),
            f"{figures.draft_entropy[name]:.2f}",
            f"{figures.auc_by_workload[name]:.2f}",
            f"{figures.slope_by_workload[name]:.2f}",
        )
    return table


def _positions(title: str, values: dict[str, list[float]]) -> Table:
    table = _table(title, [str(k) for k in range(len(next(iter(values.values()))))])
    for name, row in values.items():
        table.add_row(name, *(f"{value:.3f}" for value in row))
    return table


def _table(title: str, columns: list[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("workload")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
