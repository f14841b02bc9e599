from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from estimator_service.messages import CoefficientSet
from workers.labels import Draft, Pending, Request, observe
from workers.rounds import Label

NAN = float("nan")
FEATURES = (0.5, 1.5, 2.5)


def draft(request_id: str = "r", features: tuple[float, ...] = FEATURES) -> Draft:
    tokens = (7, 8, 9)
    return Draft(Request(request_id, "s"), 1, tokens, features, CoefficientSet.initial(3))


def labels(*accepted: int) -> list[Label]:
    return [Label(k, FEATURES[k], y) for k, y in enumerate(accepted)]


def test_a_rejection_hides_what_is_behind_it() -> None:
    assert observe(draft(), 3, [7, 8, 9, 4], kept=4) == labels(1, 1, 1)
    assert observe(draft(), 3, [7, 4], kept=2) == labels(1, 0)
    assert observe(draft(), 3, [4], kept=1) == labels(0)
    assert observe(draft(), 1, [7, 4], kept=2) == labels(1)
    assert observe(draft(), 0, [4], kept=1) == []


def test_nothing_is_observed_behind_the_end_of_a_text() -> None:
    assert observe(draft(), 3, [7, 8, 9, 4], kept=2) == labels(1, 1)
    assert observe(draft(), 3, [7, 8, 4], kept=1) == labels(1)
    assert observe(draft(), 3, [7, 8, 4], kept=0) == []


def test_a_missing_feature_gives_no_label_and_hides_nothing() -> None:
    seen = observe(draft(features=(NAN, 1.5, 2.5)), 3, [7, 8, 4], kept=3)
    assert seen == [Label(1, 1.5, 1), Label(2, 2.5, 0)]


def test_a_discarded_step_observes_nothing() -> None:
    assert observe(draft(), 3, [], kept=0) == []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(0, 6),
    st.none() | st.integers(0, 8),
)
def test_a_text_ends_at_its_first_stop_or_at_its_limit(
    emitted: list[int], before: int, most: int | None
) -> None:
    kept = Request("r", "s", stops=frozenset({0}), max_tokens=most).kept(emitted, before)
    text: list[int] = []
    for token in emitted:
        if most is not None and before + len(text) >= most:
            break
        text.append(token)
        if token == 0:
            break
    assert kept == len(text)


def test_a_draft_is_matched_by_request_step_and_tokens() -> None:
    pending = Pending()
    pending.begin([Request("a", "s"), Request("b", "s")])
    mine = draft("a")
    pending.hold([mine, draft("b")])
    taken = pending.take({"a": [7, 8], "b": [7, 7], "c": [7], "d": [-1, -1]})
    assert taken == {"a": mine}
    assert pending.take({"a": [7, 8]}) == {}


def test_a_draft_of_an_earlier_step_or_life_is_never_matched() -> None:
    pending = Pending()
    pending.begin([Request("a", "s"), Request("b", "s"), Request("c", "s")])
    pending.hold([draft("a"), draft("b"), draft("c")])
    pending.interrupt(["a"])
    pending.begin([Request("b", "t")])
    pending.forget(["c"])
    assert pending.take({"a": [7], "b": [7], "c": [7]}) == {}
    pending.hold([draft("a"), draft("b")])
    pending.hold([draft("a")])
    assert pending.take({"a": [7], "b": [7]}).keys() == {"a"}


def test_a_life_counts_its_own_tokens() -> None:
    pending = Pending()
    pending.begin([Request("a", "s", max_tokens=3)])
    assert pending.emit("a", [1, 1]) == 2
    assert pending.emit("a", [1, 1]) == 1
    pending.begin([Request("a", "s", max_tokens=3)])
    assert pending.emit("a", [1, 1]) == 2
    pending.forget(["a"])
    assert pending.emit("a", [1]) == 0
