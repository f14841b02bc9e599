from __future__ import annotations

import numpy as np

from estimator_service.messages import CoefficientSet, Source, Version
from tests.estimator_service.fleet import Truth
from tests.workers.simulated import STRATUM, Worker
from workers.speculation import REFIT_STEPS, ROUNDS_KEPT
from workers.vllm.rpc import Order

TRUTH = Truth(0.8, (0.6, 0.1, -0.3))


def error(coefficients: CoefficientSet) -> float:
    found = [coefficients.slope, *coefficients.intercepts_of(STRATUM)]
    return float(np.abs(np.array(found) - [TRUTH.slope, *TRUTH.intercepts]).max())


def test_a_worker_that_nobody_calls_learns_by_itself() -> None:
    worker = Worker(TRUTH)
    worker.serve(REFIT_STEPS - 1)
    assert worker.speculation.refits == 0
    before = error(worker.speculation.coefficients)
    worker.serve(20 * REFIT_STEPS)
    assert worker.speculation.refits == 20
    assert worker.speculation.applied == Version()
    assert error(worker.speculation.coefficients) < 0.25 * before


def test_it_starts_from_what_the_fleet_had_published() -> None:
    worker = Worker(TRUTH)
    published = CoefficientSet(
        Version(3, 4), Source.FITTED, TRUTH.slope, TRUTH.intercepts, {STRATUM: TRUTH.intercepts}
    )
    worker.speculation.exchange(Order(coefficients=published))
    worker.serve(worker.speculation.lease.steps + REFIT_STEPS)
    assert worker.speculation.refits == 1
    # A cold start would be 0.8 away.
    assert error(worker.speculation.coefficients) < 0.15


def test_the_fleet_takes_over_again_and_no_label_is_lost() -> None:
    worker = Worker(TRUTH)
    published = CoefficientSet(Version(3, 4), Source.FITTED, 0.5, (0.0,) * 3)
    worker.speculation.exchange(Order(coefficients=published))
    worker.serve(worker.speculation.lease.steps + 5 * REFIT_STEPS + 7)
    assert worker.speculation.applied == Version()
    older = CoefficientSet(Version(3, 3), Source.FITTED, 0.5, (0.0,) * 3)
    rounds = worker.speculation.exchange(Order(coefficients=older))
    assert worker.speculation.applied == Version()
    assert sum(r.labels for r in rounds) == worker.speculation.rounds.observed
    # Each round holds what one set of coefficients predicted: the fleet's, and five fits.
    assert len({(r.slope, *(s.intercepts for s in r.strata.values())) for r in rounds}) == 6
    worker.speculation.exchange(Order(coefficients=published))
    assert worker.speculation.applied == Version(3, 4)
    worker.serve(REFIT_STEPS)
    assert worker.speculation.refits == 5


def test_what_waits_for_the_fleet_is_bounded_and_what_is_dropped_is_counted() -> None:
    worker = Worker(TRUTH)
    worker.serve((ROUNDS_KEPT + 10) * REFIT_STEPS, requests=1)
    rounds = worker.speculation.exchange(Order())
    kept = sum(r.labels for r in rounds)
    assert len(rounds) <= ROUNDS_KEPT + 1
    assert kept + worker.speculation.rounds.forgotten == worker.speculation.rounds.observed
    assert worker.speculation.rounds.forgotten > 0
