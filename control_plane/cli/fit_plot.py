"""The picture of `specfleet fit --plot`."""

from pathlib import Path
from typing import Any

import numpy as np

from estimator_service.calibration import ECE_BINS, ReliabilityBin
from estimator_service.logistic import Array
from estimator_service.offline import OfflineFit

INK, MUTED, BLUE = "#1f2937", "#9ca3af", "#2563eb"
MAX_NAME = 24
MAX_LINES = 10
"""Strata that are told apart by colour; of more only the pair is drawn."""


def save_plot(fit: OfflineFit, path: Path) -> None:
    """Draw reliability, intercepts and evidence into a PNG file. Raises OSError."""
    # Imported here: it takes a second that no other use of the command should pay. A Figure of
    # its own needs no display and leaves nothing behind in pyplot.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 10,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with rc_context(style):
        figure = Figure(figsize=(11, 6), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=(3, 1), width_ratios=(1, 1))
        reliability, counts = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
        intercepts, evidence = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
        _draw_reliability(reliability, fit)
        _draw_counts(counts, fit.reliability)
        _draw_intercepts(intercepts, fit)
        _draw_evidence(evidence, fit)
        figure.savefig(path, dpi=150, format="png")


def _draw_reliability(axes: Any, fit: OfflineFit) -> None:
    bars = fit.reliability
    predicted, observed = (
        np.array([getattr(b, x) for b in bars]) for x in ("predicted", "observed")
    )
    low, high = wilson(observed, np.array([bar.observations for bar in bars]))
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle="--", label="perfect")
    axes.vlines(predicted, low, high, color=BLUE, linewidth=1.5, alpha=0.6)
    axes.plot(predicted, observed, "o-", color=BLUE, label="fitted, with 95% intervals")
    scores = fit.calibration
    axes.set_title(f"Reliability: ECE {scores.ece:.4f}, log-loss {scores.log_loss:.4f}")
    axes.set(xlim=(0, 1), ylim=(0, 1), ylabel="share accepted")
    axes.tick_params(labelbottom=False)
    axes.legend(frameon=False, loc="upper left")


def _draw_counts(axes: Any, bars: list[ReliabilityBin]) -> None:
    middle = [(bar.lower + bar.upper) / 2 for bar in bars]
    counts = [bar.observations for bar in bars]
    axes.bar(middle, counts, width=0.85 / ECE_BINS, color=BLUE, alpha=0.5)
    axes.set(xlim=(0, 1), xlabel="predicted acceptance", ylabel="labels")
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _draw_intercepts(axes: Any, fit: OfflineFit) -> None:
    positions = np.arange(len(fit.intercepts))
    if 1 < len(fit.strata) <= MAX_LINES:
        for name, stratum in fit.strata.items():
            axes.plot(
                positions, stratum.intercepts, ".-", linewidth=1, alpha=0.8, label=_short(name)
            )
    axes.plot(positions, fit.intercepts, "o-", color=INK, label="pair")
    blind = fit.observations == 0
    if blind.any():
        axes.plot(
            positions[blind],
            fit.intercepts[blind],
            "o",
            color="white",
            markeredgecolor=INK,
            label="no labels",
        )
    axes.set_title(f"Intercepts at slope {fit.slope:.4f}")
    axes.set(ylabel="logits")
    axes.tick_params(labelbottom=False)
    if len(axes.lines) > 1:
        # Beside the axes: a long name would cover the lines.
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _space_positions(axes, len(positions))


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."


def _draw_evidence(axes: Any, fit: OfflineFit) -> None:
    positions = np.arange(len(fit.observations))
    axes.bar(positions, fit.observations, color=INK, alpha=0.5)
    axes.set(xlabel="position", ylabel="labels")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _space_positions(axes, len(positions))


def _space_positions(axes: Any, positions: int) -> None:
    """Whole numbers only, and the same range in both panels."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.6, positions - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def wilson(share: Array, count: Array) -> tuple[Array, Array]:
    """Wilson's 95% interval of shares [B] of counts [B]; unlike the normal one, within [0, 1].

    >>> low, high = wilson(np.array([0.5]), np.array([96.0]))
    >>> round(float(low[0]), 2), round(float(high[0]), 2)
    (0.4, 0.6)
    """
    z2 = 1.96**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = np.sqrt(z2 * (share * (1 - share) + z2 / (4 * count)) / count) / (1 + z2 / count)
    return centre - half, centre + half
