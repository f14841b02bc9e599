"""Rounds as the frames that carry them to the estimator."""

from __future__ import annotations

from collections.abc import Iterator

from estimator_service.messages import (
    MAX_FRAME_BYTES,
    Frame,
    StratumRound,
    Version,
    encode_array,
)
from workers.rounds import Round, StratumSums

STRATA_BYTES = MAX_FRAME_BYTES // 2
"""Of strata in one frame; what else is in it takes a few hundred bytes."""


def frames_of(round_: Round, *, pair: str, replica: str, incarnation: int) -> list[Frame]:
    """A round in as many frames as it needs: strata are shared out, its counts are in the first.

    None for a round in which nothing happened. Every frame says seq 1 until `msgspec.structs`
    replaces it: numbers are given when frames are sent. Raises OverflowError as `Sketch.pack` does.
    """
    parts = list(_share_out(round_))
    counted = bool(round_.admitted or round_.steps or round_.skipped)
    if not parts and not counted:
        return []
    first, *others = parts or [{}]

    def frame(strata: dict[str, StratumRound], **counts: object) -> Frame:
        return Frame(
            pair=pair,
            replica=replica,
            incarnation=incarnation,
            seq=1,
            oldest=1,
            applied=Version(),
            graded=round_.graded,
            slope=round_.slope,
            strata=strata,
            **counts,  # type: ignore[arg-type]
        )

    return [
        frame(
            first,
            admitted=round_.admitted,
            steps=round_.steps,
            explored_steps=round_.explored_steps,
            skipped=round_.skipped,
        ),
        *map(frame, others),
    ]


def _share_out(round_: Round) -> Iterator[dict[str, StratumRound]]:
    part: dict[str, StratumRound] = {}
    size = 0
    for name, sums in round_.strata.items():
        written = _write(sums)
        more = len(written.intercepts) + len(written.statistics) + len(written.sketch)
        if part and size + more > STRATA_BYTES:
            yield part
            part, size = {}, 0
        part[name] = written
        size += more
    if part:
        yield part


def _write(sums: StratumSums) -> StratumRound:
    return StratumRound(
        intercepts=encode_array(sums.intercepts),
        statistics=encode_array(sums.statistics.sums),
        sketch=sums.sketch.pack(),
    )
