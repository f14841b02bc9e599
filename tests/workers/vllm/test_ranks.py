"""Ranks that differ are named, and made to agree again."""

from dataclasses import replace

import numpy as np

from estimator_service.messages import CoefficientSet, Source, Version
from estimator_service.sketch import Sketch
from estimator_service.statistics import N, Statistics
from workers.rounds import Round, StratumSums
from workers.vllm import ranks
from workers.vllm.rpc import Exchanged, coefficients_hash

IN_FORCE = CoefficientSet(Version(1, 4), Source.FITTED, 0.5, (0.1, 0.2))


def round_of(labels: int) -> Round:
    sums = np.zeros((2, 6))
    sums[0, N] = labels
    part = StratumSums(IN_FORCE.intercepts, Statistics(sums), Sketch.empty(2))
    return Round(IN_FORCE.version, IN_FORCE.slope, {"all": part})


def answer(rank: int, *labels: int, coefficients: CoefficientSet = IN_FORCE) -> Exchanged:
    rounds = [round_of(n) for n in labels]
    return Exchanged(rank, coefficients.version, coefficients_hash(coefficients), rounds)


def test_ranks_that_agree_are_left_alone() -> None:
    assert not ranks.compare([answer(0, 5, 7)])
    assert not ranks.compare([answer(1, 5, 7), answer(0, 5, 7), answer(2, 5, 7)])


def test_other_values_and_other_versions_are_told_apart_from_rank_0() -> None:
    nudged = replace_slope(np.nextafter(0.5, 1.0))
    older = CoefficientSet(Version(1, 3), Source.FITTED, 0.5, (0.1, 0.2))
    found = ranks.compare(
        [answer(2, coefficients=older), answer(0), answer(1, coefficients=nudged), answer(3)]
    )
    assert found == ranks.Disagreement(coefficients=(1, 2))


def test_other_labels_are_noticed_when_the_same_rounds_have_arrived() -> None:
    assert ranks.compare([answer(0, 5, 7), answer(1, 5, 8)]).labels == (1,)
    assert not ranks.compare([answer(0, 5, 7), answer(1, 7)])


def test_the_correction_is_an_order_to_write_what_rank_0_has() -> None:
    assert ranks.correction(IN_FORCE).coefficients == IN_FORCE


def test_a_late_round_hides_no_difference_of_coefficients() -> None:
    late = replace(answer(1), coefficients_hash="other")
    assert ranks.compare([answer(0, 5), late]).coefficients == (1,)


def replace_slope(slope: float) -> CoefficientSet:
    return CoefficientSet(IN_FORCE.version, IN_FORCE.source, float(slope), IN_FORCE.intercepts)
