"""A real estimator in this process, fed with real frames, where the API expects a link to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from estimator_service.estimator import Estimator
from estimator_service.messages import PairKey, Reply, Snapshot, decode, encode
from estimator_service.service import EstimatorAway
from estimator_service.store import Store
from tests.estimator_service.fleet import ManualClock, SimulatedReplica, Truth

KEY = PairKey("org/target", "org/draft", "draft_model", 3)
TRUTH = {
    "greedy": Truth(0.7, (0.5, 0.3, 0.2)),
    "sampled-code": Truth(0.6, (0.2, 0.1, -0.1)),
}


class FleetSource:
    """Replicas that report over the wire's bytes, on a clock that the test moves."""

    def __init__(self, replicas: int = 2, truth: Mapping[str, Truth] = TRUTH) -> None:
        self.clock = ManualClock()
        self.store = Store.open("sqlite://")
        self.estimator = Estimator(self.store, None, self.clock)
        self.pair = self.estimator.register(KEY)
        self.replicas = [
            SimulatedReplica(f"replica-{i}", truth, np.random.default_rng(i), key=KEY)
            for i in range(replicas)
        ]
        self.away = ""

    def report(self, *names: str, drafts: int = 200) -> None:
        """One exchange of the named replicas, or of all."""
        for replica in self.replicas:
            if not names or replica.name in names:
                data = encode(replica.serve(drafts))
                reply = decode(encode(self.estimator.receive(data)), Reply)
                if reply.coefficients is not None:
                    replica.coefficients = reply.coefficients

    def learn(self, rounds: int = 3, seconds: float = 1.0) -> None:
        """Exchanges with a refit after each."""
        for _ in range(rounds):
            self.report()
            self.clock.advance(seconds)
            self.estimator.refit()

    async def snapshot(self) -> Snapshot:
        self._check()
        return decode(encode(self.estimator.snapshot()), Snapshot)

    async def status(self) -> Mapping[str, Any]:
        self._check()
        return {"epoch": self.estimator.epoch, "seconds_behind": float("nan")}

    def _check(self) -> None:
        if self.away:
            raise EstimatorAway(self.away)
