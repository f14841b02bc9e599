"""A replica's side of the loop: drain the workers, send to the estimator, apply its answer.

    once    workers --rounds--> outbox --frames--> estimator
            workers <--order-- coefficients, policy, exploration <--reply--'

It runs beside the serving of requests and touches it in one place: a call into the engine, which
waits for the step in flight. While the estimator is away nothing is drained: the workers go on
summing, and after a while fit by themselves. Nothing here raises into the serving path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import structs

from estimator_service.delivery import Outbox
from estimator_service.messages import (
    CoefficientSet,
    ExplorationOrder,
    Frame,
    PairKey,
    PolicyOrder,
    Reply,
    Version,
)
from estimator_service.service import EstimatorAway
from workers.frames import frames_of
from workers.vllm.ranks import compare, correction
from workers.vllm.rpc import Exchanged, Order, OrderError, read_exchanged, read_order, write_order

_log = logging.getLogger(__name__)
FRAMES = 16
"""Sent in one call at most; the rest follows with the next."""


class Workers(Protocol):
    """The workers of this replica's engine, all ranks of it."""

    async def __call__(self, order: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
        """`exchange` on every rank, by `collective_rpc`."""


class Link(Protocol):
    """The way to the estimator."""

    async def exchange(self, key: PairKey, frames: Sequence[Frame]) -> list[Reply]:
        """Its answers, one for each frame. Raises EstimatorAway, within bounded time."""


class Exchange:
    """One replica's exchange of labels for coefficients.

    Args:
        workers: calls them.
        link: calls the estimator.
        key: the pair.
        replica: this replica's name, distinct in the fleet.
        incarnation: of this process; a later life of the same name has a larger number.
        interval: seconds between two exchanges.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        workers: Workers,
        link: Link,
        key: PairKey,
        *,
        replica: str,
        incarnation: int,
        interval: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key = key
        self.replica = replica
        self.incarnation = incarnation
        self._workers = workers
        self._link = link
        self._interval = interval
        self._clock = clock
        self._outbox: Outbox[Frame] = Outbox()
        self._busy = asyncio.Lock()
        self._ending = asyncio.Event()
        self._applied = Version()
        self._published: CoefficientSet | None = None
        """The newest that the estimator gave."""
        self._unlike = False
        """The ranks differ, and are to be corrected."""
        self._policy: PolicyOrder | None = None
        """The fleet's, once it is known."""
        self._told: PolicyOrder | None = None
        self._local_policy: tuple[PolicyOrder, float] | None = None
        self._exploration: ExplorationOrder | None = None
        self._epoch = 0
        self._answered_at: float | None = None
        self._away: str | None = "not called yet"
        self.counters: Counter[str] = Counter()

    @property
    def applied(self) -> Version:
        """In force at the workers; 0.0 for the cold start and for what they fit by themselves."""
        return self._applied

    @property
    def connected(self) -> bool:
        """Whether the estimator answered the last call."""
        return self._away is None

    async def run(self) -> None:
        """Exchange until `flush`, whatever fails."""
        while not self._ending.is_set():
            started = self._clock()
            try:
                await self.once()
            except Exception:
                # The engine's failures are for its own health check.
                if not self.counters["failures"]:
                    _log.exception("an exchange failed; the next one is tried as ever")
                self.counters["failures"] += 1
            left = started + self._interval - self._clock()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), max(0.0, left))

    async def once(self) -> bool:
        """One exchange; False if the estimator did not answer.

        Raises what the call into the engine raises.
        """
        async with self._busy:
            back = not self.connected
            if not back:
                await self._drain()
            if not await self._send():
                return False
            if back:
                # The workers may have gone over to fits of their own.
                await self._drain()
            if self._news():
                # At once, so that a publication is in force everywhere within an interval; what
                # this drains is sent with the next exchange.
                await self._drain()
            return True

    async def flush(self) -> bool:
        """End: drain and send all there is; False if the estimator is away."""
        self._ending.set()
        async with self._busy:
            await self._drain()
            while await self._send():
                if not self._outbox.due():
                    return True
            return False

    async def steer(self, policy: PolicyOrder, seconds: float) -> None:
        """Verify by this policy for so long, whatever the fleet's says; then by the fleet's again.

        Raises OrderError, with nothing changed.
        """
        self._check(Order(policy=policy))
        async with self._busy:
            self._local_policy = policy, self._clock() + seconds
            await self._drain()

    def status(self) -> dict[str, Any]:
        """For people, in plain types."""
        answered = self._answered_at
        return {
            "replica": self.replica,
            "incarnation": self.incarnation,
            "pair": self.key.id,
            "applied": str(self._applied),
            "estimator_epoch": self._epoch,
            "estimator_away": self._away,
            "seconds_since_answer": None if answered is None else self._clock() - answered,
            "frames_held": len(self._outbox),
            "frames_dropped": self._outbox.dropped,
            **{name: int(n) for name, n in self.counters.items()},
        }

    # -- the workers ----------------------------------------------------------------------------

    async def _drain(self) -> None:
        order = self._order()
        answers = [
            read_exchanged(answer, self.key.num_speculative_tokens)
            for answer in await self._workers(write_order(order))
        ]
        first = min(answers, key=lambda answer: answer.rank)
        self._applied = first.applied
        if order.policy is not None:
            self._told = order.policy
        self._exploration = None
        self._unlike = self._differ(answers)
        for round_ in first.rounds:
            self.counters["labels"] += round_.labels
            for frame in frames_of(
                round_, pair=self.key.id, replica=self.replica, incarnation=self.incarnation
            ):
                self._outbox.put(frame)

    def _differ(self, answers: Sequence[Exchanged]) -> bool:
        """Whether the ranks do. Counted once for each exchange."""
        found = compare(answers)
        if found:
            if not self.counters["rank_disagreements"]:
                _log.error("ranks differ from the first: %s", found)
            self.counters["rank_disagreements"] += 1
        return bool(found.coefficients)

    def _order(self) -> Order:
        newest = self._published
        coefficients = None
        if newest is not None and newest.version > self._applied:
            coefficients = newest
        elif newest is not None and self._unlike and newest.version == self._applied:
            coefficients = correction(newest).coefficients
        policy = self._effective_policy()
        return Order(coefficients, None if policy == self._told else policy, self._exploration)

    def _effective_policy(self) -> PolicyOrder | None:
        """None leaves the workers what they were configured with."""
        if self._local_policy is not None and self._clock() >= self._local_policy[1]:
            self._local_policy = None
        if self._local_policy is not None:
            return self._local_policy[0]
        if self._policy is None and self._told is not None:
            return PolicyOrder()
        return self._policy

    def _news(self) -> bool:
        """Whether the workers lack coefficients or a policy. Exploration can wait a second."""
        order = self._order()
        return order.coefficients is not None or order.policy is not None

    def _check(self, order: Order) -> None:
        read_order(write_order(order), self.key.num_speculative_tokens)

    # -- the estimator --------------------------------------------------------------------------

    async def _send(self) -> bool:
        due = self._outbox.due()[:FRAMES]
        if not due:
            # A sign of life, which asks for coefficients too.
            due = [(self._outbox.put(hello := self._hello()), hello)]
        oldest = self._outbox.oldest
        frames = [
            structs.replace(
                frame, seq=seq, oldest=oldest, applied=self._applied, heard=self._outbox.epoch
            )
            for seq, frame in due
        ]
        try:
            replies = await self._link.exchange(self.key, frames)
        except EstimatorAway as error:
            self._away = str(error)
            self.counters["calls_unanswered"] += 1
            return False
        self._away = None
        self._answered_at = self._clock()
        for frame, reply in zip(frames, replies, strict=True):
            self._take(frame, reply)
        return True

    def _hello(self) -> Frame:
        return Frame(
            pair=self.key.id,
            replica=self.replica,
            incarnation=self.incarnation,
            seq=1,
            oldest=1,
            applied=self._applied,
            graded=self._applied,
            slope=0.0,
        )

    def _take(self, frame: Frame, reply: Reply) -> None:
        self._outbox.answered(frame.seq, reply.epoch, reply.durable_seq, reply.settled)
        self.counters[f"frames_{reply.status}"] += 1
        if reply.epoch < self._epoch:
            return
        self._epoch = reply.epoch
        told = Order(reply.coefficients, reply.policy, reply.exploration)
        try:
            self._check(told)
        except OrderError as error:
            if not self.counters["orders_refused"]:
                _log.error("the estimator's order is refused: %s", error)
            self.counters["orders_refused"] += 1
            return
        if told.coefficients is not None and (
            self._published is None or told.coefficients.version > self._published.version
        ):
            self._published = told.coefficients
        self._policy = reply.policy
        self._exploration = reply.exploration
