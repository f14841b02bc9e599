"""The one call between a replica and its workers, in plain types.

`collective_rpc` carries dicts, lists, strings and Python numbers, so an order goes in and a round
comes out as those. A worker has two methods:

    exchange(order) -> round     apply what is newer, and drain, at one step boundary on every rank
    status() -> dict             who, what is applied, and what went wrong

An order is checked whole before any of it is applied.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from estimator_service.irls import MAX_INTERCEPT, MAX_SLOPE
from estimator_service.messages import (
    MAX_STRATA,
    CoefficientSet,
    Count,
    ExplorationOrder,
    Name,
    Policy,
    PolicyOrder,
    Source,
    Stratum,
    Version,
    encode_array,
)
from estimator_service.orders import OrderError, check_policy
from estimator_service.sketch import Sketch
from estimator_service.statistics import WIDTH, Statistics
from workers.rounds import Round, StratumSums

__all__ = [
    "Exchanged",
    "Order",
    "OrderError",
    "RoundError",
    "coefficients_hash",
    "read_exchanged",
    "read_order",
    "write_coefficients",
    "write_exchanged",
    "write_order",
    "write_version",
]


class RoundError(ValueError):
    """A round that no worker can have written."""


@dataclass(frozen=True)
class Order:
    """What a worker is told. None leaves that part as it is."""

    coefficients: CoefficientSet | None = None
    policy: PolicyOrder | None = None
    exploration: ExplorationOrder | None = None
    """Replaces the order in force, and holds for its `seconds` from now on."""


@dataclass(frozen=True, eq=False)
class Exchanged:
    """What a worker answers."""

    rank: int
    applied: Version
    coefficients_hash: str
    """Of the set in force after the order was applied: ranks that differ must not go on so."""
    rounds: list[Round]
    """One for each version that graded something since the last call, oldest first."""


# What travels. A version is [epoch, number]; unknown keys are an error.


class _Wire(Struct, forbid_unknown_fields=True):
    pass


class _Coefficients(_Wire):
    version: tuple[Count, Count]
    source: Source
    slope: float
    intercepts: list[float]
    strata: Annotated[dict[Stratum, list[float]], Meta(max_length=MAX_STRATA)] = {}


class _Policy(_Wire):
    policy: Policy
    length: int | None = None


class _Exploration(_Wire):
    share: Annotated[float, Meta(ge=0.0, le=1.0)]
    seconds: Annotated[float, Meta(gt=0.0)]


class _Order(_Wire):
    coefficients: _Coefficients | None = None
    policy: _Policy | None = None
    exploration: _Exploration | None = None


class _Stratum(_Wire):
    intercepts: list[float]
    statistics: list[list[float]]
    """[K, 6]."""
    sketch: str
    """`Sketch.pack()` in hexadecimal."""


class _Round(_Wire):
    graded: tuple[Count, Count]
    slope: float
    strata: Annotated[dict[Stratum, _Stratum], Meta(max_length=MAX_STRATA)]
    admitted: list[Count]
    steps: Count
    explored_steps: Count
    skipped: dict[Name, Count]


class _Exchanged(_Wire):
    rank: Count
    applied: tuple[Count, Count]
    coefficients_hash: str
    rounds: list[_Round]


def read_order(order: Mapping[str, Any], positions: int) -> Order:
    """An order for a pair with K = `positions`.

    Raises:
        OrderError: anything in it is unknown, of the wrong type or length, not finite or out of
            range; it names the rule and the value.

    >>> read_order({"policy": {"policy": "fixed", "length": 2}}, positions=7).policy.length
    2
    """
    try:
        wire = msgspec.convert(order, _Order)
    except msgspec.ValidationError as error:
        raise OrderError(f"not an order: {error}") from error
    return Order(
        coefficients=_read_coefficients(wire.coefficients, positions)
        if wire.coefficients
        else None,
        policy=_read_policy(wire.policy, positions) if wire.policy else None,
        exploration=_read_exploration(wire.exploration) if wire.exploration else None,
    )


def write_order(order: Order) -> dict[str, Any]:
    """The inverse of `read_order`."""
    written: dict[str, Any] = {}
    if order.coefficients is not None:
        written["coefficients"] = write_coefficients(order.coefficients)
    if order.policy is not None:
        written["policy"] = msgspec.to_builtins(order.policy)
    if order.exploration is not None:
        written["exploration"] = msgspec.to_builtins(order.exploration)
    return written


def write_coefficients(coefficients: CoefficientSet) -> dict[str, Any]:
    """A coefficient set in plain types."""
    return {
        "version": write_version(coefficients.version),
        "source": coefficients.source.value,
        "slope": float(coefficients.slope),
        "intercepts": [float(b) for b in coefficients.intercepts],
        "strata": {s: [float(b) for b in row] for s, row in coefficients.strata.items()},
    }


def write_version(version: Version) -> list[int]:
    """[epoch, number]."""
    return [version.epoch, version.number]


def coefficients_hash(coefficients: CoefficientSet) -> str:
    """Equal for sets of equal version and bit-identical values, whatever their strata's order."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(encode_array([coefficients.version.epoch, coefficients.version.number]))
    digest.update(encode_array([coefficients.slope, *coefficients.intercepts]))
    for stratum in sorted(coefficients.strata):
        digest.update(stratum.encode() + b"\0" + encode_array(coefficients.strata[stratum]))
    return digest.hexdigest()


def write_exchanged(answer: Exchanged) -> dict[str, Any]:
    """A worker's answer in plain types. Raises OverflowError as `Sketch.pack` does."""
    return {
        "rank": answer.rank,
        "applied": write_version(answer.applied),
        "coefficients_hash": answer.coefficients_hash,
        "rounds": [_write_round(round_) for round_ in answer.rounds],
    }


def read_exchanged(answer: Mapping[str, Any], positions: int) -> Exchanged:
    """The inverse of `write_exchanged` for a pair with K = `positions`.

    Raises:
        RoundError: it is not that. Whether the sums are possible is for the estimator to judge.
    """
    try:
        wire = msgspec.convert(answer, _Exchanged)
        rounds = [_read_round(round_, positions) for round_ in wire.rounds]
    except (msgspec.ValidationError, ValueError) as error:
        raise RoundError(f"not a worker's answer: {error}") from error
    return Exchanged(wire.rank, Version(*wire.applied), wire.coefficients_hash, rounds)


def _read_coefficients(wire: _Coefficients, positions: int) -> CoefficientSet:
    _check_range("slope", wire.slope, 0.0, MAX_SLOPE)
    _check_intercepts("intercepts", wire.intercepts, positions)
    for stratum, intercepts in wire.strata.items():
        _check_intercepts(f"strata.{stratum}", intercepts, positions)
    return CoefficientSet(
        version=Version(*wire.version),
        source=wire.source,
        slope=wire.slope,
        intercepts=tuple(wire.intercepts),
        strata={stratum: tuple(row) for stratum, row in wire.strata.items()},
    )


def _read_policy(wire: _Policy, positions: int) -> PolicyOrder:
    order = PolicyOrder(wire.policy, wire.length)
    check_policy(order, positions)
    return order


def _read_exploration(wire: _Exploration) -> ExplorationOrder:
    if not math.isfinite(wire.seconds):
        raise OrderError(f"exploration.seconds must be finite, got {wire.seconds}")
    return ExplorationOrder(wire.share, wire.seconds)


def _check_intercepts(name: str, values: Sequence[float], positions: int) -> None:
    if len(values) != positions:
        raise OrderError(f"{name} must have {positions} values, got {len(values)}")
    for k, value in enumerate(values):
        _check_range(f"{name}[{k}]", value, -MAX_INTERCEPT, MAX_INTERCEPT)


def _check_range(name: str, value: float, least: float, most: float) -> None:
    # Written so that NaN fails.
    if not least <= value <= most:
        raise OrderError(f"{name} must be in {least:g}..{most:g}, got {value}")


def _write_round(round_: Round) -> dict[str, Any]:
    return {
        "graded": write_version(round_.graded),
        "slope": float(round_.slope),
        "strata": {
            stratum: {
                "intercepts": [float(b) for b in sums.intercepts],
                "statistics": sums.statistics.sums.tolist(),
                "sketch": sums.sketch.pack().hex(),
            }
            for stratum, sums in round_.strata.items()
        },
        "admitted": [int(n) for n in round_.admitted],
        "steps": int(round_.steps),
        "explored_steps": int(round_.explored_steps),
        "skipped": {reason: int(n) for reason, n in round_.skipped.items()},
    }


def _read_round(wire: _Round, positions: int) -> Round:
    if wire.admitted and len(wire.admitted) != positions:
        raise RoundError(f"admitted must have {positions} values, got {len(wire.admitted)}")
    return Round(
        graded=Version(*wire.graded),
        slope=wire.slope,
        strata={name: _read_stratum(name, part, positions) for name, part in wire.strata.items()},
        admitted=tuple(wire.admitted),
        steps=wire.steps,
        explored_steps=wire.explored_steps,
        skipped=wire.skipped,
    )


def _read_stratum(name: str, wire: _Stratum, positions: int) -> StratumSums:
    if len(wire.intercepts) != positions:
        raise RoundError(
            f"stratum {name}: intercepts must have {positions} values, got {len(wire.intercepts)}"
        )
    if len(wire.statistics) != positions or any(len(row) != WIDTH for row in wire.statistics):
        raise RoundError(f"stratum {name}: statistics must be [{positions}, {WIDTH}]")
    return StratumSums(
        intercepts=tuple(wire.intercepts),
        statistics=Statistics(np.array(wire.statistics, dtype=np.float64)),
        sketch=Sketch.unpack(positions, bytes.fromhex(wire.sketch)),
    )
