"""The drift monitor: when it watches, when it waits, when it says nothing."""

import numpy as np

from estimator_service.config import DriftConfig
from estimator_service.drift.monitor import DriftMonitor
from estimator_service.logistic import Array

K = 3
CONFIG = DriftConfig()


def residuals(rng: np.random.Generator, mean: float, labels: float = 400.0) -> Array:
    """[1, K, 3] of labels at p = .5 whose acceptance is off by `mean`."""
    accepted = rng.binomial(int(labels), 0.5 + mean, K)
    return np.stack(
        [accepted - 0.5 * labels, np.full(K, 0.25 * labels), np.full(K, labels)], axis=1
    )[None]


def settled(rng: np.random.Generator) -> DriftMonitor:
    monitor = DriftMonitor(CONFIG, K)
    for _ in range(CONFIG.calm_refits):
        assert monitor.observe(["s"], residuals(rng, 0.0)) == []
    assert monitor.settled
    return monitor


def test_learning_from_a_wrong_start_is_no_drift() -> None:
    rng = np.random.default_rng(1)
    monitor = DriftMonitor(CONFIG, K)
    for _ in range(20):
        assert monitor.observe(["s"], residuals(rng, 0.3)) == []
    assert not monitor.settled
    assert not monitor.drifting


def test_one_change_is_detected_once_and_is_over_when_residuals_are_calm() -> None:
    rng = np.random.default_rng(2)
    monitor = settled(rng)
    found = []
    for _ in range(10):
        found.append(monitor.observe(["s"], residuals(rng, -0.2)))
    first = next(i for i, f in enumerate(found) if f)
    assert first < 3
    assert [i for i, f in enumerate(found) if f] == [first]
    assert all(d.residual < 0 and d.stratum == "s" for d in found[first])
    assert monitor.drifting
    for _ in range(CONFIG.calm_refits):
        assert monitor.drifting
        monitor.observe(["s"], residuals(rng, 0.0))
    assert not monitor.drifting
    assert monitor.settled


def test_idle_and_thin_traffic_say_nothing_until_enough_labels_have_gathered() -> None:
    rng = np.random.default_rng(3)
    monitor = settled(rng)
    for _ in range(1000):
        assert monitor.observe(["s"], np.zeros((1, K, 3))) == []
    assert monitor.observe([], np.zeros((0, K, 3))) == []
    updates = sum(bool(monitor.observe(["s"], residuals(rng, 0.0, 10.0))) for _ in range(4))
    assert updates == 0
    assert not monitor.statistics()  # 40 labels a cell: no detector was fed yet
    monitor.observe(["s"], residuals(rng, 0.0, 10.0))
    assert len(monitor.statistics()) == 2 * K


def test_labels_graded_at_certainty_keep_the_residual_finite() -> None:
    monitor = settled(np.random.default_rng(4))
    sure = np.array([[[-100.0, 0.0, 500.0]] * K])
    assert all(np.isfinite(d.residual) for d in monitor.observe(["s"], sure))
    assert monitor.drifting


def test_a_monitor_goes_on_where_it_was_and_restarts_on_order() -> None:
    rng = np.random.default_rng(5)
    monitor = settled(rng)
    while not monitor.drifting:
        monitor.observe(["s"], residuals(rng, 0.3))
    successor = DriftMonitor(CONFIG, K, monitor.state)
    assert (successor.settled, successor.drifting) == (False, True)
    successor.restart()
    assert (successor.settled, successor.drifting) == (False, False)
