from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from estimator_service.config import EstimatorConfig
from estimator_service.estimator import Estimator
from estimator_service.messages import (
    CoefficientSet,
    Frame,
    PairKey,
    Policy,
    PolicyOrder,
    Reply,
    Source,
    Version,
    decode,
    encode,
)
from estimator_service.orders import OrderError
from estimator_service.service import EstimatorAway
from estimator_service.store import Store
from tests.estimator_service.fleet import ManualClock, Truth
from tests.workers.simulated import STRATUM, Worker
from workers.exchange import FRAMES, Exchange

TRUTH = Truth(0.8, (0.6, 0.1, -0.3))
KEY = PairKey("target", "draft", "draft_model", 3)


class Link:
    """The real estimator, on the bytes that cross a process, behind a wire that can be cut."""

    def __init__(self) -> None:
        self.store = Store.open("sqlite://")
        self.clock = ManualClock()
        self.cut: str | None = None
        self.lose_replies = False
        self.calls = 0
        self.start()

    def start(self) -> None:
        self.estimator = Estimator(self.store, EstimatorConfig(), self.clock)

    async def exchange(self, key: PairKey, frames: Sequence[Frame]) -> list[Reply]:
        self.calls += 1
        if self.cut is not None:
            raise EstimatorAway(self.cut)
        self.estimator.register(key)
        replies = [encode(self.estimator.receive(encode(frame))) for frame in frames]
        if self.lose_replies:
            raise EstimatorAway("the reply was lost")
        return [decode(reply, Reply) for reply in replies]

    def refit(self) -> None:
        self.clock.advance(1.0)
        self.estimator.refit()
        self.estimator.checkpoint()

    @property
    def labels(self) -> float:
        (pair,) = self.estimator.snapshot().pairs
        return sum(pair.labels)


def exchange(worker: Any, link: Link, **settings: Any) -> Exchange:
    return Exchange(worker, link, KEY, replica="r1", incarnation=1, **settings)


async def settle(mine: Exchange, link: Link) -> None:
    """Two exchanges, so that what the first one applied is seen."""
    await mine.once()
    link.refit()
    await mine.once()


def test_labels_arrive_once_and_coefficients_come_back() -> None:
    async def story() -> None:
        worker, link = Worker(TRUTH), Link()
        mine = exchange(worker, link)
        assert await mine.once()
        for _ in range(30):
            worker.serve(50)
            await settle(mine, link)
        assert mine.applied.number > 1
        assert worker.speculation.applied == mine.applied
        await mine.flush()
        link.refit()
        assert link.labels == mine.counters["labels"] == worker.speculation.rounds.observed
        fitted = worker.speculation.coefficients
        found = [fitted.slope, *fitted.intercepts_of(STRATUM)]
        np.testing.assert_allclose(found, [TRUTH.slope, *TRUTH.intercepts], atol=0.15)

    asyncio.run(story())


def test_a_new_replica_has_the_fleets_coefficients_after_one_exchange() -> None:
    async def story() -> None:
        link = Link()
        first = Worker(TRUTH)
        mine = exchange(first, link)
        await mine.once()
        first.serve(500)
        await settle(mine, link)
        link.refit()
        second = Worker(TRUTH, seed=1)
        joined = Exchange(second, link, KEY, replica="r2", incarnation=1)
        assert await joined.once()
        assert second.speculation.coefficients == link.estimator.coefficients(KEY.id)
        assert second.speculation.coefficients.source is Source.FITTED

    asyncio.run(story())


def test_while_the_estimator_is_away_the_worker_is_left_alone_and_learns_by_itself() -> None:
    async def story() -> None:
        worker, link = Worker(TRUTH, lease=1), Link()
        mine = exchange(worker, link)
        for _ in range(3):
            worker.serve(50)
            await settle(mine, link)
        assert mine.applied > Version()
        link.cut = "no route"
        calls = len(worker.orders)
        for _ in range(40):
            worker.serve(100)
            assert not await mine.once()
        # The first of them still drained: nobody knew.
        assert len(worker.orders) == calls + 1
        assert worker.speculation.refits > 0
        assert mine.status()["estimator_away"] == "no route"
        assert mine.status()["frames_held"] < 10
        link.cut = None
        assert await mine.once()
        assert worker.speculation.applied == link.estimator.coefficients(KEY.id).version
        assert not worker.speculation.status()["local"]
        await mine.flush()
        link.refit()
        assert link.labels == worker.speculation.rounds.observed

    asyncio.run(story())


def test_a_frame_whose_reply_was_lost_is_sent_again_and_counted_once() -> None:
    async def story() -> None:
        worker, link = Worker(TRUTH), Link()
        mine = exchange(worker, link)
        await mine.once()
        worker.serve(100)
        link.lose_replies = True
        assert not await mine.once()
        link.lose_replies = False
        await mine.flush()
        link.refit()
        assert mine.counters["frames_duplicate"] > 0
        assert link.labels == worker.speculation.rounds.observed > 0

    asyncio.run(story())


def test_what_an_estimator_had_not_stored_is_sent_to_the_next_one() -> None:
    async def story() -> None:
        worker, link = Worker(TRUTH), Link()
        mine = exchange(worker, link)
        await mine.once()
        for _ in range(5):
            worker.serve(20)
            await mine.once()
        link.start()
        versions = [mine.applied]
        for _ in range(5):
            worker.serve(20)
            await settle(mine, link)
            versions.append(mine.applied)
        await mine.flush()
        link.refit()
        assert versions == sorted(versions)
        assert link.labels == worker.speculation.rounds.observed
        assert mine.counters["frames_lost"] == 0

    asyncio.run(story())


def test_a_policy_is_told_once_and_a_local_one_ends_by_itself() -> None:
    async def story() -> None:
        now = [0.0]
        worker, link = Worker(TRUTH, policy="advisory"), Link()
        mine = exchange(worker, link, clock=lambda: now[0])
        admission = worker.speculation.admission
        link.cut = "not yet"
        await mine.once()
        await mine.steer(PolicyOrder(Policy.FIXED, 1), 10.0)
        assert admission.policy == PolicyOrder(Policy.FIXED, 1)
        link.cut = None
        await mine.once()
        await mine.once()
        assert admission.policy == PolicyOrder(Policy.FIXED, 1)
        now[0] = 10.0
        link.estimator.policy(KEY.id, PolicyOrder(Policy.FULL), actor="a", reason="b")
        for _ in range(3):
            await mine.once()
        assert admission.policy == PolicyOrder(Policy.FULL)
        # The local one, the fleet's when that ended, and the fleet's new one.
        told = [order["policy"]["policy"] for order in worker.orders if "policy" in order]
        assert told == ["fixed", "adaptive", "full"]
        with pytest.raises(OrderError, match="length"):
            await mine.steer(PolicyOrder(Policy.FIXED, 9), 10.0)

    asyncio.run(story())


def test_until_the_fleet_says_otherwise_a_worker_keeps_the_policy_it_was_configured_with() -> None:
    async def story() -> None:
        worker, link = Worker(TRUTH, policy="advisory"), Link()
        link.cut = "not yet"
        mine = exchange(worker, link)
        await mine.once()
        await mine.flush()
        assert worker.speculation.admission.policy == PolicyOrder(Policy.ADVISORY)

    asyncio.run(story())


def test_ranks_that_differ_are_counted_and_put_right_in_the_same_exchange() -> None:
    async def story() -> None:
        ranks = [Worker(TRUTH, rank=0), Worker(TRUTH, rank=1)]

        async def both(order: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
            return [answer for rank in ranks for answer in await rank(order)]

        link = Link()
        mine = exchange(both, link)
        await mine.once()
        for rank in ranks:
            rank.serve(200)
        await settle(mine, link)
        await settle(mine, link)
        assert mine.applied > Version()
        assert mine.counters["rank_disagreements"] == 0
        wrong = CoefficientSet(mine.applied, Source.FITTED, 9.0, (0.0,) * 3)
        ranks[1].speculation.coefficients = wrong
        await mine.once()
        assert mine.counters["rank_disagreements"] == 1
        assert ranks[1].speculation.coefficients == ranks[0].speculation.coefficients

    asyncio.run(story())


def test_a_call_carries_a_bounded_number_of_frames() -> None:
    async def story() -> None:
        worker, link = Worker(TRUTH), Link()
        mine = exchange(worker, link)
        await mine.once()
        # Answered and never stored, so all of them are sent again to the next estimator.
        for _ in range(3 * FRAMES):
            worker.serve(2)
            await mine.once()
        link.start()
        before = link.calls
        assert await mine.flush()
        assert link.calls - before >= 3
        link.refit()
        assert link.labels == worker.speculation.rounds.observed

    asyncio.run(story())


def test_an_engine_that_fails_ends_nothing() -> None:
    async def story() -> None:
        broken = [True]
        worker, link = Worker(TRUTH), Link()

        async def call(order: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
            if broken[0]:
                raise RuntimeError("the engine is busy dying")
            return await worker(order)

        mine = exchange(call, link, interval=0.001)
        running = asyncio.create_task(mine.run())
        while mine.counters["failures"] < 3:
            await asyncio.sleep(0.001)
        broken[0] = False
        worker.serve(100)
        await mine.flush()
        await running
        link.refit()
        assert link.labels == worker.speculation.rounds.observed > 0

    asyncio.run(story())


def test_an_order_that_breaks_a_rule_is_refused_and_reporting_goes_on() -> None:
    class Wrong(Link):
        async def exchange(self, key: PairKey, frames: Sequence[Frame]) -> list[Reply]:
            replies = await super().exchange(key, frames)
            steep = CoefficientSet(Version(9, 9), Source.FITTED, float("nan"), (0.0,) * 3)
            return [
                Reply(epoch=9, status=reply.status, durable_seq=0, coefficients=steep)
                for reply in replies
            ]

    async def story() -> None:
        worker, link = Worker(TRUTH), Wrong()
        mine = exchange(worker, link)
        for _ in range(3):
            assert await mine.once()
        assert mine.counters["orders_refused"] >= 3
        assert worker.speculation.applied == Version()

    asyncio.run(story())
