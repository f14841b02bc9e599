"""An order is carried out as it was meant, or refused with nothing changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator_service.config import EstimatorConfig
from estimator_service.estimator import Estimator
from estimator_service.irls import MAX_INTERCEPT, MAX_SLOPE
from estimator_service.messages import (
    CoefficientSet,
    FrameStatus,
    Override,
    Pinned,
    Policy,
    PolicyOrder,
    Version,
)
from estimator_service.orders import (
    OrderError,
    UnknownPairError,
    UnknownReplicaError,
    UnknownVersionError,
    check_policy,
    check_seconds,
    check_words,
    resolve_pins,
)
from estimator_service.store import Store
from tests.estimator_service.fleet import PAIR, ManualClock, Truth, frame_of

K = 3
STRATA = ("sampled", "greedy")
NAN = math.nan
UNREASONABLE = (math.nan, math.inf, -math.inf, 1e308, -1e308)
quick = settings(deadline=None)


# Pins

intercepts = st.dictionaries(
    st.integers(0, K - 1), st.floats(-MAX_INTERCEPT, MAX_INTERCEPT), max_size=K
)
pinned = st.builds(
    Pinned,
    slope=st.none() | st.floats(0.0, MAX_SLOPE),
    intercepts=intercepts,
    strata=st.dictionaries(st.sampled_from(STRATA), intercepts),
).filter(lambda p: p.slope is not None or p.intercepts or any(p.strata.values()))


@quick
@given(pinned)
def test_a_stratums_own_pin_goes_before_the_pairs_and_the_rest_is_free(pinned: Pinned) -> None:
    pins = resolve_pins(pinned, STRATA, K)
    assert pins.intercepts.shape == (K,)
    assert pins.strata.shape == (len(STRATA), K)
    assert (None if math.isnan(pins.slope) else pins.slope) == pinned.slope
    for k in range(K):
        pair = pinned.intercepts.get(k, NAN)
        assert np.array_equal(pins.intercepts[k], pair, equal_nan=True)
        for s, stratum in enumerate(STRATA):
            own = pinned.strata.get(stratum, {}).get(k, pair)
            assert np.array_equal(pins.strata[s, k], own, equal_nan=True)


def test_a_pin_needs_no_stratum_to_have_come_yet() -> None:
    pins = resolve_pins(Pinned(slope=0.0, intercepts={0: -20.0, 2: 20.0}), (), K)
    assert pins.slope == 0.0
    assert np.array_equal(pins.intercepts, [-20.0, NAN, 20.0], equal_nan=True)
    assert pins.strata.shape == (0, K)


@pytest.mark.parametrize(
    "empty",
    [
        Pinned(),
        Pinned(slope=None, intercepts={}, strata={}),
        Pinned(strata={"sampled": {}}),
        Pinned(strata={"sampled": {}, "greedy": {}}),
    ],
)
def test_an_override_that_pins_nothing_is_refused(empty: Pinned) -> None:
    with pytest.raises(OrderError, match="an override must pin something"):
        resolve_pins(empty, STRATA, K)


@pytest.mark.parametrize("value", [*UNREASONABLE, -1e-9, 20.0001])
def test_a_slope_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(OrderError) as refused:
        resolve_pins(Pinned(slope=value), STRATA, K)
    assert str(refused.value) == f"slope must be in 0..20, got {value}"


@pytest.mark.parametrize("value", [*UNREASONABLE, -20.0001, 20.0001])
@pytest.mark.parametrize("position", range(K))
def test_an_intercept_out_of_range_is_refused_by_its_name(position: int, value: float) -> None:
    with pytest.raises(OrderError) as refused:
        resolve_pins(Pinned(intercepts={position: value}), STRATA, K)
    assert str(refused.value) == f"intercepts[{position}] must be in -20..20, got {value}"
    with pytest.raises(OrderError) as refused:
        resolve_pins(Pinned(strata={"greedy": {position: value}}), STRATA, K)
    assert str(refused.value) == f"strata.greedy[{position}] must be in -20..20, got {value}"


@pytest.mark.parametrize("position", [-1, K, K + 1, -K, 2**40])
def test_a_position_that_no_draft_has_is_refused(position: int) -> None:
    for name, pinned in (
        ("intercepts", Pinned(intercepts={0: 0.0, position: 0.0})),
        ("strata.sampled", Pinned(strata={"sampled": {position: 0.0}})),
    ):
        with pytest.raises(OrderError) as refused:
            resolve_pins(pinned, STRATA, K)
        assert str(refused.value) == f"{name}: position must be in 0..{K - 1}, got {position}"


def test_a_stratum_that_never_came_is_refused_and_the_known_ones_are_named() -> None:
    unknown = Pinned(strata={"sampled": {0: 0.0}, "greeedy": {0: 0.0}})
    with pytest.raises(OrderError, match=r"no stratum 'greeedy'; there are sampled, greedy"):
        resolve_pins(unknown, STRATA, K)
    with pytest.raises(OrderError, match=r"there are none"):
        resolve_pins(unknown, (), K)


# Policies


@pytest.mark.parametrize("length", range(K + 1))
def test_a_fixed_policy_takes_any_length_of_a_draft(length: int) -> None:
    check_policy(PolicyOrder(Policy.FIXED, length), K)


@pytest.mark.parametrize("length", [-1, K + 1, 2**40])
def test_a_length_that_no_draft_has_is_refused(length: int) -> None:
    with pytest.raises(OrderError) as refused:
        check_policy(PolicyOrder(Policy.FIXED, length), K)
    assert str(refused.value) == f"length must be in 0..{K}, got {length}"


@pytest.mark.parametrize("policy", Policy)
def test_a_length_goes_with_the_fixed_policy_and_no_other(policy: Policy) -> None:
    fixed = policy is Policy.FIXED
    check_policy(PolicyOrder(policy, 2 if fixed else None), K)
    with pytest.raises(OrderError, match="fixed needs a length"):
        check_policy(PolicyOrder(policy, None if fixed else 2), K)


# Words and seconds


@pytest.mark.parametrize(
    ("actor", "reason"),
    [
        ("ann", "because"),
        ("a" * 128, "r" * 1000),
        ("Jürgen ✓", "two\nlines\x00"),
        (" a ", "\u2028x"),
    ],
)
def test_people_may_write_what_they_like(actor: str, reason: str) -> None:
    check_words(actor, reason)


@pytest.mark.parametrize(
    ("actor", "reason", "message"),
    [
        ("", "because", "actor must say something, got ''"),
        (" \t\n", "because", "actor must say something"),
        ("ann", "", "reason must say something, got ''"),
        ("ann", "   ", "reason must say something, got '   '"),
        ("a" * 129, "because", "actor must have 1 to 128 characters, got 129"),
        ("ann", "r" * 1001, "reason must have 1 to 1000 characters, got 1001"),
        ("ann\nroot", "because", "actor must have no control characters"),
        ("ann\x00", "because", "actor must have no control characters"),
        ("ann\x7f", "because", "actor must have no control characters"),
        ("ann\n", "because", "actor must have no control characters"),
        ("a\ud800", "because", "actor must be encodable as UTF-8"),
        ("ann", "\udfff", "reason must be encodable as UTF-8"),
    ],
)
def test_an_order_says_who_and_why(actor: str, reason: str, message: str) -> None:
    with pytest.raises(OrderError) as refused:
        check_words(actor, reason)
    assert message in str(refused.value)


@quick
@given(st.text(max_size=140), st.text(max_size=40))
def test_words_that_pass_can_be_stored_and_read_back(actor: str, reason: str) -> None:
    # Else one order would keep the estimator from storing anything, or from starting again.
    try:
        check_words(actor, reason)
    except OrderError:
        return
    override = Override(
        pins=Pinned(slope=0.5), actor=actor, reason=reason, created_at=0.0, expires_at=1.0
    )
    assert msgspec.json.decode(msgspec.json.encode(override), type=Override) == override


@pytest.mark.parametrize("seconds", [5e-324, 0.5, 3600.0])
def test_a_time_to_live_may_be_anything_up_to_the_most(seconds: float) -> None:
    check_seconds("ttl_seconds", seconds, 3600.0)


@pytest.mark.parametrize("seconds", [0.0, -0.0, -1.0, 3600.001, 1e12, *UNREASONABLE])
def test_a_time_to_live_out_of_range_is_refused(seconds: float) -> None:
    with pytest.raises(OrderError) as refused:
        check_seconds("ttl_seconds", seconds, 3600.0)
    assert str(refused.value) == f"ttl_seconds must be above 0 and at most 3600, got {seconds}"


# Through the estimator: all or nothing

WHO = {"actor": "ann", "reason": "test"}
TTL = 600.0


@pytest.fixture
def store() -> Iterator[Store]:
    with closing(Store.open("sqlite://")) as store:
        yield store


@pytest.fixture
def estimator(store: Store) -> Estimator:
    """One that has fitted two strata of replica-0."""
    truth, rng = Truth(0.7, (0.3,) * 7), np.random.default_rng(1)
    labels = {stratum: truth.drafts(rng, 300) for stratum in STRATA}
    estimator = Estimator(store, EstimatorConfig(), ManualClock())
    estimator.register(PAIR)
    estimator.submit(frame_of(labels, CoefficientSet.initial(7)))
    estimator.refit()
    estimator.checkpoint()
    assert estimator.coefficients(PAIR.id).version == Version(1, 1)
    return estimator


Order = Callable[[Estimator], object]


def override(pins: Pinned, ttl_seconds: float = TTL, pair: str = PAIR.id, **who: str) -> Order:
    return lambda e: e.override(pair, pins, ttl_seconds=ttl_seconds, **(WHO | who))


SLOPE = Pinned(slope=1.0)
REFUSED: dict[str, tuple[type[OrderError], Order]] = {
    "nothing pinned": (OrderError, override(Pinned())),
    "a huge slope": (OrderError, override(Pinned(slope=1e308))),
    "an intercept that is no number": (OrderError, override(Pinned(intercepts={0: NAN}))),
    "position K": (OrderError, override(Pinned(intercepts={7: 0.0}))),
    "an unknown stratum": (OrderError, override(Pinned(strata={"other": {0: 0.0}}))),
    "no time to live": (OrderError, override(SLOPE, 0.0)),
    "a time to live of ages": (OrderError, override(SLOPE, 1e12)),
    "a time to live that is no number": (OrderError, override(SLOPE, NAN)),
    "no actor": (OrderError, override(SLOPE, actor=" ")),
    "no reason": (OrderError, override(SLOPE, reason="")),
    "a reason that cannot be stored": (OrderError, override(SLOPE, reason="\ud800")),
    "an actor that cannot be read back": (OrderError, override(SLOPE, actor="a\nb")),
    "an override of an unknown pair": (UnknownPairError, override(SLOPE, pair="nope")),
    "a release of no override": (OrderError, lambda e: e.release(PAIR.id, **WHO)),
    "a release of an unknown pair": (UnknownPairError, lambda e: e.release("nope", **WHO)),
    "a freeze of an unknown pair": (UnknownPairError, lambda e: e.freeze("nope", True, **WHO)),
    "a freeze without a reason": (
        OrderError,
        lambda e: e.freeze(PAIR.id, True, actor="ann", reason=""),
    ),
    "a length without the fixed policy": (
        OrderError,
        lambda e: e.policy(PAIR.id, PolicyOrder(Policy.FULL, 3), **WHO),
    ),
    "a length beyond K": (
        OrderError,
        lambda e: e.policy(PAIR.id, PolicyOrder(Policy.FIXED, 8), **WHO),
    ),
    "a rollback to an unknown version": (
        UnknownVersionError,
        lambda e: e.rollback(PAIR.id, Version(1, 99), **WHO),
    ),
    "a rollback of an unknown pair": (
        UnknownPairError,
        lambda e: e.rollback("nope", Version(), **WHO),
    ),
    "a hold of an unknown replica": (
        UnknownReplicaError,
        lambda e: e.hold(PAIR.id, "nobody", **WHO),
    ),
    "a clearing of an unknown replica": (
        UnknownReplicaError,
        lambda e: e.clear(PAIR.id, "nobody", **WHO),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_order_changes_nothing(estimator: Estimator, what: str) -> None:
    error, order = REFUSED[what]
    before = estimator.snapshot(), estimator.prepare()
    with pytest.raises(error):
        order(estimator)
    assert (estimator.snapshot(), estimator.prepare()) == before


def test_a_version_beyond_every_column_is_an_unknown_version(estimator: Estimator) -> None:
    for version in (Version(2**63, 1), Version(1, 2**63), Version(2**200, 0)):
        with pytest.raises(UnknownVersionError):
            estimator.rollback(PAIR.id, version, **WHO)


CARRIED_OUT: dict[str, Order] = {
    "an override": override(Pinned(slope=0.9, intercepts={6: -1.0}, strata={"greedy": {0: 2.0}})),
    "an override with any words": override(SLOPE, actor="Jürgen ✓", reason="two\nlines\x00"),
    "a policy": lambda e: e.policy(PAIR.id, PolicyOrder(Policy.FIXED, 0), **WHO),
    "a freeze": lambda e: e.freeze(PAIR.id, True, **WHO),
    "a rollback": lambda e: e.rollback(PAIR.id, Version(), **WHO),
}


@pytest.mark.parametrize("what", CARRIED_OUT)
def test_an_order_holds_after_a_restart(store: Store, estimator: Estimator, what: str) -> None:
    CARRIED_OUT[what](estimator)
    estimator.checkpoint()
    [before] = estimator.snapshot().pairs
    [after] = Estimator(store, EstimatorConfig(), ManualClock()).snapshot().pairs
    assert (after.override, after.policy, after.frozen) == (
        before.override,
        before.policy,
        before.frozen,
    )
    assert after.coefficients.version > before.coefficients.version
    in_force = msgspec.structs.replace(after.coefficients, version=before.coefficients.version)
    assert in_force == before.coefficients


def test_a_replica_held_before_a_restart_is_held_after_it(
    store: Store, estimator: Estimator
) -> None:
    estimator.hold(PAIR.id, "replica-0", **WHO)
    estimator.checkpoint()
    again = Estimator(store, EstimatorConfig(), ManualClock())
    frame = frame_of({}, CoefficientSet.initial(7), seq=2)
    assert again.submit(frame).status is FrameStatus.QUARANTINED
    again.clear(PAIR.id, "replica-0", **WHO)
    frame = frame_of({}, CoefficientSet.initial(7), seq=3)
    assert again.submit(frame).status is FrameStatus.MERGED
