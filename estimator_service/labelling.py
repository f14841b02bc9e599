"""Makes labels of a trace's rows.

A position is observed when it was admitted and every earlier position of its draft was accepted:
the accepted ones are labelled 1, the first rejected one 0, and what lies behind it nothing.

Rows that contradict themselves or their draft are rejected by name and never used. A position of
a draft is filled by its first good row; once a position has bad rows only, what lies behind it
cannot be graded, because nobody knows whether it was reached.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from estimator_service.logistic import MAX_LOG_ODDS, Array
from estimator_service.messages import MAX_POSITIONS, MAX_STRATA, Stratum
from estimator_service.trace import Flags, Ints, Labels, Reason, Rejection, Rows, Trace, TraceError

Codes = NDArray[np.uint8]

MAX_NAMED = 1000
"""Rejected rows that are named one by one; all of them are counted."""
REASONS = tuple(Reason)
CODE = {why: code for code, why in enumerate(REASONS, 1)}
"""A row's reason as a number, 0 for a good row."""


def label_rows(rows: Rows) -> Trace:
    """The labels in `rows`, and the rows that could not be used.

    Raises:
        TraceError: no rows at all, or labels of more than MAX_STRATA strata.
    """
    total = len(rows.line) + len(rows.malformed)
    if not total:
        raise TraceError("the trace has no rows")
    reason = np.zeros(len(rows.line), dtype=np.uint8)
    _check_values(rows, reason)
    observed = _check_drafts(rows, reason)
    return Trace(
        rows=total,
        labels=_labels(rows, observed, good=reason == 0),
        rejections=_first_rejections(rows, reason),
        rejection_reasons=_count_reasons(rows, reason),
    )


def _check_values(rows: Rows, reason: Codes) -> None:
    """Reject what is wrong whatever the other rows say."""
    _reject(reason, rows.request < 0, Reason.REQUEST)
    _reject(reason, ~_is_whole(rows.step), Reason.STEP)
    _reject(reason, ~_is_whole(rows.position), Reason.POSITION)
    _reject(reason, rows.position >= MAX_POSITIONS, Reason.DEPTH)
    _reject(reason, ~np.isfinite(rows.feature), Reason.FEATURE)
    _reject(reason, np.abs(rows.feature) > MAX_LOG_ODDS, Reason.RANGE)
    _reject(reason, ~_is_flag(rows.admitted), Reason.ADMITTED)
    _reject(reason, ~_is_flag(rows.accepted), Reason.ACCEPTED)
    _reject(reason, rows.accepted > rows.admitted, Reason.UNVERIFIED)
    # The False at the end is what -1, a missing name, looks up.
    named = np.array([_is_stratum(name) for name in rows.strata] + [False])
    _reject(reason, ~named[rows.stratum], Reason.STRATUM)


def _check_drafts(rows: Rows, reason: Codes) -> Ints:
    """Reject what contradicts its draft; returns the indices of the observed rows.

    All drafts at once: rows are sorted into slots, one per (draft, position), and "earlier in
    this draft" is a cumulative sum less its value where the draft starts.
    """
    index = np.flatnonzero((rows.request >= 0) & _is_whole(rows.step))
    if not len(index):
        return index
    # A bad row leaves a hole where it says it belongs. One that does not say so is put behind
    # its draft's last position, and answers for any position that is missing.
    claimed = rows.position[index]
    known = _is_whole(claimed) & (claimed < MAX_POSITIONS)
    position = np.where(known, claimed, MAX_POSITIONS).astype(np.int64)
    draft = _draft_codes(rows.request[index], rows.step[index])
    slot = draft * (MAX_POSITIONS + 1) + position
    # Within a slot the good rows come first, and those in file order.
    order = np.argsort(2 * slot + (reason[index] != 0), kind="stable")
    leads = _starts(slot[order])
    _reject_at(reason, index[order[~leads]], Reason.DUPLICATE)
    order = order[leads]
    index, draft, position = index[order], draft[order], position[order]

    start = np.flatnonzero(_starts(draft))
    size = np.diff(start, append=len(draft))

    def before(flags: Flags) -> Flags:
        """Whether any earlier slot of the same draft has the flag."""
        earlier: Ints = np.cumsum(flags) - flags
        return np.asarray(earlier > np.repeat(earlier[start], size))

    good = reason[index] == 0
    admitted = good & (rows.admitted[index] == 1.0)
    accepted = good & (rows.accepted[index] == 1.0)
    missing = position != np.arange(len(position)) - np.repeat(start, size)
    stray = np.repeat(position[start + size - 1] == MAX_POSITIONS, size)
    gap = admitted & (missing | before(good & ~admitted))
    late = accepted & before(admitted & ~accepted)
    _reject_at(reason, index[before(~good | gap | late) | (missing & stray)], Reason.BEHIND)
    _reject_at(reason, index[gap], Reason.PREFIX)
    _reject_at(reason, index[late], Reason.REJECTED)
    return np.asarray(index[admitted & (reason[index] == 0) & ~before(~accepted)])


def _reject(reason: Codes, where: Flags, why: Reason) -> None:
    """Give the reason to the rows that have none yet."""
    reason[where & (reason == 0)] = CODE[why]


def _reject_at(reason: Codes, index: Ints, why: Reason) -> None:
    """The same, for rows given by their indices."""
    reason[index[reason[index] == 0]] = CODE[why]


def _is_whole(x: Array) -> Flags:
    """A whole number from 0 on that float64 holds exactly."""
    return np.asarray((x >= 0.0) & (x < 2.0**53) & (x == np.floor(x)))


def _is_flag(x: Array) -> Flags:
    return np.asarray((x == 0.0) | (x == 1.0))


def _is_stratum(name: str) -> bool:
    try:
        msgspec.convert(name, Stratum)
    except msgspec.ValidationError:
        return False
    return True


def _draft_codes(request: Ints, step: Array) -> Ints:
    """[n], equal where request and step are, and small enough to be multiplied."""
    steps = step.astype(np.int64)
    span = int(steps.max()) + 1
    if (int(request.max()) + 1) * span >= 2**55:
        # Time stamps, say, used as steps. Their ranks do as well, and cost a sort.
        steps = np.unique(steps, return_inverse=True)[1]
        span = int(steps.max()) + 1
    return np.asarray(request * span + steps)


def _starts(ascending: Ints) -> Flags:
    """Where a new value begins."""
    return np.asarray(np.diff(ascending, prepend=ascending[:1] - 1) != 0)


def _labels(rows: Rows, observed: Ints, good: Flags) -> Labels:
    used = sorted(np.unique(rows.stratum[observed]), key=lambda code: rows.strata[code])
    if len(used) > MAX_STRATA:
        raise TraceError(f"the trace has {len(used)} strata; at most {MAX_STRATA} can be fitted")
    rank = np.zeros(len(rows.strata), dtype=np.intp)
    rank[used] = np.arange(len(used))
    return Labels(
        positions=1 + int(rows.position[good].max(initial=-1.0)),
        position=rows.position[observed].astype(np.intp),
        feature=rows.feature[observed],
        accepted=rows.accepted[observed],
        stratum=rank[rows.stratum[observed]],
        strata=tuple(rows.strata[code] for code in used),
    )


def _first_rejections(rows: Rows, reason: Codes) -> list[Rejection]:
    bad = np.flatnonzero(reason)[:MAX_NAMED]
    named = [Rejection(int(rows.line[i]), REASONS[reason[i] - 1]) for i in bad]
    named += [Rejection(int(line), Reason.COLUMNS) for line in rows.malformed[:MAX_NAMED]]
    return sorted(named, key=lambda rejection: rejection.line)[:MAX_NAMED]


def _count_reasons(rows: Rows, reason: Codes) -> dict[Reason, int]:
    counts = np.bincount(reason, minlength=len(REASONS) + 1)[1:]
    counts[REASONS.index(Reason.COLUMNS)] += len(rows.malformed)
    by_count = sorted(zip(REASONS, counts.tolist(), strict=True), key=lambda item: -item[1])
    return {why: count for why, count in by_count if count}
