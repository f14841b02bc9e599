"""Sent at least once, counted exactly once, whatever is lost, repeated, late or dead."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from estimator_service.delivery import (
    WINDOW,
    Inbox,
    Outbox,
    Source,
    SourceKey,
    Verdict,
    Watermark,
)

quick = settings(suppress_health_check=[HealthCheck.too_slow])
KEY: SourceKey = ("replica", 1)


# The watermark, against a plain set

numbers = st.one_of(st.integers(1, 40), st.integers(1, 300))
operations = st.lists(st.tuples(st.sampled_from(["add", "give up"]), numbers), max_size=60)


@quick
@given(operations)
def test_a_watermark_is_a_set_of_numbers(steps: list[tuple[str, int]]) -> None:
    mark, settled = Watermark(), set[int]()
    for operation, number in steps:
        if operation == "add":
            mark = mark.add(number)
            settled.add(number)
        else:
            given_up = set(range(1, number)) - settled
            mark, lost = mark.give_up(number)
            assert lost == len(given_up)
            settled |= given_up
        missing = next(n for n in range(1, 400) if n not in settled)
        assert mark.through == missing - 1
        assert [n for n in range(1, 400) if n in mark] == sorted(settled)
        # One form for one set: equal sets are equal watermarks, and bit 0 is the one missing.
        assert mark.beyond == sum(1 << (n - missing) for n in settled if n > missing)


@quick
@given(st.permutations(range(1, 30)))
def test_the_order_of_arrival_does_not_matter(order: list[int]) -> None:
    mark = Watermark()
    for number in order:
        assert number not in mark
        mark = mark.add(number)
    assert mark == Watermark(through=29)


@pytest.mark.parametrize("oldest", [2**31, 2**40, 2**62])
def test_giving_up_costs_nothing_however_far_it_goes(oldest: int) -> None:
    mark, lost = Watermark().add(1).add(3).add(9).give_up(oldest)
    assert mark == Watermark(through=oldest - 1)
    assert lost == oldest - 1 - 3


# The receiver alone


def test_a_number_is_new_once() -> None:
    inbox = Inbox()
    verdicts = [inbox.accept(KEY, seq, 1, 0.0).verdict for seq in (2, 1, 2, 1, 3, 3)]
    new, duplicate = Verdict.NEW, Verdict.DUPLICATE
    assert verdicts == [new, new, duplicate, duplicate, new, duplicate]


def test_incarnations_and_replicas_number_apart() -> None:
    inbox = Inbox()
    for key in (("a", 1), ("a", 2), ("b", 1)):
        assert inbox.accept(key, 1, 1, 0.0).verdict is Verdict.NEW
    assert len(inbox.changes()) == 3


def test_what_was_given_up_and_comes_late_is_not_counted() -> None:
    inbox = Inbox()
    inbox.accept(KEY, 1, 1, 0.0)
    assert inbox.accept(KEY, 5, 4, 0.0).lost == 2
    assert inbox.accept(KEY, 3, 1, 0.0).verdict is Verdict.DUPLICATE
    assert inbox.accept(KEY, 4, 4, 0.0) == inbox.accept(("other", 1), 1, 1, 0.0)


def test_what_was_done_before_the_receiver_knew_the_sender_is_not_lost() -> None:
    arrival = Inbox().accept(KEY, 1000, 998, 0.0)
    assert (arrival.verdict, arrival.lost) == (Verdict.NEW, 0)


def test_far_ahead_is_out_of_the_window_and_changes_nothing() -> None:
    inbox = Inbox()
    inbox.accept(KEY, 2, 1, 0.0)
    inbox.confirm(inbox.changes())
    assert inbox.accept(KEY, WINDOW + 1, 1, 9.0).verdict is Verdict.OUT_OF_WINDOW
    assert inbox.accept(("new", 1), WINDOW + 1, 1, 9.0).verdict is Verdict.OUT_OF_WINDOW
    assert inbox.changes() == ()
    assert inbox.accept(KEY, WINDOW, 1, 9.0).verdict is Verdict.NEW
    assert inbox.accept(KEY, 1, 1, 9.0).verdict is Verdict.NEW
    assert inbox.changes()[0].mark == Watermark(2, 1 << (WINDOW - 3))


def test_an_oldest_above_the_frame_itself_settles_no_more_than_the_frame() -> None:
    inbox = Inbox()
    inbox.accept(KEY, 1, 1, 0.0)
    assert inbox.accept(KEY, 2, 2**62, 0.0).verdict is Verdict.NEW
    assert inbox.accept(KEY, 3, 3, 0.0).verdict is Verdict.NEW


def test_nothing_is_durable_before_its_commit_is_confirmed() -> None:
    inbox = Inbox()
    inbox.accept(KEY, 1, 1, 0.0)
    changes = inbox.changes()
    inbox.accept(KEY, 2, 1, 0.0)
    assert inbox.durable_seq(KEY) == 0
    inbox.confirm(changes)
    assert inbox.durable_seq(KEY) == 1
    assert [source.mark.through for source in inbox.changes()] == [2]
    inbox.confirm(inbox.changes())
    assert (inbox.durable_seq(KEY), inbox.changes()) == (2, ())


def test_a_source_that_fell_silent_is_forgotten_here_and_in_the_store() -> None:
    inbox = Inbox([Source("old", 1, Watermark(7), 10.0), Source("new", 1, Watermark(7), 20.0)])
    inbox.forget_before(20.0)
    assert inbox.forgotten() == (("old", 1),)
    assert inbox.durable_seq(("old", 1)) == 0
    assert inbox.durable_seq(("new", 1)) == 7
    inbox.confirm((), inbox.forgotten())
    assert inbox.forgotten() == ()


def test_a_forgotten_source_that_comes_back_before_the_checkpoint_is_kept() -> None:
    inbox = Inbox([Source(*KEY, Watermark(7), 10.0)])
    inbox.forget_before(20.0)
    inbox.accept(KEY, 8, 8, 30.0)
    # Else the store would be told to forget what it is told to keep.
    assert inbox.forgotten() == ()
    assert inbox.changes() == (Source(*KEY, Watermark(8), 30.0),)
    inbox.confirm(inbox.changes(), inbox.forgotten())
    assert (inbox.durable_seq(KEY), inbox.changes(), inbox.forgotten()) == (8, (), ())


def test_faults_name_the_source_whose_marks_contradict_the_store() -> None:
    inbox = Inbox()
    inbox.accept(KEY, 1, 1, 0.0)
    assert inbox.faults() == []
    inbox.confirm([Source(*KEY, Watermark(5), 0.0)])
    [fault] = inbox.faults()
    assert "replica" in fault
    assert "stored up to 5, counted to 1" in fault


# The sender alone


@pytest.mark.parametrize("capacity", [0, -1, WINDOW + 1])
def test_a_capacity_that_the_receiver_could_not_follow_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity must be in 1..{WINDOW}, got {capacity}"):
        Outbox[str](capacity)


def test_a_sender_drops_its_oldest_when_it_has_no_room() -> None:
    box = Outbox[int](capacity=3)
    for i in range(10):
        box.put(i)
    assert box.due() == [(8, 7), (9, 8), (10, 9)]
    assert (box.oldest, box.dropped) == (8, 7)


def test_an_answer_is_not_yet_a_receipt() -> None:
    box = Outbox[str]()
    box.put("a")
    box.answered(1, epoch=1, durable_seq=0)
    assert (box.due(), box.oldest) == ([], 1)
    box.answered(1, epoch=2, durable_seq=0)
    assert (box.due(), box.oldest) == ([], 1)
    box.put("b")
    box.answered(2, epoch=2, durable_seq=1)
    assert (box.due(), box.oldest) == ([], 2)


def test_a_new_estimator_is_sent_all_that_is_not_stored() -> None:
    box = Outbox[str]()
    for payload in "abcd":
        box.answered(box.put(payload), epoch=1, durable_seq=2)
    assert box.due() == []
    box.answered(4, epoch=2, durable_seq=2)
    assert box.due() == [(3, "c")]


def test_an_older_estimator_is_not_believed() -> None:
    box = Outbox[str]()
    for payload in "abc":
        box.put(payload)
    box.answered(1, epoch=2, durable_seq=0)
    box.answered(2, epoch=1, durable_seq=3)
    assert (box.due(), box.oldest) == ([(2, "b"), (3, "c")], 1)


def test_an_answer_to_what_is_no_longer_held_harms_nothing() -> None:
    box = Outbox[str](capacity=1)
    box.put("a")
    box.put("b")
    box.answered(1, epoch=1, durable_seq=0)
    box.answered(77, epoch=1, durable_seq=0)
    assert box.due() == [(2, "b")]


@pytest.mark.parametrize("seed", range(3))
def test_a_sender_never_outruns_the_window_of_its_receiver(seed: int) -> None:
    # Every frame may be the one that is missing: the last one comes first, or only it was lost.
    rng = random.Random(seed)
    box, inbox = Outbox[int](capacity=WINDOW), Inbox()
    for i in range(WINDOW + 500):
        box.put(i)
    frames = [(seq, box.oldest) for seq, _ in box.due()]
    held_back = frames.pop(0)
    rng.shuffle(frames)
    for seq, oldest in [*frames, held_back]:
        assert inbox.accept(KEY, seq, oldest, 0.0).verdict is Verdict.NEW
        assert inbox.changes()[0].mark.beyond.bit_length() <= WINDOW
    assert inbox.changes()[0].mark == Watermark(WINDOW + 500)


# Both ends, and everything that can happen between them


@dataclass(frozen=True)
class Sent:
    """A frame on its way."""

    key: SourceKey
    seq: int
    oldest: int
    payload: int


@dataclass(frozen=True)
class Answer:
    """A reply on its way."""

    key: SourceKey
    seq: int
    epoch: int
    durable_seq: int


@dataclass
class Sender:
    """One life of a replica, and what became of its payloads."""

    box: Outbox[int]
    capacity: int
    payloads: dict[int, int] = field(default_factory=dict)
    """By number: all that were ever put."""
    dropped: set[int] = field(default_factory=set)
    """Numbers that it gave up for want of room."""

    def put(self, payload: int) -> int:
        oldest, dropped = self.box.oldest, self.box.dropped
        seq = self.box.put(payload)
        self.payloads[seq] = payload
        if self.box.dropped > dropped:
            assert self.box.dropped == dropped + 1
            self.dropped.add(oldest)
        return seq


@dataclass
class Books:
    """What a receiver has counted; the part that a checkpoint stores."""

    counted: Counter[int] = field(default_factory=Counter)
    """Payloads."""
    settled: dict[SourceKey, set[int]] = field(default_factory=dict)
    """Numbers, the plain way, from the first that was the receiver's business."""
    lost: int = 0
    """As the inbox says."""
    missed: set[tuple[SourceKey, int]] = field(default_factory=set)
    """Those lost, by the plain way of counting."""

    def copy(self) -> Books:
        settled = {key: set(numbers) for key, numbers in self.settled.items()}
        return Books(self.counted.copy(), settled, self.lost, set(self.missed))


@dataclass
class Receiver:
    """One life of the estimator."""

    epoch: int
    inbox: Inbox
    books: Books

    def take(self, frame: Sent) -> Answer:
        arrival = self.inbox.accept(frame.key, frame.seq, frame.oldest, 0.0)
        assert arrival.verdict is not Verdict.OUT_OF_WINDOW
        books = self.books
        books.lost += arrival.lost
        known = books.settled.setdefault(frame.key, set(range(1, frame.oldest)))
        missing = set(range(1, frame.oldest)) - known
        books.missed |= {(frame.key, seq) for seq in missing}
        known |= missing
        assert (arrival.verdict is Verdict.NEW) == (frame.seq not in known)
        if arrival.verdict is Verdict.NEW:
            known.add(frame.seq)
            books.counted[frame.payload] += 1
        return Answer(frame.key, frame.seq, self.epoch, self.inbox.durable_seq(frame.key))


picks = st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=6)
"""Which messages on their way arrive next, in this order, and whether each comes again later."""


class Delivery(RuleBasedStateMachine):
    """Senders that restart and drop, a network that does anything, receivers that die anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stored_sources: dict[SourceKey, Source] = {}
        self.stored = Books()
        self.receiver = Receiver(1, Inbox(), Books())
        self.zombies: list[Receiver] = []
        self.senders: dict[SourceKey, Sender] = {}
        self.live: dict[str, SourceKey] = {}
        self.payload = 0
        # What is never picked from these is lost.
        self.frames: list[Sent] = []
        self.answers: list[Answer] = []

    @initialize(capacities=st.lists(st.integers(2, 6), min_size=1, max_size=3))
    def replicas_start(self, capacities: list[int]) -> None:
        for i, capacity in enumerate(capacities):
            self._begin(f"replica-{i}", 1, capacity)

    def _begin(self, name: str, incarnation: int, capacity: int) -> None:
        self.live[name] = (name, incarnation)
        self.senders[name, incarnation] = Sender(Outbox[int](capacity), capacity)

    def _sender(self, pick: int) -> tuple[SourceKey, Sender]:
        key = self.live[sorted(self.live)[pick % len(self.live)]]
        return key, self.senders[key]

    # Senders

    @rule(pick=st.integers(0, 2), count=st.integers(1, 4))
    def send(self, pick: int, count: int) -> None:
        key, sender = self._sender(pick)
        for _ in range(count):
            self.payload += 1
            seq = sender.put(self.payload)
            self.frames.append(Sent(key, seq, sender.box.oldest, self.payload))

    @precondition(lambda self: any(self.senders[key].box.due() for key in self.live.values()))
    @rule()
    def send_what_is_due(self) -> None:
        for key in self.live.values():
            box = self.senders[key].box
            self.frames += [Sent(key, seq, box.oldest, x) for seq, x in box.due()]

    @precondition(lambda self: len(self.senders) < 5)
    @rule(pick=st.integers(0, 2), capacity=st.integers(2, 6))
    def replica_restarts(self, pick: int, capacity: int) -> None:
        (name, incarnation), sender = self._sender(pick)
        if sender.payloads:
            self._begin(name, incarnation + 1, capacity)

    # The network

    @precondition(lambda self: self.frames)
    @rule(picks=picks)
    def deliver(self, picks: list[tuple[int, bool]]) -> None:
        self._deliver(picks, self.receiver)

    @precondition(lambda self: self.frames and self.zombies)
    @rule(picks=picks, zombie=st.integers(0, 9))
    def deliver_to_a_zombie(self, picks: list[tuple[int, bool]], zombie: int) -> None:
        self._deliver(picks, self.zombies[zombie % len(self.zombies)])

    def _deliver(self, picks: list[tuple[int, bool]], receiver: Receiver) -> None:
        for pick, again in picks[: len(self.frames)]:
            at = pick % len(self.frames)
            frame = self.frames[at] if again else self.frames.pop(at)
            self.answers.append(receiver.take(frame))

    @precondition(lambda self: self.answers)
    @rule(picks=picks)
    def answer(self, picks: list[tuple[int, bool]]) -> None:
        for pick, again in picks[: len(self.answers)]:
            at = pick % len(self.answers)
            self._hear(self.answers[at] if again else self.answers.pop(at))

    def _hear(self, answer: Answer) -> None:
        self.senders[answer.key].box.answered(answer.seq, answer.epoch, answer.durable_seq)

    # The receiver. Frames may come between any two steps of a checkpoint, and so may its death.

    @precondition(lambda self: self.receiver.inbox.changes())
    @rule(stop=st.sampled_from(["made", "stored", "confirmed"]), some=picks, more=picks)
    def checkpoint(
        self, stop: str, some: list[tuple[int, bool]], more: list[tuple[int, bool]]
    ) -> None:
        sources, books = self.receiver.inbox.changes(), self.receiver.books.copy()
        self._deliver(some, self.receiver)
        if stop == "made":
            return
        self.stored_sources |= {source.key: source for source in sources}
        self.stored = books
        self._deliver(more, self.receiver)
        if stop == "confirmed":
            self.receiver.inbox.confirm(sources)

    @precondition(lambda self: self.receiver.books.counted != self.stored.counted)
    @rule(lives_on=st.booleans())
    def crash(self, lives_on: bool) -> None:
        if lives_on:
            self.zombies.append(self.receiver)
        inbox = Inbox(self.stored_sources.values())
        self.receiver = Receiver(self.receiver.epoch + 1, inbox, self.stored.copy())

    # What holds at every moment

    @invariant()
    def counts_no_payload_twice(self) -> None:
        for books in (self.stored, self.receiver.books):
            assert set(books.counted.values()) <= {1}

    @invariant()
    def counts_every_loss_once(self) -> None:
        books = self.receiver.books
        assert books.lost == len(books.missed)
        for key, seq in books.missed:
            assert seq in self.senders[key].dropped
            assert books.counted[self.senders[key].payloads[seq]] == 0

    @invariant()
    def calls_durable_only_what_is_stored_or_given_up(self) -> None:
        for key, sender in self.senders.items():
            for receiver in (self.receiver, *self.zombies):
                for seq in range(1, receiver.inbox.durable_seq(key) + 1):
                    assert self._kept(sender, seq)

    @invariant()
    def forgets_only_what_is_stored(self) -> None:
        for sender in self.senders.values():
            for seq in range(1, sender.box.oldest):
                assert self._kept(sender, seq)

    def _kept(self, sender: Sender, seq: int) -> bool:
        return seq in sender.dropped or self.stored.counted[sender.payloads[seq]] == 1

    @invariant()
    def remembers_a_bounded_amount(self) -> None:
        for sender in self.senders.values():
            held = len(sender.payloads) + 1 - sender.box.oldest
            assert len(sender.box.due()) <= held == len(sender.box) <= sender.capacity
            assert sender.box.dropped == len(sender.dropped)
        for source in self.receiver.inbox.changes():
            assert source.mark.beyond.bit_length() <= self.senders[source.key].capacity

    @invariant()
    def contradicts_itself_nowhere(self) -> None:
        assert self.receiver.inbox.faults() == []

    # What holds once the faults have stopped

    def teardown(self) -> None:
        for key in self.live.values():
            self._drain(key)
        self.checkpoint("confirmed", [], [])
        for key in self.live.values():
            self._drain(key)
            sender = self.senders[key]
            for seq, payload in sender.payloads.items():
                # It may have been dropped after it was counted, and before that was known.
                times = self.receiver.books.counted[payload]
                assert times == 1 or (times == 0 and seq in sender.dropped)
            assert len(sender.box) <= 1
        self.counts_no_payload_twice()
        self.counts_every_loss_once()
        self.forgets_only_what_is_stored()
        self.contradicts_itself_nowhere()

    def _drain(self, key: SourceKey) -> None:
        """The next payload, as one comes every second, and all that is due after its answer."""
        sender = self.senders[key]
        self.payload += 1
        sender.put(self.payload)
        for _ in range(2):  # what is due now, and what the first answer of a new epoch adds
            for seq, payload in sender.box.due():
                frame = Sent(key, seq, sender.box.oldest, payload)
                self._hear(self.receiver.take(frame))
        assert sender.box.due() == []


TestDelivery = Delivery.TestCase
TestDelivery.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("seed", range(4))
def test_delivery_holds_over_a_long_life(seed: int) -> None:
    # Hypothesis finds the short way to a fault; this goes far: hundreds of frames, dozens of lives.
    rng = random.Random(seed)
    world = Delivery()
    world.replicas_start([30, 3, 60][: 1 + seed % 3])

    def some() -> list[tuple[int, bool]]:
        return [(rng.randrange(100), rng.random() < 0.2) for _ in range(rng.randrange(7))]

    for step in range(1500):
        match rng.choices(range(8), weights=[30, 10, 0.1, 25, 15, 25, 12, 2])[0]:
            case 0:
                world.send(rng.randrange(3), rng.randint(1, 3))
            case 1:
                world.send_what_is_due()
            case 2:
                world.replica_restarts(rng.randrange(3), rng.randint(2, 40))
            case 3:
                world.deliver(some())
            case 4 if world.zombies:
                world.deliver_to_a_zombie(some(), len(world.zombies) - 1 - rng.randrange(2))
            case 5:
                world.answer(some())
            case 6:
                world.checkpoint(rng.choice(["made", "stored", "confirmed"]), some(), some())
            case 7:
                world.crash(rng.random() < 0.7)
        if step % 20 == 0:
            # Old messages pile up and would crowd out the new ones: most of them are lost.
            del world.frames[:-15], world.answers[:-15]
            world.counts_no_payload_twice()
            world.counts_every_loss_once()
            world.calls_durable_only_what_is_stored_or_given_up()
            world.forgets_only_what_is_stored()
            world.remembers_a_bounded_amount()
            world.contradicts_itself_nowhere()
    assert world.receiver.epoch > 10
    assert len(world.stored.counted) > 100
    world.teardown()
