from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from estimator_service.messages import (
    CoefficientSet,
    ExplorationOrder,
    Policy,
    PolicyOrder,
    Source,
    Version,
)
from workers.rounds import Label, Rounds
from workers.vllm.rpc import (
    Exchanged,
    Order,
    OrderError,
    RoundError,
    coefficients_hash,
    read_exchanged,
    read_order,
    write_exchanged,
    write_order,
)

K = 3
COEFFICIENTS = CoefficientSet(
    Version(2, 5), Source.FITTED, 0.7, (0.1, -0.2, -0.3), {"greedy:code": (1.0, 2.0, 3.0)}
)


def plain(value: Any) -> bool:
    """Whether JSON gives back the very same: no NumPy number, no tuple, no enum."""
    if isinstance(value, dict):
        return all(type(k) is str and plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(plain(v) for v in value)
    return type(value) in (str, int, float, bool) or value is None


def gathered() -> Exchanged:
    rounds = Rounds()
    rounds.step(COEFFICIENTS, [3, 1, 0], explored=True)
    rounds.observe(COEFFICIENTS, "greedy:code", [Label(0, 1.5, 1), Label(1, -0.5, 0)])
    rounds.skip(COEFFICIENTS, "penalties")
    return Exchanged(1, COEFFICIENTS.version, coefficients_hash(COEFFICIENTS), rounds.drain())


def test_an_order_comes_back_as_it_was_written() -> None:
    order = Order(COEFFICIENTS, PolicyOrder(Policy.FIXED, 2), ExplorationOrder(0.1, 15.0))
    written = write_order(order)
    assert plain(written)
    assert read_order(json.loads(json.dumps(written)), K) == order
    assert write_order(Order()) == {}
    assert read_order({}, K) == Order()
    assert read_order({"coefficients": None, "policy": None, "exploration": None}, K) == Order()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"coefficients": {"slope": float("nan")}}, "slope must be in 0..20, got nan"),
        ({"coefficients": {"slope": -0.1}}, "slope must be in 0..20, got -0.1"),
        ({"coefficients": {"slope": "1"}}, "Expected `float`, got `str`"),
        ({"coefficients": {"intercepts": [0.0, 0.0]}}, "intercepts must have 3 values, got 2"),
        (
            {"coefficients": {"intercepts": [0.0, float("inf"), 0.0]}},
            r"intercepts\[1\] must be in -20..20, got inf",
        ),
        ({"coefficients": {"strata": {"a": [0.0]}}}, "strata.a must have 3 values, got 1"),
        (
            {"coefficients": {"strata": {"a": [0.0, 0.0, 21.0]}}},
            r"strata.a\[2\] must be in -20..20, got 21.0",
        ),
        ({"coefficients": {"strata": {"a b": [0.0] * 3}}}, "regex"),
        ({"coefficients": {"version": [1]}}, "length 2"),
        ({"coefficients": {"version": [1, -1]}}, ">= 0"),
        ({"coefficients": {"source": "guess"}}, "Invalid enum value 'guess'"),
        ({"coefficients": {"bias": 1.0}}, "unknown field `bias`"),
        ({"policy": {"policy": "fixed"}}, "fixed needs a length"),
        ({"policy": {"policy": "full", "length": 1}}, "fixed needs a length"),
        ({"policy": {"policy": "fixed", "length": 4}}, "length must be in 0..3, got 4"),
        ({"exploration": {"share": 1.5, "seconds": 1.0}}, "<= 1.0"),
        ({"exploration": {"share": 0.5, "seconds": 0.0}}, "> 0.0"),
        ({"exploration": {"share": 0.5, "seconds": float("inf")}}, "must be finite"),
        ({"shape": {}}, "unknown field `shape`"),
    ],
)
def test_an_order_that_breaks_a_rule_is_refused_with_rule_and_value(
    change: dict[str, dict[str, Any]], says: str
) -> None:
    order = write_order(Order(COEFFICIENTS))
    for part, values in change.items():
        order[part] = {**order.get(part, {}), **values}
    with pytest.raises(OrderError, match=says):
        read_order(order, K)


def test_an_answer_comes_back_as_it_was_written() -> None:
    answer = gathered()
    written = write_exchanged(answer)
    assert plain(written)
    read = read_exchanged(json.loads(json.dumps(written)), K)
    assert (read.rank, read.applied) == (1, Version(2, 5))
    assert read.coefficients_hash == answer.coefficients_hash
    (before,), (after,) = answer.rounds, read.rounds
    assert (after.graded, after.slope, after.admitted) == (Version(2, 5), 0.7, (2, 1, 1))
    assert (after.steps, after.explored_steps, after.skipped) == (1, 1, {"penalties": 1})
    assert after.strata.keys() == {"greedy:code"}
    old, new = before.strata["greedy:code"], after.strata["greedy:code"]
    assert new.intercepts == (1.0, 2.0, 3.0)
    np.testing.assert_array_equal(new.statistics.sums, old.statistics.sums)
    np.testing.assert_array_equal(new.sketch.cells, old.sketch.cells)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["rank"], -1, ">= 0"),
        (["rounds", 0, "admitted"], [1, 2], "admitted must have 3 values, got 2"),
        (["rounds", 0, "strata", "greedy:code", "intercepts"], [1.0], "3 values, got 1"),
        (["rounds", 0, "strata", "greedy:code", "statistics"], [[0.0] * 6], r"\[3, 6\]"),
        (["rounds", 0, "strata", "greedy:code", "statistics"], [[0.0] * 5] * 3, r"\[3, 6\]"),
        (["rounds", 0, "strata", "greedy:code", "sketch"], "zz", "hexadecimal"),
        (["rounds", 0, "strata", "greedy:code", "sketch"], "00", "cannot hold a sketch"),
    ],
)
def test_an_answer_that_no_worker_wrote_is_refused(
    path: list[str | int], value: object, says: str
) -> None:
    written: Any = write_exchanged(gathered())
    at = written
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(RoundError, match=says):
        read_exchanged(written, K)


def test_the_hash_tells_any_two_sets_apart_and_only_those() -> None:
    def variant(**change: Any) -> str:
        fields = {name: getattr(COEFFICIENTS, name) for name in COEFFICIENTS.__struct_fields__}
        return coefficients_hash(CoefficientSet(**{**fields, **change}))

    rows = {"a": (1.0, 2.0, 3.0), "b": (4.0, 5.0, 6.0)}
    assert variant() == coefficients_hash(COEFFICIENTS)
    assert variant(strata=rows) == variant(strata=dict(reversed(rows.items())))
    different = {
        variant(),
        variant(version=Version(2, 6)),
        variant(slope=np.nextafter(0.7, 1.0)),
        variant(intercepts=(0.1, -0.2, np.nextafter(-0.3, 0.0))),
        variant(strata={}),
        variant(strata={"greedy:text": (1.0, 2.0, 3.0)}),
    }
    assert len(different) == 6
