"""What crosses a process comes out as it went in, and nothing else comes out."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from estimator_service.logistic import INITIAL_INTERCEPT, INITIAL_SLOPE, predict
from estimator_service.messages import (
    MAX_POSITIONS,
    MAX_STRATA,
    SCHEMA,
    CoefficientSet,
    Frame,
    FrameStatus,
    MalformedMessageError,
    PairKey,
    Reply,
    Snapshot,
    Source,
    StratumRound,
    UnknownSchemaError,
    Version,
    decode,
    decode_array,
    encode,
    encode_array,
)
from estimator_service.sketch import ACCEPTED, BINS, COUNT, EDGES, OFFSET, Sketch
from estimator_service.statistics import Statistics
from tests.estimator_service.fleet import Truth, frame_of

KINDS: tuple[type[Any], ...] = (Frame, Reply, Snapshot)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.lower())
moderate = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
thorough = settings(moderate, max_examples=200)
SIXTEEN_KIB = 16 * 1024

HEARTBEAT = Frame(
    pair="pair",
    replica="replica",
    incarnation=1,
    seq=1,
    oldest=1,
    applied=Version(),
    graded=Version(),
    slope=0.5,
)


# Any message of a kind, from the kind's own declaration

text = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12)
stratum = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,20}", fullmatch=True)


def any_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a type that msgspec describes, within its constraints."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{f.name: any_of(f.type) for f in fields})
        case inspect.IntType(ge=ge, le=le):
            return st.integers(-(2**63) if ge is None else ge, 2**64 - 1 if le is None else le)
        case inspect.FloatType(ge=ge, gt=gt, le=le):
            least = ge if ge is not None else gt
            return st.floats(least, le, exclude_min=gt is not None, allow_nan=False)
        case inspect.StrType(pattern=pattern):
            return stratum if pattern is not None and "A-Z" in pattern else text
        case inspect.BytesType():
            return st.binary(max_size=40)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.UnionType(types=types):
            return st.one_of(*map(any_of, types))
        case inspect.VarTupleType(item_type=item):
            return st.lists(any_of(item), max_size=2).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(any_of(key), any_of(value), max_size=2)
    raise NotImplementedError(kind)


def messages(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any message of `kind` in this schema."""
    return any_of(inspect.type_info(kind)).map(
        lambda message: msgspec.structs.replace(message, schema=SCHEMA)
    )


def with_strangers(raw: Any, kind: inspect.Type) -> Any:
    """A message as plain values, with fields that no reader knows in every struct of it."""
    match kind:
        case inspect.StructType(fields=fields):
            types = {f.encode_name: f.type for f in fields}
            known = {name: with_strangers(value, types[name]) for name, value in raw.items()}
            return {"aardvark": [{"seq": "x"}, None], **known, "schema_of_tomorrow": 2, "": 0.5}
        case inspect.VarTupleType(item_type=item):
            return [with_strangers(value, item) for value in raw]
        case inspect.DictType(value_type=item):
            return {key: with_strangers(value, item) for key, value in raw.items()}
        case inspect.UnionType(types=types) if raw is not None:
            return with_strangers(raw, next(t for t in types if not_none(t)))
    return raw


def not_none(kind: inspect.Type) -> bool:
    return not isinstance(kind, inspect.NoneType)


def plain(message: Any) -> dict[str, Any]:
    """A message as the dictionary that travels."""
    raw: dict[str, Any] = msgspec.msgpack.decode(encode(message))
    return raw


def packed(raw: Any) -> bytes:
    return msgspec.msgpack.encode(raw)


@each_kind
@moderate
@given(data=st.data())
def test_a_message_comes_back_as_it_was_sent(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert decode(encode(message), kind) == message
    assert encode(decode(encode(message), kind)) == encode(message)


@each_kind
@moderate
@given(data=st.data())
def test_fields_that_a_reader_does_not_know_are_ignored_at_every_depth(
    kind: type[Any], data: st.DataObject
) -> None:
    message = data.draw(messages(kind))
    stranger = packed(with_strangers(plain(message), inspect.type_info(kind)))
    assert len(stranger) > len(encode(message))
    assert decode(stranger, kind) == message


@each_kind
@moderate
@given(data=st.data())
def test_fields_that_are_missing_take_their_default(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    raw = plain(message)
    optional = {f.name: f.default for f in msgspec.structs.fields(kind) if not f.required}
    factories = {
        f.name: f.default_factory()
        for f in msgspec.structs.fields(kind)
        if f.default_factory is not msgspec.NODEFAULT
    }
    left_out = data.draw(st.sets(st.sampled_from(sorted(optional | factories))))
    defaults = {name: (optional | factories)[name] for name in left_out}
    read = decode(packed({k: v for k, v in raw.items() if k not in left_out}), kind)
    assert read == msgspec.structs.replace(message, **defaults)


@each_kind
def test_fields_without_a_default_must_be_there(kind: type[Any]) -> None:
    raw = plain(sample(kind))
    for field in msgspec.structs.fields(kind):
        if field.required:
            rest = {name: value for name, value in raw.items() if name != field.name}
            with pytest.raises(MalformedMessageError, match=field.name):
                decode(packed(rest), kind)


def sample(kind: type[Any]) -> Any:
    """One message of a kind."""
    if kind is Frame:
        return HEARTBEAT
    if kind is Reply:
        return Reply(epoch=1, status=FrameStatus.MERGED)
    return Snapshot(epoch=1, taken_at=0.0, pairs=(), unattributed={})


def test_orders_may_be_left_out_of_a_reply() -> None:
    reply = decode(packed({"epoch": 3, "status": "merged"}), Reply)
    assert (reply.schema, reply.durable_seq, reply.coefficients) == (SCHEMA, 0, None)
    assert reply.policy.policy == "adaptive"
    assert reply.exploration is None


# What is no message


@each_kind
def test_another_schema_is_refused_by_name(kind: type[Any]) -> None:
    for schema in (0, SCHEMA + 1, -1, 2**63):
        raw = plain(sample(kind)) | {"schema": schema}
        with pytest.raises(UnknownSchemaError, match=f"schema {schema} is not {SCHEMA}"):
            decode(packed(raw), kind)


@each_kind
def test_another_schema_is_recognized_whatever_else_it_changed(kind: type[Any]) -> None:
    raw = plain(sample(kind))
    for name in raw.keys() - {"schema"}:
        for changed in (None, "7", [1, 2], {"x": 1}, b"\x00"):
            with pytest.raises(UnknownSchemaError):
                decode(packed(raw | {"schema": SCHEMA + 1, name: changed}), kind)
    with pytest.raises(UnknownSchemaError):
        decode(packed({"schema": SCHEMA + 1}), kind)


@pytest.mark.parametrize("schema", [None, "1", 1.5, [1], {"version": 1}])
def test_a_schema_that_is_no_number_is_malformed(schema: object) -> None:
    with pytest.raises(MalformedMessageError):
        decode(packed(plain(HEARTBEAT) | {"schema": schema}), Frame)


def only_typed_errors(data: bytes, kind: type[Any]) -> None:
    """Reads, or raises one of the two errors that reading may raise."""
    try:
        message = decode(data, kind)
    except (MalformedMessageError, UnknownSchemaError):
        return
    assert isinstance(message, kind)
    assert message.schema == SCHEMA


@each_kind
@thorough
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_malformed_and_nothing_worse(kind: type[Any], data: bytes) -> None:
    only_typed_errors(data, kind)


@each_kind
@thorough
@given(data=st.data())
def test_a_damaged_message_is_malformed_and_nothing_worse(
    kind: type[Any], data: st.DataObject
) -> None:
    whole = bytearray(encode(data.draw(messages(kind))))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(start, min(start + 5, len(whole))))
        whole[start:end] = data.draw(st.binary(max_size=5))
    only_typed_errors(bytes(whole), kind)


@each_kind
def test_a_truncated_message_is_malformed_at_every_length(kind: type[Any]) -> None:
    whole = encode(sample(kind))
    for length in range(len(whole)):
        with pytest.raises(MalformedMessageError):
            decode(whole[:length], kind)
    with pytest.raises(MalformedMessageError):
        decode(whole + b"\x00", kind)


def test_a_message_of_one_kind_is_not_one_of_another() -> None:
    for kind in KINDS:
        for other in set(KINDS) - {kind}:
            with pytest.raises(MalformedMessageError, match=f"not a {other.__name__}"):
                decode(encode(sample(kind)), other)


def test_nesting_without_end_is_malformed() -> None:
    for opening in (b"\x91", b"\x81\xa1x"):
        nested = b"\x82\xa6schema\x01\xa1x" + opening * 50_000 + b"\xc0"
        with pytest.raises(MalformedMessageError):
            decode(nested, Frame)


def test_a_length_that_the_bytes_do_not_bear_out_is_malformed() -> None:
    whole = encode(msgspec.structs.replace(HEARTBEAT, admitted=(1,)))
    at = whole.index(b"admitted") + len(b"admitted")
    for claim in (b"\xdd\xff\xff\xff\xff", b"\xdd\x00\xff\xff\xff"):
        with pytest.raises(MalformedMessageError):
            decode(whole[:at] + claim + whole[at + 1 :], Frame)


def limited(name: str, *values: object) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}-{i}") for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *limited("replica", "", "x" * 129, "a\nb", "a\x00", "a\n", "\n", "a\x7f", 7),
        *limited("pair", "", "p\n", "p" * 129),
        *limited("incarnation", 0, -1, 2**62 + 1, 1.5, "1"),
        *limited("seq", 0, -1, 2**62 + 1),
        *limited("oldest", 0, -1, 2**62 + 1),
        *limited("steps", -1, 0.5),
        *limited("admitted", (1, -1), (1.5,), 3),
        *limited("skipped", {"": 1}, {"a": -1}, {"a\n": 1}, {3: 1}),
        *limited("slope", "1", None),
        *limited("strata", {"": {}}, {"a b": {}}, {"sampled": {}}, {"sampled\n": {}}),
    ],
)
def test_a_field_outside_its_limits_is_malformed(field: str, value: object) -> None:
    with pytest.raises(MalformedMessageError, match=field):
        decode(packed(plain(HEARTBEAT) | {field: value}), Frame)


part = {"intercepts": b"", "statistics": b"", "sketch": b""}


@pytest.mark.parametrize("name", ["sampled\n", "a b", "-a", "a/b", "é", "a" * 65, "", "a\x00"])
def test_a_stratum_is_a_word_that_labels_and_urls_can_hold(name: str) -> None:
    with pytest.raises(MalformedMessageError):
        decode(packed(plain(HEARTBEAT) | {"strata": {name: part}}), Frame)


def test_a_frame_names_a_bounded_number_of_strata() -> None:
    strata = {f"s{i}": part for i in range(MAX_STRATA + 1)}
    with pytest.raises(MalformedMessageError):
        decode(packed(plain(HEARTBEAT) | {"strata": strata}), Frame)
    strata.popitem()
    assert len(decode(packed(plain(HEARTBEAT) | {"strata": strata}), Frame).strata) == MAX_STRATA


# Versions, keys, coefficients

versions = st.builds(Version, st.integers(0, 5), st.integers(0, 5))


@moderate
@given(versions, versions)
def test_versions_are_ordered_by_epoch_then_number(one: Version, other: Version) -> None:
    pairs = (one.epoch, one.number), (other.epoch, other.number)
    assert (one < other) == (pairs[0] < pairs[1])
    assert (one == other) == (pairs[0] == pairs[1])
    assert (one > other) == (other < one)


def test_a_later_epoch_is_newer_than_any_number_of_an_earlier_one() -> None:
    assert Version(2, 0) > Version(1, 10**9) > Version(1, 2) > Version(1, 1) > Version()


names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=128)
keys = st.builds(PairKey, names, names, names, st.integers(1, MAX_POSITIONS), names)


@moderate
@given(keys)
def test_a_pairs_id_goes_into_a_url_as_it_is(key: PairKey) -> None:
    assert urllib.parse.quote(key.id, safe="") == key.id
    assert urllib.parse.urljoin("http://host/v1/pairs/", key.id) == f"http://host/v1/pairs/{key.id}"
    assert decode(encode(msgspec.structs.replace(HEARTBEAT, pair=key.id)), Frame).pair == key.id


@moderate
@given(keys, keys)
def test_distinct_keys_have_distinct_ids(one: PairKey, other: PairKey) -> None:
    assert (one.id == other.id) == (one == other)


@moderate
@given(keys, st.data())
def test_keys_that_differ_in_one_field_have_distinct_ids(key: PairKey, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(PairKey.__struct_fields__))
    other = msgspec.structs.replace(key, **{field: getattr(data.draw(keys), field)})
    assert (key.id == other.id) == (key == other)


def test_what_a_slug_leaves_out_still_tells_keys_apart() -> None:
    alike = [
        PairKey("org/Target", "draft", "eagle3", 7),
        PairKey("other/Target", "draft", "eagle3", 7),
        PairKey("org/target", "draft", "eagle3", 7),
        PairKey("org/Target", "draft", "EAGLE3", 7),
        PairKey("org/Target", "draft ", "eagle3", 7),
        PairKey("org/Target", "draft", "eagle3", 7, "greedy"),
        PairKey("org/Target", "drafteagle3", "eagle3", 7),
        PairKey("org/" + "T" * 60, "draft", "eagle3", 7),
        PairKey("org/" + "T" * 61, "draft", "eagle3", 7),
    ]
    assert len({key.id for key in alike}) == len(alike)


def test_an_id_depends_on_the_key_alone() -> None:
    # Stored rows, dashboards and URLs hold it: another formula is another schema.
    assert PairKey("org/Target-8B", "org/Draft", "eagle3", 7).id == "target-8b-eagle3-k7-3d3c7db0"


def test_a_pair_starts_from_the_cold_start_in_every_stratum() -> None:
    initial = CoefficientSet.initial(3)
    assert (initial.version, initial.source) == (Version(0, 0), Source.INITIAL)
    assert initial.slope == INITIAL_SLOPE
    assert initial.intercepts == (INITIAL_INTERCEPT,) * 3
    assert initial.intercepts_of("sampled") == initial.intercepts
    assert initial.version < Version(1, 1)


def test_a_stratum_without_intercepts_of_its_own_uses_the_pairs() -> None:
    fitted = CoefficientSet(Version(1, 1), Source.FITTED, 1.0, (0.1,), {"greedy": (0.9,)})
    assert fitted.intercepts_of("greedy") == (0.9,)
    assert fitted.intercepts_of("sampled") == (0.1,)


@moderate
@given(st.lists(st.floats(allow_nan=False)))
def test_arrays_come_back_bit_by_bit(values: list[float]) -> None:
    encoded = encode_array(values)
    assert len(encoded) == 8 * len(values)
    assert decode_array(encoded).tobytes() == np.array(values, dtype="<f8").tobytes()


@moderate
@given(st.binary(max_size=40).filter(lambda data: len(data) % 8 != 0))
def test_an_array_of_a_broken_length_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="size"):
        decode_array(data)


# Size


def widest(positions: int, labels: int) -> StratumRound:
    """A round whose sketch has `labels` labels in every cell, each with the costliest feature."""
    cells = np.empty((3, positions, BINS))
    cells[[COUNT, ACCEPTED]] = labels
    cells[OFFSET] = labels * np.rint(64.0 * np.diff(EDGES))
    sums = np.full((positions, 6), np.pi)
    intercepts = np.full(positions, np.e)
    return StratumRound(encode_array(intercepts), encode_array(sums), Sketch(cells).pack())


def second(positions: int) -> Frame:
    """A busy second: 16 requests, 60 steps, half of them sampled."""
    rng, truth = np.random.default_rng(7), Truth(0.7, tuple(np.linspace(0.5, -0.5, positions)))
    strata = {name: truth.drafts(rng, 480) for name in ("sampled", "greedy")}
    return frame_of(strata, CoefficientSet.initial(positions), steps=60)


def dressed(frame: Frame, positions: int, name: Callable[[str], str]) -> Frame:
    """The same frame with every other field at its widest."""
    return msgspec.structs.replace(
        frame,
        replica="r" * 128,
        incarnation=2**62,
        seq=2**62,
        oldest=2**62,
        applied=Version(2**40, 2**40),
        graded=Version(2**40, 2**40),
        strata={name(stratum): part for stratum, part in frame.strata.items()},
        admitted=(2**40,) * positions,
        steps=2**40,
        explored_steps=2**40,
        skipped={f"{reason:_<24}": 2**40 for reason in "abcdefgh"},
    )


def test_a_frame_of_16_positions_stays_under_16_kib() -> None:
    positions = 16
    typical = second(positions)
    full = {name: widest(positions, labels=65_535) for name in ("sampled", "greedy")}
    worst = msgspec.structs.replace(typical, strata=full)
    extreme = dressed(worst, positions, lambda stratum: f"{stratum:w<64}")
    one = {"sampled": widest(positions, labels=2_300_000)}
    hours = dressed(msgspec.structs.replace(typical, strata=one), positions, str)
    sizes = {
        "a busy second, two strata": typical,
        "every cell in use, 65,535 labels in each": worst,
        "the same, every name and number at its widest": extreme,
        "one stratum, 2.3 million labels in every cell": hours,
    }
    for what, frame in sizes.items():
        encoded = encode(frame)
        print(f"K=16, {what}: {len(encoded):,} bytes of {SIXTEEN_KIB:,}")
        assert decode(encoded, Frame) == frame
        assert len(encoded) < SIXTEEN_KIB


def test_a_sketch_at_its_widest_survives_the_wire() -> None:
    round_ = widest(16, labels=65_535)
    assert Sketch.unpack(16, round_.sketch).observations.tolist() == [65_535.0 * BINS] * 16


def test_a_frame_grades_with_the_very_floats_that_were_published() -> None:
    coefficients = CoefficientSet(Version(1, 1), Source.FITTED, 1 / 3, (0.1 + 0.2, 1e-17))
    labels = Truth(1.0, (0.0, 0.0)).drafts(np.random.default_rng(0), 20)
    frame = decode(encode(frame_of({"sampled": labels}, coefficients)), Frame)
    intercepts = decode_array(frame.strata["sampled"].intercepts)
    assert (frame.slope, tuple(intercepts.tolist())) == (1 / 3, (0.1 + 0.2, 1e-17))
    k = labels.position.astype(np.intp)
    p = predict(frame.slope, intercepts[k], labels.features)
    again = Statistics.of(2, k, labels.features, labels.accepted, p)
    assert frame.strata["sampled"].statistics == encode_array(again.sums)
