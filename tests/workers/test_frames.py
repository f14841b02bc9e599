from __future__ import annotations

import numpy as np

from estimator_service.intake import check_frame
from estimator_service.messages import MAX_FRAME_BYTES, CoefficientSet, Version, encode
from workers.frames import frames_of
from workers.rounds import Label, Round, Rounds

K = 16
COEFFICIENTS = CoefficientSet.initial(K)


def drained(strata: int, labels: int) -> Round:
    rng = np.random.default_rng(0)
    rounds = Rounds()
    for name in range(strata):
        features = rng.normal(0.0, 8.0, (labels, K))
        rounds.observe(
            COEFFICIENTS,
            f"s{name}",
            [
                Label(k, float(row[k]), int(rng.random() < 0.5))
                for row in features
                for k in range(K)
            ],
        )
    rounds.step(COEFFICIENTS, [K, 3], explored=True)
    rounds.skip(COEFFICIENTS, "penalties")
    (round_,) = rounds.drain()
    return round_


def test_a_round_arrives_as_it_was_whatever_the_number_of_frames() -> None:
    round_ = drained(strata=120, labels=300)
    frames = frames_of(round_, pair="p", replica="r", incarnation=7)
    assert len(frames) > 1
    assert all(len(encode(frame)) <= MAX_FRAME_BYTES for frame in frames)
    assert [frame.steps for frame in frames] == [1] + [0] * (len(frames) - 1)
    first = frames[0]
    assert (first.admitted, first.explored_steps) == (round_.admitted, 1)
    assert first.skipped == {"penalties": 1}
    arrived = {part.stratum: part.statistics for frame in frames for part in check_frame(frame, K)}
    assert arrived.keys() == round_.strata.keys()
    for name, statistics in arrived.items():
        np.testing.assert_array_equal(statistics, round_.strata[name].statistics.sums)


def test_a_round_in_which_nothing_happened_is_no_frame() -> None:
    empty = Round(Version(1, 1), 0.5)
    assert frames_of(empty, pair="p", replica="r", incarnation=1) == []
    stepped = Round(Version(1, 1), 0.5, steps=3)
    (frame,) = frames_of(stepped, pair="p", replica="r", incarnation=1)
    assert (frame.steps, frame.strata, frame.graded) == (3, {}, Version(1, 1))
