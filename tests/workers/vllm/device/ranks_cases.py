"""Two tensor-parallel ranks on vLLM's V2 runner on the CPU. Run by `test_interpreted`."""

from __future__ import annotations

import pytest

from estimator_service.messages import CoefficientSet, Source, Version
from tests.workers.vllm.device.engine import POSITIONS, Engine, start
from workers.vllm import ranks
from workers.vllm.rpc import Order

COEFFICIENTS = ("slope", "intercepts")
SUMS = ("info", "grad", "counts", "features", "predictions")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return start("draft", ranks=2)


def same(engine: Engine, *names: str) -> bool:
    one, other = engine.peek_ranks()
    return all(one[name] == other[name] for name in names)


def test_ranks_apply_the_same_at_the_same_step_and_one_that_differs_is_corrected(
    engine: Engine,
) -> None:
    new = CoefficientSet(Version(1, 1), Source.FITTED, 0.75, (0.9, 0.4, 0.1))
    engine.exchange_ranks()
    engine.generate(6)
    answers = engine.exchange_ranks(Order(coefficients=new))
    assert [answer.rank for answer in answers] == [0, 1]
    assert not ranks.compare(answers)
    engine.generate(6)
    assert same(engine, *COEFFICIENTS, *SUMS)
    assert engine.peek_ranks()[0]["counts"][0] > 0
    answers = engine.exchange_ranks()
    assert not ranks.compare(answers)
    assert [answer.rounds[0].graded for answer in answers] == [new.version] * 2
    engine.llm.collective_rpc("nudge", args=(1,))
    assert not same(engine, *COEFFICIENTS)
    assert ranks.compare(engine.exchange_ranks()).coefficients == (1,)
    in_force = engine.status_ranks()[0]["coefficients"]
    assert in_force["slope"] == new.slope
    assert not ranks.compare(engine.exchange_ranks(ranks.correction(new)))
    engine.generate(6)
    assert same(engine, *COEFFICIENTS, *SUMS)
    assert not ranks.compare(engine.exchange_ranks())
    assert len(engine.peek_ranks()[0]["intercepts"]) == POSITIONS
