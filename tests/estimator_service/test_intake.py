"""Every frame honestly made is let in; a refused one leaves no trace but its count."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from estimator_service.config import (
    DriftConfig,
    EstimatorConfig,
    ExplorationConfig,
    FitConfig,
    TrustConfig,
)
from estimator_service.delivery import WINDOW
from estimator_service.estimator import Estimator
from estimator_service.intake import MAX_LABELS, CheckedRound, FrameRefused, check_frame
from estimator_service.logistic import MAX_LOG_ODDS, Array, predict
from estimator_service.messages import (
    CoefficientSet,
    Frame,
    FrameStatus,
    PairKey,
    PairSnapshot,
    Refusal,
    Source,
    StratumRound,
    Version,
    decode_array,
    encode,
    encode_array,
)
from estimator_service.records import EvidenceRecord
from estimator_service.sketch import ACCEPTED as ACCEPTED_COLUMN
from estimator_service.sketch import BINS, COUNT, OFFSET, Sketch, SketchFormatError, read_packed
from estimator_service.statistics import G0, G1, A, B, C, N
from estimator_service.store import Store
from estimator_service.tally import MAX_SKIP_REASONS
from tests.estimator_service.fleet import Labels, ManualClock, Truth, frame_of

K = 3
KEY = PairKey("org/target", "org/draft", "draft_model", K)
INITIAL = CoefficientSet.initial(K)
NOT_FINITE = (math.nan, math.inf, -math.inf)
moderate = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])


# Honest frames

features = st.one_of(
    st.floats(-60.0, 60.0),
    st.sampled_from([40.0, -40.0, 0.0, 5e-324, 1e-161, 1e-22, math.nan]),
)
labels = st.lists(st.tuples(st.integers(0, K - 1), features, st.booleans()), max_size=40)
graders = st.builds(
    CoefficientSet,
    st.just(Version(1, 1)),
    st.just(Source.FITTED),
    st.floats(0.0, 20.0),
    st.tuples(*[st.floats(-20.0, 20.0)] * K),
)


def of(drawn: list[tuple[int, float, bool]]) -> Labels:
    columns = np.array(drawn, dtype=np.float64).reshape(-1, 3).T
    return Labels(*columns)


def in_float32(labels: Labels, grader: CoefficientSet) -> StratumRound:
    """What a device makes of labels: every number float32, and sums taken one label at a time."""
    known = np.isfinite(labels.features)
    k = labels.position[known].astype(np.intp)
    f = np.clip(labels.features[known], -MAX_LOG_ODDS, MAX_LOG_ODDS).astype(np.float32)
    y = labels.accepted[known].astype(np.float32)
    slope, intercepts = np.float32(grader.slope), np.array(grader.intercepts, np.float32)
    p = predict(float(slope), intercepts[k], f).astype(np.float32)
    v, r = p * (np.float32(1.0) - p), y - p
    sums = np.zeros((K, 6), np.float32)
    for column, terms in enumerate((v * f * f, v * f, v, r * f, r, np.ones_like(p))):
        for position in range(K):
            running = np.add.accumulate(terms[k == position], dtype=np.float32)
            sums[position, column] = running[-1] if len(running) else 0.0
    return StratumRound(encode_array(intercepts), encode_array(sums), Sketch.of(K, k, f, y).pack())


def only(part: StratumRound, grader: CoefficientSet = INITIAL) -> Frame:
    """A frame of one round."""
    return msgspec.structs.replace(frame_of({}, grader, pair=KEY.id), strata={"sampled": part})


def accepted_in(part: CheckedRound) -> Array:
    """[K], accepted labels in the round's sketch."""
    accepted = part.cells.columns[ACCEPTED_COLUMN]
    return np.bincount(part.cells.cell // BINS, accepted, K).astype(np.float64)


@moderate
@given(labels, labels, graders)
def test_whatever_labels_came_their_frame_is_let_in(
    some: list[tuple[int, float, bool]],
    others: list[tuple[int, float, bool]],
    grader: CoefficientSet,
) -> None:
    strata = {"sampled": of(some), "greedy": of(others)}
    for part in check_frame(frame_of(strata, grader), K):
        mine = strata[part.stratum]
        finite = np.isfinite(mine.features)
        position = mine.position[finite].astype(np.intp)
        assert part.statistics[:, N].tolist() == np.bincount(position, minlength=K).tolist()
        accepted = np.bincount(position, mine.accepted[finite], K)
        assert accepted_in(part).tolist() == accepted.tolist()
        assert part.intercepts.tolist() == list(grader.intercepts)


@moderate
@given(labels, graders)
def test_sums_rounded_to_float32_are_let_in(
    drawn: list[tuple[int, float, bool]], grader: CoefficientSet
) -> None:
    frame = frame_of({"sampled": of(drawn)}, grader)
    part = frame.strata["sampled"]
    rounded = decode_array(part.statistics).astype(np.float32)
    check_frame(only(msgspec.structs.replace(part, statistics=encode_array(rounded))), K)


@moderate
@given(labels, graders)
def test_sums_taken_in_float32_are_let_in(
    drawn: list[tuple[int, float, bool]], grader: CoefficientSet
) -> None:
    check_frame(only(in_float32(of(drawn), grader), grader), K)


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("feature", [40.0, 13.3, 2.7, -7.1])
def test_a_hundred_thousand_equal_labels_in_float32_are_let_in(
    feature: float, slope: float
) -> None:
    # A drafter that is always as certain, as one that proposes one token is: b^2 = a c exactly,
    # and float32 has rounded each of the three in its own direction a hundred thousand times.
    count = 100_000
    grader = CoefficientSet(Version(1, 1), Source.FITTED, slope, (-0.3, 0.1, 0.7))
    position, accepted = np.arange(count) % K, np.arange(count) % 5 > 0
    labels = Labels(
        position.astype(np.float64), np.full(count, feature), accepted.astype(np.float64)
    )
    check_frame(only(in_float32(labels, grader), grader), K)


def test_a_frame_without_labels_is_let_in() -> None:
    assert check_frame(frame_of({}, INITIAL), K) == []
    nothing = frame_of({"sampled": of([])}, INITIAL)
    assert check_frame(nothing, K)[0].statistics[:, N].tolist() == [0.0] * K


def test_coefficients_at_their_bounds_are_let_in() -> None:
    bound = CoefficientSet(Version(1, 1), Source.FITTED, 20.0, (20.0, -20.0, 0.0))
    assert len(check_frame(frame_of({"sampled": of([(0, 1.0, True)])}, bound), K)) == 1


# Broken frames

HONEST = frame_of(
    {"sampled": Truth(0.7, (0.4, 0.2, 0.0)).drafts(np.random.default_rng(3), 40)}, INITIAL
)
PART = HONEST.strata["sampled"]
SUMS: Array = decode_array(PART.statistics).reshape(K, 6)


def with_part(**changes: bytes) -> Frame:
    return only(msgspec.structs.replace(PART, **changes))


def with_sums(sums: Array, sketch: Sketch | None = None) -> Frame:
    packed = PART.sketch if sketch is None else sketch.pack()
    return with_part(statistics=encode_array(sums), sketch=packed)


def refusal(frame: Frame) -> FrameRefused:
    """How `frame` is refused; that it is refused."""
    with pytest.raises(FrameRefused) as caught:
        check_frame(frame, K)
    assert str(caught.value) == f"{caught.value.reason.value}: {caught.value.detail}"
    return caught.value


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("column", [A, B, C, G0, G1, N])
@pytest.mark.parametrize("position", range(K))
def test_a_sum_that_is_not_finite_is_refused(position: int, column: int, value: float) -> None:
    sums = SUMS.copy()
    sums[position, column] = value
    refused = refusal(with_sums(sums))
    assert refused.reason is Refusal.NOT_FINITE
    assert "sums must be finite" in refused.detail
    assert str(value) in refused.detail


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("position", range(K))
def test_an_intercept_that_is_not_finite_is_refused(position: int, value: float) -> None:
    intercepts = np.array(INITIAL.intercepts)
    intercepts[position] = value
    refused = refusal(with_part(intercepts=encode_array(intercepts)))
    assert refused.reason is Refusal.NOT_FINITE
    assert "intercepts must be finite" in refused.detail
    assert str(value) in refused.detail


@pytest.mark.parametrize("value", [*NOT_FINITE, -1e-9, 20.001, 1e308])
def test_a_slope_out_of_range_is_refused(value: float) -> None:
    refused = refusal(msgspec.structs.replace(HONEST, slope=value))
    assert refused.reason is Refusal.OUT_OF_RANGE
    assert refused.detail == f"slope must be in 0..20, got {value}"


@pytest.mark.parametrize("value", [20.001, -20.001, 1e308, -1e308])
@pytest.mark.parametrize("position", range(K))
def test_an_intercept_out_of_range_is_refused(position: int, value: float) -> None:
    intercepts = np.array(INITIAL.intercepts)
    intercepts[position] = value
    refused = refusal(with_part(intercepts=encode_array(intercepts)))
    assert refused.reason is Refusal.OUT_OF_RANGE
    assert "intercepts must be in -20..20" in refused.detail
    assert str(value) in refused.detail


@pytest.mark.parametrize("field", ["intercepts", "statistics"])
@pytest.mark.parametrize("change", [-1, 1, -8, 8, -48, 48, 10_000])
def test_an_array_of_another_length_is_refused(field: str, change: int) -> None:
    whole: bytes = getattr(PART, field)
    other = whole[:change] if change < 0 else whole + bytes(change)
    refused = refusal(with_part(**{field: other}))
    assert refused.reason is Refusal.WRONG_LENGTH
    assert f"{len(other)} " in refused.detail
    assert f"K={K}" in refused.detail


def test_an_empty_array_is_refused() -> None:
    for field in ("intercepts", "statistics"):
        assert refusal(with_part(**{field: b""})).reason is Refusal.WRONG_LENGTH
    assert refusal(with_part(sketch=b"")).reason is Refusal.MALFORMED


@pytest.mark.parametrize("positions", [1, K - 1, K + 1, 16])
def test_a_frame_of_another_k_is_refused(positions: int) -> None:
    other = frame_of({"sampled": of([])}, CoefficientSet.initial(positions))
    assert refusal(other).reason is Refusal.WRONG_LENGTH
    sketch = Sketch.empty(positions).pack()
    refused = refusal(with_part(sketch=sketch))
    assert refused.reason is Refusal.MALFORMED
    assert f"{len(sketch)} bytes" in refused.detail


@pytest.mark.parametrize("count", [1, K - 1, K + 1])
def test_admitted_of_another_length_is_refused(count: int) -> None:
    refused = refusal(msgspec.structs.replace(HONEST, admitted=(1,) * count))
    assert refused.reason is Refusal.WRONG_LENGTH
    assert refused.detail == f"admitted has {count} positions, K={K}"


def test_more_steps_explored_than_taken_are_refused() -> None:
    refused = refusal(msgspec.structs.replace(HONEST, steps=3, explored_steps=4))
    assert (refused.reason, refused.detail) == (Refusal.IMPOSSIBLE, "4 of 3 steps explored")


def test_counts_that_no_second_holds_are_refused() -> None:
    # Their sums would be stored for ever, and float64 could not count on from there.
    many = 2**63
    for frame in (
        msgspec.structs.replace(HONEST, steps=many),
        msgspec.structs.replace(HONEST, admitted=(1, many, 1)),
        msgspec.structs.replace(HONEST, skipped={"penalties": 1, "bad_words": many}),
    ):
        refused = refusal(frame)
        assert refused.reason is Refusal.IMPOSSIBLE
        assert refused.detail.endswith(f"must be at most {MAX_LABELS:g}, got {many}")


F = MAX_LOG_ODDS
LABELS, ACCEPTED = 40.0, 10.0
IMPOSSIBLE: list[tuple[str, dict[int, float]]] = [
    ("0 <= n <= 1e+12", {N: -1.0}),
    ("0 <= n <= 1e+12", {N: 2e12}),
    ("0 <= c <= n/4", {A: 0.0, B: 0.0, C: -1e-9}),
    ("0 <= c <= n/4", {C: 0.26 * LABELS}),
    ("0 <= c <= n/4", {A: 0.0, B: 0.0, C: 1e300}),
    ("0 <= a <= F^2 c", {A: -1e-9, B: 0.0}),
    ("0 <= a <= F^2 c", {A: 1.02 * F**2 * 8.0}),
    ("0 <= a <= F^2 c", {A: 1e-9, B: 0.0, C: 0.0}),
    ("b^2 <= a c", {B: 1.02 * math.sqrt(32.0 * 8.0)}),
    ("b^2 <= a c", {B: -1.02 * math.sqrt(32.0 * 8.0)}),
    ("b^2 <= a c", {A: 0.0, B: 1e-9}),
    ("b^2 <= a c", {B: -1e300}),
    ("y - n <= g1 <= y", {G1: ACCEPTED + 0.02 * LABELS}),
    ("y - n <= g1 <= y", {G1: ACCEPTED - 1.02 * LABELS}),
    ("y - n <= g1 <= y", {G1: 1e300}),
    ("|g0| <= F n", {G0: 1.02 * F * LABELS}),
    ("|g0| <= F n", {G0: -1.02 * F * LABELS}),
]


def possible_sums() -> tuple[Array, Sketch]:
    """40 labels at each position, 10 of them accepted, well inside every bound."""
    sums = np.tile([32.0, 4.0, 8.0, 1.0, 1.0, LABELS], (K, 1))
    position = np.repeat(np.arange(K), int(LABELS))
    accepted = np.tile(np.arange(LABELS) < ACCEPTED, K)
    return sums, Sketch.of(K, position, np.full(position.shape, 1.0), accepted)


@pytest.mark.parametrize(("rule", "changes"), IMPOSSIBLE)
@pytest.mark.parametrize("position", [0, K - 1])
def test_sums_that_no_labels_have_are_refused_by_the_rule_they_break(
    position: int, rule: str, changes: dict[int, float]
) -> None:
    sums, sketch = possible_sums()
    check_frame(with_sums(sums, sketch), K)
    sums[position, list(changes)] = list(changes.values())
    refused = refusal(with_sums(sums, sketch))
    assert refused.reason is Refusal.IMPOSSIBLE
    assert f"position {position}: {rule} is broken by" in refused.detail
    for column, value in changes.items():
        assert f"{['a', 'b', 'c', 'g0', 'g1', 'n'][column]}={value:g} " in f"{refused.detail} "


@pytest.mark.parametrize(
    "changes",
    [
        {C: 0.25 * LABELS},
        {A: F**2 * 8.0, B: F * 8.0},
        {B: math.sqrt(32.0 * 8.0)},
        {B: -math.sqrt(32.0 * 8.0)},
        {A: 0.0, B: 0.0, C: 0.0},
        {G1: ACCEPTED},
        {G1: ACCEPTED - LABELS},
        {G0: F * LABELS},
        {G0: -F * LABELS},
    ],
)
def test_sums_at_the_edge_of_the_possible_are_let_in(changes: dict[int, float]) -> None:
    sums, sketch = possible_sums()
    sums[1, list(changes)] = list(changes.values())
    assert len(check_frame(with_sums(sums, sketch), K)) == 1


def test_a_sketch_of_other_labels_than_the_statistics_is_refused() -> None:
    sums, sketch = possible_sums()
    fewer = Sketch(sketch.cells.copy())
    fewer.cells[:, 1] = 0.0
    position = np.repeat([0, 1, 2], [39, 41, 40])
    moved = Sketch.of(K, position, np.ones(120), np.tile(np.arange(40) < 10, 3))
    for other in (fewer, moved, Sketch.empty(K), sketch.merge(sketch)):
        refused = refusal(with_sums(sums, other))
        assert refused.reason is Refusal.IMPOSSIBLE
    assert "[39.0, 41.0, 40.0]" in refusal(with_sums(sums, moved)).detail
    assert "[40.0, 40.0, 40.0]" in refusal(with_sums(sums, moved)).detail


def test_a_count_of_labels_that_is_no_whole_number_is_refused() -> None:
    sums, sketch = possible_sums()
    sums[0, N] = 40.5
    refused = refusal(with_sums(sums, sketch))
    assert refused.reason is Refusal.IMPOSSIBLE
    assert "40.5" in refused.detail


def test_a_cell_that_accepts_more_than_it_counts_is_refused() -> None:
    sums, sketch = possible_sums()
    live = np.argwhere(sketch.cells[COUNT] > 0.0)[0]
    sketch.cells[1, live[0], live[1]] = 41.0
    refused = refusal(with_sums(sums, sketch))
    assert refused.reason is Refusal.MALFORMED
    assert "accepts more than it counts" in refused.detail


def test_a_cell_whose_features_lie_outside_its_bin_is_refused() -> None:
    sums, sketch = possible_sums()
    k, bin_ = np.argwhere(sketch.cells[COUNT] > 0.0)[0]
    sketch.cells[OFFSET, k, bin_] = 40.0 * 0.25 * 64.0
    check_frame(with_sums(sums, sketch), K)
    for offset in (40.0 * 0.25 * 64.0 + 1.0, 2.0**32 - 1.0):
        sketch.cells[OFFSET, k, bin_] = offset
        assert refusal(with_sums(sums, sketch)).reason is Refusal.MALFORMED


def test_one_broken_stratum_refuses_the_whole_frame() -> None:
    broken = msgspec.structs.replace(PART, sketch=b"")
    for strata in ({"a": PART, "b": broken}, {"b": broken, "a": PART}):
        refused = refusal(msgspec.structs.replace(HONEST, strata=strata))
        assert "stratum b" in refused.detail


# Bytes that nobody meant

damage = st.lists(
    st.tuples(st.floats(0.0, 1.0), st.integers(0, 4), st.binary(max_size=4)), max_size=4
)


def damaged(whole: bytes, cuts: list[tuple[float, int, bytes]]) -> bytes:
    """`whole` with some bytes replaced, inserted or taken out."""
    for where, gone, put in cuts:
        at = int(where * len(whole))
        whole = whole[:at] + put + whole[at + gone :]
    return whole


@settings(moderate, max_examples=300)
@given(st.one_of(st.binary(max_size=120), damage.map(lambda cuts: damaged(PART.sketch, cuts))))
@example(Sketch.empty(K).pack())
@example(b"\xff" * (K * BINS // 8) + bytes([1, 1, 1]))
def test_a_broken_sketch_is_a_format_error_and_nothing_worse(data: bytes) -> None:
    try:
        cells = read_packed(K, data)
    except SketchFormatError:
        return
    assert (cells.columns[1] <= cells.columns[COUNT]).all()
    assert (cells.columns[COUNT] >= 1.0).all()
    assert np.array_equal(cells.cell, np.unique(cells.cell))
    assert cells.cell.max(initial=0) < K * BINS


parts = st.builds(
    StratumRound,
    intercepts=damage.map(lambda cuts: damaged(PART.intercepts, cuts)),
    statistics=damage.map(lambda cuts: damaged(PART.statistics, cuts)),
    sketch=damage.map(lambda cuts: damaged(PART.sketch, cuts)),
)


@settings(moderate, max_examples=300)
@given(parts)
def test_damaged_arrays_are_refused_or_sound_and_nothing_worse(part: StratumRound) -> None:
    try:
        [checked] = check_frame(only(part), K)
    except FrameRefused:
        return
    assert np.isfinite(checked.statistics).all()
    assert np.isfinite(checked.intercepts).all()
    assert (accepted_in(checked) <= checked.statistics[:, N]).all()


# Through the estimator


def config(max_strata: int = 64) -> EstimatorConfig:
    """Evidence does not fade, and nothing but frames changes anything."""
    return EstimatorConfig(
        fit=FitConfig(half_life=1e300),
        trust=TrustConfig(min_labels=1e300),
        drift=DriftConfig(min_labels=1e300),
        exploration=ExplorationConfig(label_floor=0.0),
        max_strata=max_strata,
    )


@pytest.fixture
def estimator() -> Iterator[Estimator]:
    """One that has learned something from replica-0's first frame."""
    with closing(Store.open("sqlite://")) as store:
        estimator = Estimator(store, config(max_strata=2), ManualClock())
        estimator.register(KEY)
        assert estimator.submit(numbered(HONEST, 1)).status is FrameStatus.MERGED
        yield estimator
        estimator.check_integrity()


def numbered(frame: Frame, seq: int) -> Frame:
    return msgspec.structs.replace(frame, pair=KEY.id, seq=seq, oldest=1)


def pair_of(estimator: Estimator) -> PairSnapshot:
    return estimator.snapshot().pairs[0]


def traces(estimator: Estimator) -> tuple[tuple[EvidenceRecord, ...], PairSnapshot]:
    """All that a frame could change but counters, after folding in whatever has arrived."""
    estimator.refit()
    gathered = estimator.prepare().gathered
    assert gathered is not None
    return gathered.evidence, msgspec.structs.replace(
        pair_of(estimator), counters={}, last_fit=None
    )


BROKEN: dict[Refusal, Frame] = {
    Refusal.WRONG_LENGTH: with_part(intercepts=b""),
    Refusal.NOT_FINITE: with_sums(np.full((K, 6), np.nan)),
    Refusal.OUT_OF_RANGE: msgspec.structs.replace(HONEST, slope=21.0),
    Refusal.IMPOSSIBLE: with_sums(-SUMS),
    Refusal.MALFORMED: with_part(sketch=b"\xff"),
    Refusal.TOO_MANY_STRATA: msgspec.structs.replace(HONEST, strata=dict.fromkeys("abc", PART)),
}
dressing = {"admitted": (9,) * K, "steps": 9, "explored_steps": 1, "skipped": {"bad_words": 9}}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_refused_frame_changes_nothing_and_is_counted_by_reason(
    estimator: Estimator, reason: Refusal
) -> None:
    before = traces(estimator)
    frame = msgspec.structs.replace(BROKEN[reason], replica="stranger", **dressing)
    reply = estimator.receive(encode(numbered(frame, 2)))
    assert (reply.status, reply.reason) == (FrameStatus.REFUSED, reason)
    assert reply.detail
    assert traces(estimator) == before
    counters = pair_of(estimator).counters
    assert counters["frames_refused"] == counters[f"refused_{reason}"] == 1.0
    assert counters["frames_merged"] == 1.0


@pytest.mark.parametrize("reason", BROKEN)
def test_a_refused_frame_is_consumed(estimator: Estimator, reason: Refusal) -> None:
    broken = numbered(BROKEN[reason], 2)
    assert estimator.receive(encode(broken)).reason is reason
    assert estimator.receive(encode(broken)).status is FrameStatus.DUPLICATE
    # So the sender can forget it: nothing waits for a number that will never be good.
    assert estimator.submit(numbered(HONEST, 3)).status is FrameStatus.MERGED
    estimator.refit()
    estimator.checkpoint()
    assert estimator.submit(numbered(HONEST, 4)).durable_seq == 3


def test_frames_after_a_refused_one_count_as_if_it_had_not_been(estimator: Estimator) -> None:
    for seq, frame in enumerate(BROKEN.values(), start=2):
        estimator.submit(numbered(frame, seq))
    after = numbered(HONEST, 100)
    assert estimator.submit(after).status is FrameStatus.MERGED
    with closing(Store.open("sqlite://")) as store:
        other = Estimator(store, config(max_strata=2), ManualClock())
        other.register(KEY)
        other.submit(numbered(HONEST, 1))
        other.submit(after)
        assert traces(estimator) == traces(other)


@settings(
    moderate,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(part=parts, second=st.booleans())
def test_damaged_arrays_never_change_a_part_of_the_state(
    estimator: Estimator, part: StratumRound, second: bool
) -> None:
    # The fixture is shared by all examples: each is one more frame of the same history.
    before = traces(estimator)
    seq = int(sum(v for k, v in pair_of(estimator).counters.items() if k.startswith("frames_")))
    strata = {"sampled": PART, "greedy": part} if second else {"sampled": part}
    reply = estimator.receive(
        encode(numbered(msgspec.structs.replace(HONEST, strata=strata), seq + 1))
    )
    assume(reply.status is not FrameStatus.MERGED)
    assert reply.status is FrameStatus.REFUSED
    assert traces(estimator) == before


def test_bytes_that_are_no_frame_are_refused_and_counted_apart(estimator: Estimator) -> None:
    before = traces(estimator)
    good = encode(numbered(HONEST, 2))
    tomorrow = msgspec.msgpack.encode(msgspec.msgpack.decode(good) | {"schema": 2, "seq": "x"})
    for data, reason in (
        (b"", Refusal.MALFORMED),
        (good[:-1], Refusal.MALFORMED),
        (b"\x81\xa1x" + b"\x91" * 50_000, Refusal.MALFORMED),
        (tomorrow, Refusal.UNKNOWN_SCHEMA),
    ):
        reply = estimator.receive(data)
        assert (reply.status, reply.reason, reply.durable_seq) == (FrameStatus.REFUSED, reason, 0)
        assert reply.detail
    assert estimator.snapshot().unattributed == {"malformed": 3.0, "unknown_schema": 1.0}
    assert traces(estimator) == before
    assert "frames_refused" not in pair_of(estimator).counters
    # They said no number, so they used up none.
    assert estimator.receive(good).status is FrameStatus.MERGED


@settings(
    moderate, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    data=st.one_of(
        st.binary(max_size=60), damage.map(lambda cuts: damaged(encode(numbered(HONEST, 2)), cuts))
    )
)
def test_no_bytes_make_the_estimator_raise(estimator: Estimator, data: bytes) -> None:
    reply = estimator.receive(data)
    assert (reply.reason is not None) == (reply.status is FrameStatus.REFUSED)
    estimator.check_integrity()


def test_a_frame_of_an_unknown_pair_is_not_consumed() -> None:
    with closing(Store.open("sqlite://")) as store:
        estimator = Estimator(store, config(), ManualClock())
        frame = numbered(HONEST, 1)
        reply = estimator.submit(frame)
        assert (reply.status, reply.reason) == (FrameStatus.REFUSED, Refusal.UNKNOWN_PAIR)
        assert KEY.id in reply.detail
        assert estimator.snapshot().unattributed == {"unknown_pair": 1.0}
        estimator.register(KEY)
        assert estimator.submit(frame).status is FrameStatus.MERGED


def test_a_frame_far_ahead_of_what_is_missing_is_refused_and_not_consumed(
    estimator: Estimator,
) -> None:
    before = traces(estimator)
    ahead = numbered(HONEST, 1 + WINDOW + 1)
    for _ in range(2):
        reply = estimator.submit(ahead)
        assert (reply.status, reply.reason) == (FrameStatus.REFUSED, Refusal.OUT_OF_WINDOW)
        assert f"seq {ahead.seq}" in reply.detail
    assert traces(estimator) == before
    assert estimator.submit(numbered(HONEST, 2)).status is FrameStatus.MERGED
    assert estimator.submit(ahead).status is FrameStatus.MERGED


def test_a_sender_that_claims_to_be_at_the_end_of_all_numbers_harms_nobody(
    estimator: Estimator,
) -> None:
    last = 2**62
    jump = msgspec.structs.replace(numbered(HONEST, last), oldest=last)
    assert estimator.receive(encode(jump)).status is FrameStatus.MERGED
    assert estimator.receive(encode(jump)).status is FrameStatus.DUPLICATE
    other = msgspec.structs.replace(numbered(HONEST, 1), replica="replica-1")
    assert estimator.receive(encode(other)).status is FrameStatus.MERGED
    estimator.refit()
    estimator.checkpoint()


def test_known_strata_go_on_when_there_is_room_for_no_more(estimator: Estimator) -> None:
    def submit(seq: int, *strata: str) -> FrameStatus:
        frame = msgspec.structs.replace(HONEST, strata=dict.fromkeys(strata, PART))
        return estimator.submit(numbered(frame, seq)).status

    assert submit(2, "sampled", "greedy") is FrameStatus.MERGED
    assert submit(3, "sampled", "third") is FrameStatus.REFUSED
    assert submit(4, "greedy", "sampled") is FrameStatus.MERGED
    assert set(pair_of(estimator).strata) == {"sampled", "greedy"}
    estimator.refit()
    labels = np.array(pair_of(estimator).labels)
    assert labels.tolist() == (5 * SUMS[:, N]).tolist()


def test_a_sender_cannot_make_more_skip_reasons_than_there_is_room_for(
    estimator: Estimator,
) -> None:
    for seq in range(2, 12):
        skipped = {f"reason-{seq}-{i}": i for i in range(20)}
        frame = msgspec.structs.replace(frame_of({}, INITIAL), skipped=skipped)
        assert estimator.submit(numbered(frame, seq)).status is FrameStatus.MERGED
    counted = pair_of(estimator).skipped
    assert len(counted) == MAX_SKIP_REASONS + 1
    assert sum(counted.values()) == 10 * sum(range(20))
    assert counted["reason-2-7"] == 7.0
