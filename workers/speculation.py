"""A worker's step, without an engine: predict, choose, observe.

    schedule    the engine says what it verifies; the drafts of the last step are matched to it
    plan        how many positions it is to draft then
    verified    it says what came out; labels go into the round
    drafted     it drafts the next step's tokens; they are predicted, and cut to length

Between any two steps an order may change coefficients and policy. While no orders come, the worker
fits by itself.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from estimator_service.logistic import Array, predict
from estimator_service.messages import CoefficientSet, Version
from workers.admission import Admission
from workers.config import WorkerConfig
from workers.cost import StepCost
from workers.labels import Draft, Pending, Request, observe
from workers.lease import Lease
from workers.local_fit import LocalFit
from workers.record import Record
from workers.rounds import Round, Rounds
from workers.vllm.rpc import Order

REFIT_STEPS = 100
"""Steps between two fits of a worker's own; the same as vLLM's."""
ROUNDS_KEPT = 64
"""Rounds behind fits of a worker's own that wait to be drained; older ones are dropped."""


@dataclass(frozen=True, eq=False)
class Drafted:
    """One step's drafts, R of them."""

    requests: Sequence[str]
    """[R], ids."""
    tokens: Sequence[Sequence[int]]
    """[R][D], of D <= K positions."""
    features: Array
    """[R, K]; NaN where there is none."""
    details: Mapping[str, Array] = field(default_factory=dict)
    """By name, [R, K]; for the record, if it is on."""


class Speculation:
    """One worker's predictions, choices and labels for a pair with K = `positions`."""

    def __init__(
        self,
        config: WorkerConfig,
        positions: int,
        *,
        vary_depth: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.positions = positions
        self.coefficients = CoefficientSet.initial(positions)
        self.cost = StepCost(config.cost)
        self.admission = Admission(
            positions,
            config.order,
            self.cost,
            clock=clock,
            rng=random.Random(config.seed),
            draft_depth=config.draft_depth,
            vary_depth=vary_depth,
        )
        self.record = Record(config.record)
        self.rounds = Rounds()
        self.lease = Lease(config.lease)
        self.refits = 0
        """Fits that this worker made by itself."""
        self.unmatched: Counter[str] = Counter()
        """Drafts that were verified and gave no label, by reason."""
        self.lengths: Counter[int] = Counter()
        """Drafts by how much of them was to be verified."""
        self.advised: Counter[int] = Counter()
        """Drafts by how much of them the budget would have verified."""
        self.depths: Counter[int] = Counter()
        """Steps by how many positions they were to draft."""
        self._newest = self.coefficients.version
        self._local: LocalFit | None = None
        self._since_refit = 0
        self._fitted_from: deque[Round] = deque(maxlen=ROUNDS_KEPT)
        self._step = 0
        self._pending = Pending()
        self._details: dict[str, Mapping[str, Sequence[float]]] = {}
        self._dispatched: tuple[CoefficientSet, bool] | None = None
        self._verifying: dict[str, tuple[Draft, int]] = {}
        self._seen: set[str] = set()

    def adopt(self, coefficients: CoefficientSet) -> bool:
        """Predict with these from now on, unless newer ones were seen; says whether.

        The same version again is how a rank that differs is put right. What was fitted here is 0.0,
        below what a fleet had published before.
        """
        if coefficients.version < self._newest and coefficients.version != self.applied:
            return False
        self._newest = max(self._newest, coefficients.version)
        self.coefficients = coefficients
        self._local = None
        return True

    def exchange(self, order: Order) -> list[Round]:
        """Apply an order, and drain what was gathered until then.

        Whoever does this is in charge of fitting: for a while after it the worker does not.
        """
        if order.coefficients is not None:
            self.adopt(order.coefficients)
        if order.policy is not None:
            self.admission.policy = order.policy
        if order.exploration is not None:
            self.admission.explore(order.exploration)
        self.lease.renew()
        self._since_refit = 0
        rounds = [*self._fitted_from, *self.rounds.drain()]
        self._fitted_from.clear()
        return rounds

    @property
    def applied(self) -> Version:
        """The version in force."""
        return self.coefficients.version

    def schedule(
        self,
        *,
        new: Iterable[Request] = (),
        resumed: Iterable[str] = (),
        finished: Iterable[str] = (),
        admitted: Mapping[str, Sequence[int]],
        unlike: frozenset[str] = frozenset(),
        runs: bool = True,
    ) -> None:
        """A step begins.

        Args:
            new: requests that it runs for the first time.
            resumed: requests that come back after a preemption.
            finished: requests that were over before it.
            admitted: the draft tokens that it verifies, by request.
            unlike: requests whose drafts are judged by another rule than that of the feature.
            runs: False if nothing is scheduled, and the engine only tells who is finished.
        """
        self._pending.forget(finished)
        self._seen.difference_update(finished)
        self._pending.interrupt(resumed)
        self._pending.begin(new)
        drafts = self._pending.take(admitted)
        self._verifying = {}
        lengths = []
        for request_id, tokens in admitted.items():
            draft = drafts.get(request_id)
            if draft is None:
                self.unmatched["no such draft"] += 1
                continue
            lengths.append(len(tokens))
            if draft.request.skipped is not None:
                self._skip(draft)
            elif request_id in unlike:
                self.unmatched["judged by another rule"] += 1
            else:
                self._verifying[request_id] = draft, len(tokens)
        if self._dispatched is not None:
            coefficients, explored = self._dispatched
            if runs:
                self.rounds.step(coefficients, lengths, explored=explored)
            self._dispatched = None

    def plan(self, requests: int) -> int:
        """How many positions the step that begins drafts, for each of `requests`."""
        depth = self.admission.plan(requests)
        self.depths[depth] += 1
        return depth

    def verified(self, emitted: Mapping[str, Sequence[int]]) -> None:
        """The step's outcome: the tokens that each request emitted, accepted ones first."""
        for request_id, tokens in emitted.items():
            kept = self._pending.emit(request_id, tokens)
            draft, admitted = self._verifying.pop(request_id, (None, 0))
            if draft is None:
                continue
            if not tokens:
                self.unmatched["discarded"] += 1
                continue
            labels = observe(draft, admitted, tokens, kept)
            self.rounds.observe(draft.coefficients, draft.request.stratum, labels)
            if self.record.enabled:
                self.record.add(
                    draft,
                    self._details[request_id],
                    admitted=min(admitted, kept),
                    accepted=min(len(tokens) - 1, kept),
                )
        self.unmatched["lost"] += len(self._verifying)
        self._verifying = {}
        self._learn()

    def drafted(self, drafted: Drafted) -> list[int]:
        """[R], how many tokens of each draft to verify; the rest is not sent."""
        self._step += 1
        known = [self._pending.request(request_id) for request_id in drafted.requests]
        intercepts = np.array(
            [
                self.coefficients.intercepts_of(request.stratum if request else "")
                for request in known
            ]
        )
        choice = self.admission.choose(
            predict(self.coefficients.slope, intercepts, drafted.features)
        )
        self.lengths.update(choice.lengths.tolist())
        self.advised.update(choice.advised.tolist())
        self._dispatched = self.coefficients, choice.explored
        rows = drafted.features.tolist()
        self._pending.hold(
            Draft(request, self._step, tuple(tokens), tuple(features), self.coefficients)
            for request, tokens, features in zip(known, drafted.tokens, rows, strict=True)
            if request is not None
        )
        if self.record.enabled:
            columns = {name: values.tolist() for name, values in drafted.details.items()}
            self._details = {
                request_id: {name: rows[i] for name, rows in columns.items()}
                for i, request_id in enumerate(drafted.requests)
            }
        lengths: list[int] = choice.lengths.tolist()
        return lengths

    def nothing_drafted(self) -> None:
        """A step ends without drafts: what was held can no longer be matched."""
        self._pending.hold([])
        self._dispatched = None

    def status(self) -> dict[str, Any]:
        """For people, in plain types."""
        exploring = self.admission.exploring
        return {
            "policy": self.admission.policy.policy.value,
            "length": self.admission.policy.length,
            "exploring": None if exploring is None else exploring.share,
            "steps": self._step,
            "admitted_lengths": {str(n): count for n, count in sorted(self.lengths.items())},
            "advised_lengths": {str(n): count for n, count in sorted(self.advised.items())},
            "depths": {str(n): count for n, count in sorted(self.depths.items())},
            "unmatched": {reason: n for reason, n in self.unmatched.items() if n},
            "local": not self.lease.held,
            "refits": self.refits,
            "labels": self.rounds.observed,
            "forgotten_labels": self.rounds.forgotten,
            "record": self.record.limit,
            "recorded": len(self.record),
        }

    def _learn(self) -> None:
        """Fit, if nobody else has for long."""
        self.lease.step()
        if self.lease.held:
            return
        self._since_refit += 1
        if self._since_refit < REFIT_STEPS:
            return
        self._since_refit = 0
        self._local = self._local or LocalFit(self.coefficients)
        rounds = self.rounds.drain()
        lost = max(0, len(self._fitted_from) + len(rounds) - ROUNDS_KEPT)
        for round_ in list(self._fitted_from)[:lost]:
            self.rounds.forgotten += round_.labels
        self._fitted_from.extend(rounds)
        self.coefficients = self._local.refit(rounds) or self.coefficients
        self.refits += 1

    def _skip(self, draft: Draft) -> None:
        if draft.request.id not in self._seen and draft.request.skipped is not None:
            self._seen.add(draft.request.id)
            self.rounds.skip(draft.coefficients, draft.request.skipped)
