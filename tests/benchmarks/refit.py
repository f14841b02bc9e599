"""A refit at K = 16 with 64 strata: ours, a dense solve, and fitting the labels again."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from estimator_service.config import FitConfig
from estimator_service.logistic import Array, predict
from estimator_service.parameters import Parameters, Pins
from estimator_service.pooling import newton_point, refit
from estimator_service.sketch import BINS, Sketch
from estimator_service.statistics import Quadratic, Statistics
from tests.estimator_service.fleet import Labels, Truth

K, STRATA = 16, 64
LABELS = 1_000_000
"""What a fleet that makes 2,300 labels a second holds at the default half-life."""
RUNS = 200
ROUNDS = 5


def run(console: Console) -> None:
    """Print the table."""
    rng = np.random.default_rng(0)
    profile = np.linspace(1.0, -1.0, K)
    truths = [Truth(0.6, tuple(profile + rng.normal(0.0, 0.5))) for _ in range(STRATA)]
    labels = [t.labels(rng, LABELS // STRATA // K) for t in truths]
    truth = np.array([t.intercepts for t in truths])
    # A step away from the truth, as a refit in service is.
    start = Parameters(0.55, truth.mean(axis=0), truth + rng.normal(0.0, 0.05, truth.shape))
    quadratics, sketches = held(labels, start)
    priors, pins = FitConfig().priors, Pins.none(STRATA, K)

    fast: dict[str, Callable[[], object]] = {
        "refit: solve and guard": lambda: refit(quadratics, sketches, start, priors, pins),
        "the solve alone": lambda: newton_point(quadratics, start, priors, pins),
        "one dense system of 1,041 unknowns": lambda: dense_solve(quadratics, start),
    }
    slow = "scikit-learn on the raw labels"
    x, y = design(labels)
    model = LogisticRegression(C=100.0, fit_intercept=False, max_iter=200, tol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in (*fast, slow)}
    for _ in range(ROUNDS):  # interleaved: whatever else the machine does, it does to all
        for name, call in fast.items():
            times[name].append(best(call, RUNS if "dense" not in name else 5))
        times[slow].append(best(lambda: model.fit(x, y), 1))

    table = Table(title=f"a refit at K = {K}, {STRATA} strata, {len(y):,} labels held")
    for column in ("way", "ms, median (range)", "times ours"):
        table.add_column(column, justify="left" if column == "way" else "right")
    ours = np.median(times["refit: solve and guard"])
    for name, seconds in times.items():
        row = [1e3 * s for s in seconds]
        table.add_row(
            name,
            f"{np.median(row):,.2f} ({min(row):,.2f}-{max(row):,.2f})",
            f"{np.median(seconds) / ours:,.1f}",
        )
    console.print(table)
    fitted = refit(quadratics, sketches, start, priors, pins).coefficients
    theirs = model.coef_[0, 1:].reshape(STRATA, K)
    console.print(
        f"largest difference of an intercept, ours (pooled) and scikit-learn's (not): "
        f"{np.abs(fitted.strata - theirs).max():.2f}; slopes {fitted.slope:.4f} and "
        f"{model.coef_[0, 0]:.4f}\n"
    )


def held(labels: list[Labels], at: Parameters) -> tuple[Array, Array]:
    """Quadratics and sketches of labels graded at the coefficients `at`."""
    quadratics, sketches = [], []
    for part, intercepts in zip(labels, at.strata, strict=True):
        k = part.position.astype(int)
        p = predict(at.slope, intercepts[k], part.features)
        statistics = Statistics.of(K, k, part.features, part.accepted, p)
        quadratics.append(Quadratic.of(statistics, at.slope, intercepts).sums)
        sketches.append(Sketch.of(K, k, part.features, part.accepted).cells)
    assert sketches[0].shape == (3, K, BINS)
    return np.stack(quadratics), np.stack(sketches)


def dense_solve(quadratics: Array, at: Parameters) -> Array:
    """The same Newton system without structure: slope, profile and every effective intercept."""
    priors = FitConfig().priors
    size = 1 + K + STRATA * K
    a, b, c, h0, h1, _ = np.moveaxis(quadratics, -1, 0)
    matrix, right = np.zeros((size, size)), np.zeros(size)
    step = np.diff(np.eye(K), axis=0)
    walk = priors.offset_smoothness * step.T @ step
    walk[0, 0] += priors.pooling
    profile = slice(1, 1 + K)
    matrix[profile, profile] = priors.smoothness * step.T @ step + STRATA * walk
    for s in range(STRATA):
        mine = slice(1 + K + s * K, 1 + K + (s + 1) * K)
        matrix[mine, mine] = walk + np.diag(c[s])
        matrix[mine, profile] = matrix[profile, mine] = -walk
        matrix[0, mine] = matrix[mine, 0] = b[s]
    matrix[0, 0] = a.sum()
    right[0], right[1 + K :] = h0.sum(), h1.ravel()
    matrix[: 1 + K, : 1 + K] += priors.ridge * np.eye(1 + K)
    right[: 1 + K] += priors.ridge * np.array([at.slope, *at.intercepts])
    return np.linalg.solve(matrix, right).astype(np.float64)


def design(labels: list[Labels]) -> tuple[sparse.csr_matrix, Array]:
    """[M, 1 + S K]: the feature and the cell one-hot; and [M] labels."""
    f = np.concatenate([part.features for part in labels])
    cell = np.concatenate([s * K + part.position.astype(int) for s, part in enumerate(labels)])
    rows = np.arange(len(f))
    one_hot = sparse.csr_matrix((np.ones(len(f)), (rows, cell)), shape=(len(f), STRATA * K))
    y = np.concatenate([part.accepted for part in labels])
    return sparse.hstack([sparse.csr_matrix(f[:, None]), one_hot]).tocsr(), y


def best(call: Callable[[], object], runs: int) -> float:
    """Mean seconds of one call."""
    started = time.perf_counter()
    for _ in range(runs):
        call()
    return (time.perf_counter() - started) / runs
