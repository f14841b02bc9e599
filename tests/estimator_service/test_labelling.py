"""Labels of a trace's rows: against a plain replay of every draft, and each reason by itself."""

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator_service.labelling import MAX_NAMED, label_rows
from estimator_service.messages import MAX_POSITIONS, MAX_STRATA
from estimator_service.trace import Reason, Rows, Trace, TraceError

NAN = float("nan")


class Row(NamedTuple):
    position: float = 0
    admitted: float = 1
    accepted: float = 1
    feature: float = 1.0
    request: int = 0
    step: float = 0
    stratum: int = 0


def label(
    rows: list[Row], strata: tuple[str, ...] = ("s",), malformed: tuple[int, ...] = ()
) -> Trace:
    """Label rows that stand on lines 1, 2, ..."""
    columns = {
        name: np.array([getattr(row, name) for row in rows], dtype=np.float64)
        for name in Row._fields
    }
    return label_rows(
        Rows(
            line=np.arange(1, len(rows) + 1),
            request=columns["request"].astype(np.int64),
            step=columns["step"],
            position=columns["position"],
            feature=columns["feature"],
            admitted=columns["admitted"],
            accepted=columns["accepted"],
            stratum=columns["stratum"].astype(np.int64),
            strata=strata,
            malformed=np.array(malformed, dtype=np.int64),
        )
    )


def rejected(trace: Trace) -> dict[int, Reason]:
    return {rejection.line: rejection.reason for rejection in trace.rejections}


def labelled(trace: Trace) -> list[tuple[int, float, float]]:
    labels = trace.labels
    columns = (labels.position, labels.feature, labels.accepted)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def draft(*verdicts: str, **common: float) -> list[Row]:
    """Rows of one draft: "a"ccepted, "r"ejected, "n"ot admitted or "u"nobserved (behind one)."""
    return [
        Row(k, float(v in "aru"), float(v == "a"), **common)  # type: ignore[arg-type]
        for k, v in enumerate(verdicts)
    ]


def test_accepted_are_1_the_first_rejected_0_and_nothing_behind_it() -> None:
    trace = label(draft("a", "a", "r", "u", "n"))
    assert labelled(trace) == [(0, 1.0, 1.0), (1, 1.0, 1.0), (2, 1.0, 0.0)]
    assert trace.labels.positions == 5
    assert trace.rejected_rows == 0


def test_whole_draft_accepted_and_none_admitted() -> None:
    trace = label(draft("a", "a") + draft("n", "n", request=1))
    assert labelled(trace) == [(0, 1.0, 1.0), (1, 1.0, 1.0)]


def test_drafts_are_told_apart_by_request_and_step_in_any_file_order() -> None:
    rows = [
        row._replace(feature=float(10 * request + step + row.position / 10))
        for request in range(3)
        for step in range(3)
        for row in draft("a", "a", "r", "u", request=request, step=step)
    ]
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    assert labelled(label(rows)) == labelled(label(shuffled))
    assert len(label(rows).labels) == 27


@pytest.mark.parametrize("base", [0.0, 1e15])
def test_steps_may_be_as_large_as_time_stamps(base: float) -> None:
    rows = [
        r for s in range(3) for q in range(50) for r in draft("a", "r", request=q, step=base + s)
    ]
    assert len(label(rows).labels) == 300


VALUES = [
    (Row(request=-1), Reason.REQUEST),
    (Row(step=NAN), Reason.STEP),
    (Row(step=-1), Reason.STEP),
    (Row(step=0.5), Reason.STEP),
    (Row(step=2.0**60), Reason.STEP),
    (Row(step=float("inf")), Reason.STEP),
    (Row(position=NAN), Reason.POSITION),
    (Row(position=-1), Reason.POSITION),
    (Row(position=0.5), Reason.POSITION),
    (Row(position=MAX_POSITIONS), Reason.DEPTH),
    (Row(feature=NAN), Reason.FEATURE),
    (Row(feature=float("-inf")), Reason.FEATURE),
    (Row(feature=40.1), Reason.RANGE),
    (Row(feature=-1e24), Reason.RANGE),
    (Row(admitted=2), Reason.ADMITTED),
    (Row(admitted=NAN), Reason.ADMITTED),
    (Row(accepted=0.5), Reason.ACCEPTED),
    (Row(accepted=NAN), Reason.ACCEPTED),
    (Row(admitted=0), Reason.UNVERIFIED),
    (Row(stratum=-1), Reason.STRATUM),
    (Row(stratum=1), Reason.STRATUM),
]


@pytest.mark.parametrize(("bad", "reason"), VALUES)
def test_bad_value_is_named_and_costs_no_other_draft(bad: Row, reason: Reason) -> None:
    clean = draft("a", "r", request=7)
    trace = label([*clean, bad], strata=("s", "no name"))
    assert rejected(trace) == {3: reason}
    assert trace.rejection_reasons == {reason: 1}
    assert labelled(trace) == labelled(label(clean))


@pytest.mark.parametrize("feature", [40.0, -40.0, 0.0])
def test_features_within_the_bound_are_good(feature: float) -> None:
    assert label([Row(feature=feature)]).rejected_rows == 0


def test_of_equal_positions_the_first_good_row_counts() -> None:
    rows = [Row(feature=NAN), Row(feature=2.0), Row(feature=3.0), Row(1, feature=4.0)]
    trace = label(rows)
    assert rejected(trace) == {1: Reason.FEATURE, 3: Reason.DUPLICATE}
    assert labelled(trace) == [(0, 2.0, 1.0), (1, 4.0, 1.0)]


def test_admitted_is_a_prefix() -> None:
    missing = [Row(0), Row(2), Row(3)]
    unadmitted = draft("a", "n", "a", request=1)
    trace = label(missing + unadmitted)
    assert rejected(trace) == {2: Reason.PREFIX, 3: Reason.BEHIND, 6: Reason.PREFIX}
    assert labelled(trace) == [(0, 1.0, 1.0), (0, 1.0, 1.0)]


def test_missing_position_behind_the_admitted_ones_is_harmless() -> None:
    assert label([Row(0), Row(2, 0, 0), Row(5, 0, 0)]).rejected_rows == 0


def test_nothing_is_accepted_behind_a_rejection() -> None:
    trace = label(draft("a", "r", "a", "u"))
    assert rejected(trace) == {3: Reason.REJECTED, 4: Reason.BEHIND}
    assert labelled(trace) == [(0, 1.0, 1.0), (1, 1.0, 0.0)]


def test_rows_behind_a_bad_row_of_their_draft_cannot_be_graded() -> None:
    rows = draft("a", "a", "a", "n")
    rows[1] = rows[1]._replace(feature=NAN)
    trace = label(rows + draft("a", "a", request=1))
    assert rejected(trace) == {2: Reason.FEATURE, 3: Reason.BEHIND, 4: Reason.BEHIND}
    assert labelled(trace) == [(0, 1.0, 1.0), (0, 1.0, 1.0), (1, 1.0, 1.0)]


def test_bad_row_of_unknown_position_answers_for_the_missing_one() -> None:
    trace = label([Row(0), Row(NAN), Row(2), Row(3, 0, 0)])
    assert rejected(trace) == {2: Reason.POSITION, 3: Reason.BEHIND, 4: Reason.BEHIND}


def test_positions_are_counted_without_bad_rows() -> None:
    assert label([Row(0), Row(1), Row(30, feature=NAN)]).labels.positions == 2


def test_strata_are_those_with_labels_in_order_of_name() -> None:
    rows = [Row(request=q, stratum=s, feature=float(s)) for q, s in enumerate([2, 0, 2])]
    rows.append(Row(0, 0, 0, request=9, stratum=1))
    labels = label(rows, strata=("sampled", "unused", "greedy:chat")).labels
    assert labels.strata == ("greedy:chat", "sampled")
    assert sorted(zip(labels.stratum.tolist(), labels.feature.tolist(), strict=True)) == [
        (0, 2.0),
        (0, 2.0),
        (1, 0.0),
    ]


def test_too_many_strata_are_an_error() -> None:
    rows = [Row(request=q, stratum=q) for q in range(MAX_STRATA + 1)]
    with pytest.raises(TraceError, match=f"has {MAX_STRATA + 1} strata; at most {MAX_STRATA}"):
        label(rows, strata=tuple(f"user{q}" for q in range(len(rows))))


def test_no_rows_are_an_error_and_no_labels_are_not() -> None:
    with pytest.raises(TraceError, match="no rows"):
        label([])
    assert len(label([Row(feature=NAN)]).labels) == 0
    assert len(label([], malformed=(2,)).labels) == 0


def test_rejections_are_counted_all_and_named_first_by_line() -> None:
    rows = [Row(feature=NAN, request=q) for q in range(3 * MAX_NAMED)]
    trace = label(rows, malformed=(1, 5000))
    assert trace.rejected_rows == 3 * MAX_NAMED + 2
    assert list(trace.rejection_reasons.items()) == [
        (Reason.FEATURE, 3 * MAX_NAMED),
        (Reason.COLUMNS, 2),
    ]
    assert len(trace.rejections) == MAX_NAMED
    lines = [rejection.line for rejection in trace.rejections]
    assert lines == sorted(lines)
    assert lines[:2] == [1, 1]
    assert trace.rows == 3 * MAX_NAMED + 2


def replay(rows: list[Row]) -> tuple[dict[int, Reason], list[tuple[int, float, float]]]:
    """What `label` should say, one draft and one position after another."""
    reasons: dict[int, Reason] = {}
    slots: defaultdict[tuple[int, float], defaultdict[float, list[int]]]
    slots = defaultdict(lambda: defaultdict(list))
    stray = set()
    for line, row in enumerate(rows, 1):
        if np.isnan(row.position):
            reasons[line] = Reason.POSITION
            stray.add((row.request, row.step))
            continue
        slots[row.request, row.step][row.position].append(line)
        if np.isnan(row.feature):
            reasons[line] = Reason.FEATURE
        elif row.accepted > row.admitted:
            reasons[line] = Reason.UNVERIFIED
    labels = []
    for key, by_position in slots.items():
        broken = missing = unadmitted = refused = False
        alive = True
        for expected, position in enumerate(sorted(by_position)):
            missing = missing or position != expected
            good = [line for line in by_position[position] if line not in reasons]
            reasons.update(dict.fromkeys(good[1:], Reason.DUPLICATE))
            if not good:
                broken = True
                continue
            line, row = good[0], rows[good[0] - 1]
            if broken or (missing and key in stray):
                reasons[line] = Reason.BEHIND
                broken = True
            elif row.admitted and (missing or unadmitted):
                reasons[line] = Reason.PREFIX
                broken = True
            elif row.accepted and refused:
                reasons[line] = Reason.REJECTED
                broken = True
            elif row.admitted and alive:
                labels.append((int(position), row.feature, row.accepted))
            unadmitted = unadmitted or not row.admitted
            refused = refused or bool(row.admitted and not row.accepted)
            alive = alive and bool(row.accepted)
    return reasons, sorted(labels)


ROWS = st.lists(
    st.builds(
        Row,
        position=st.sampled_from([0, 0, 0, 1, 1, 2, 3, NAN]),
        admitted=st.sampled_from([0, 1, 1, 1]),
        accepted=st.sampled_from([0, 1, 1]),
        feature=st.sampled_from([1.0, 2.0, 3.0, 4.0, 5.0, NAN]),
        request=st.integers(0, 1),
        step=st.integers(0, 1),
        stratum=st.just(0),
    ),
    min_size=1,
    max_size=16,
)


@settings(max_examples=1000)
@given(ROWS)
def test_agrees_with_a_plain_replay(rows: list[Row]) -> None:
    trace = label(rows)
    reasons, labels = replay(rows)
    assert rejected(trace) == reasons
    assert labelled(trace) == labels


@settings(deadline=None)
@given(ROWS, st.lists(st.sampled_from([bad for bad, _ in VALUES]), max_size=8))
def test_bad_rows_beside_good_ones_change_no_label(rows: list[Row], bad: list[Row]) -> None:
    trace = label(rows)
    clean = [row for line, row in enumerate(rows, 1) if line not in rejected(trace)]
    beside = [row if row.request < 0 else row._replace(request=9) for row in bad]
    if clean:
        assert labelled(label(clean)) == labelled(trace)
        assert labelled(label(clean + beside, strata=("s", "no name"))) == labelled(trace)
