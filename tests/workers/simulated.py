"""A worker without an engine: the real `Speculation`, on drafts with a known truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from estimator_service.logistic import predict
from tests.estimator_service.fleet import Truth
from workers.config import WorkerConfig
from workers.labels import Request
from workers.speculation import Drafted, Speculation
from workers.vllm.rpc import Exchanged, coefficients_hash, read_order, write_exchanged

STRATUM = "sampled:default"


class Worker:
    """Serves one endless request at a time; called, it is its engine's `collective_rpc`."""

    def __init__(self, truth: Truth, seed: int = 0, rank: int = 0, **settings: Any) -> None:
        config = WorkerConfig.model_validate({"policy": "full", **settings})
        self.speculation = Speculation(config, truth.positions, vary_depth=False)
        self.rank = rank
        self.orders: list[dict[str, Any]] = []
        self._truth = truth
        self._rng = np.random.default_rng(seed)
        self._drafts: dict[str, tuple[list[int], int]] = {}
        """By request, its tokens that are verified and how many of them are accepted."""

    def serve(self, steps: int, requests: int = 4) -> None:
        names = [f"r{i}" for i in range(requests)]
        mine, truth = self.speculation, self._truth
        for _ in range(steps):
            admitted = {name: tokens for name, (tokens, _) in self._drafts.items()}
            new = [] if self._drafts else [Request(name, STRATUM) for name in names]
            mine.schedule(new=new, admitted=admitted)
            mine.verified(
                {name: [*tokens[:accepted], 0] for name, (tokens, accepted) in self._drafts.items()}
                or {name: [0] for name in names}
            )
            features = truth.features(self._rng, (requests, truth.positions))
            p = predict(truth.slope, np.array(truth.intercepts), features)
            accepted = np.cumprod(self._rng.random(p.shape) < p, axis=1).sum(axis=1)
            tokens = list(range(1, truth.positions + 1))
            lengths = mine.drafted(Drafted(names, [tokens] * requests, features))
            self._drafts = {
                name: (tokens[:length], min(length, int(count)))
                for name, length, count in zip(names, lengths, accepted, strict=True)
            }

    async def __call__(self, order: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
        self.orders.append(order)
        mine = self.speculation
        rounds = mine.exchange(read_order(order, mine.positions))
        return [
            write_exchanged(
                Exchanged(self.rank, mine.applied, coefficients_hash(mine.coefficients), rounds)
            )
        ]
