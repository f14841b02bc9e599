"""What an operator may order, and the errors of ordering something else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from estimator_service.irls import MAX_INTERCEPT, MAX_SLOPE
from estimator_service.messages import Pinned, Policy, PolicyOrder, Version
from estimator_service.parameters import Pins


class OrderError(ValueError):
    """An order that cannot be carried out; nothing has changed."""


class UnknownPairError(OrderError):
    """No such pair."""

    def __init__(self, pair: str) -> None:
        super().__init__(f"no pair {pair!r}")


class UnknownVersionError(OrderError):
    """No such version of the pair, or none of its number of positions."""

    def __init__(self, pair: str, version: Version) -> None:
        super().__init__(f"pair {pair!r} has no version {version}")


class UnknownReplicaError(OrderError):
    """No such replica of the pair."""

    def __init__(self, pair: str, replica: str) -> None:
        super().__init__(f"pair {pair!r} has no replica {replica!r}")


def resolve_pins(pinned: Pinned, strata: Sequence[str], positions: int) -> Pins:
    """Pins as arrays over `strata` (S) and K = `positions`.

    A pair's pinned intercept is every stratum's; a stratum's own pin goes before it.

    Raises:
        OrderError: nothing pinned, a value not finite or out of range, an unknown position or
            stratum.
    """
    if pinned.slope is None and not pinned.intercepts and not any(pinned.strata.values()):
        raise OrderError("an override must pin something")
    pins = Pins.none(len(strata), positions)
    slope = float("nan")
    if pinned.slope is not None:
        slope = _bounded("slope", pinned.slope, 0.0, MAX_SLOPE)
    for k, value in _intercepts("intercepts", pinned.intercepts, positions).items():
        pins.intercepts[k] = value
        pins.strata[:, k] = value
    for stratum, by_position in pinned.strata.items():
        if stratum not in strata:
            raise OrderError(f"no stratum {stratum!r}; there are {', '.join(strata) or 'none'}")
        for k, value in _intercepts(f"strata.{stratum}", by_position, positions).items():
            pins.strata[strata.index(stratum), k] = value
    return Pins(slope, pins.intercepts, pins.strata)


def check_policy(order: PolicyOrder, positions: int) -> None:
    """Raises OrderError if the policy does not fit K = `positions`."""
    fixed = order.policy is Policy.FIXED
    if fixed != (order.length is not None):
        raise OrderError("policy fixed needs a length, and the others take none")
    if order.length is not None and not 0 <= order.length <= positions:
        raise OrderError(f"length must be in 0..{positions}, got {order.length}")


def check_words(actor: str, reason: str) -> None:
    """Raises OrderError unless it is said who orders something, and why.

    What passes can be stored and read back: an order that could not would keep the estimator from
    storing anything, or from starting again.
    """
    for name, text, most in (("actor", actor, 128), ("reason", reason, 1000)):
        if not text.strip():
            raise OrderError(f"{name} must say something, got {text!r}")
        if len(text) > most:
            raise OrderError(f"{name} must have 1 to {most} characters, got {len(text)}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise OrderError(f"{name} must be encodable as UTF-8, got {text!r}")
    if any(character < " " or character == "\x7f" for character in actor):
        raise OrderError(f"actor must have no control characters, got {actor!r}")


def check_seconds(name: str, value: float, most: float) -> None:
    """Raises OrderError unless 0 < value <= most."""
    if not (math.isfinite(value) and 0.0 < value <= most):
        raise OrderError(f"{name} must be above 0 and at most {most:g}, got {value}")


def _intercepts(name: str, values: Mapping[int, float], positions: int) -> dict[int, float]:
    for k in values:
        if not 0 <= k < positions:
            raise OrderError(f"{name}: position must be in 0..{positions - 1}, got {k}")
    return {
        k: _bounded(f"{name}[{k}]", v, -MAX_INTERCEPT, MAX_INTERCEPT) for k, v in values.items()
    }


def _bounded(name: str, value: float, least: float, most: float) -> float:
    if not (np.isfinite(value) and least <= value <= most):
        raise OrderError(f"{name} must be in {least:g}..{most:g}, got {value}")
    return float(value)
