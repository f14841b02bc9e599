"""vLLM's acceptance estimator on the device, fed and read from outside.

vLLM's `OnlineAcceptanceEstimator` predicts, sums what became of its predictions, and refits itself
every hundred steps. Its kernels and its tensors stay, at their addresses, which captured graphs
hold. What changes is who fits:

    the fleet in charge    `exchange` hands the sums over and writes the coefficients it was given
    the fleet away         vLLM refits as ever; the sums of each refit wait to be handed over

Either way a round holds only labels of predictions that the coefficients it names have made: when
coefficients change, the drafts on their way at that moment are graded for nobody.

Nothing here waits for the device, and a failure stops the learning, never the serving: predictions
go on with the coefficients there are.

All requests are one stratum: vLLM's kernel predicts with one set of intercepts. Labels behind the
end of a text are among its sums, as they always were: the device does not know where a text ends.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from estimator_service.messages import CoefficientSet, Source, Version
from estimator_service.sketch import Sketch
from estimator_service.statistics import Statistics
from workers.lease import Lease
from workers.rounds import Round, StratumSums
from workers.vllm.device_snapshot import Arrays, Event, Snapshots, event_of
from workers.vllm.device_steering import Steering
from workers.vllm.device_tally import Tally

logger = logging.getLogger(__name__)

STRATUM = "all"
"""Of every request on the device path."""
ROUNDS_KEPT = 64
"""Rounds of local refits that wait for the fleet; older ones are dropped."""


class Kernels(Protocol):
    """vLLM's `OnlineAcceptanceEstimator`, as far as it is used; K positions."""

    REFIT_INTERVAL: int
    _steps_since_refit: int
    slope: Tensor
    """[1]."""
    intercepts: Tensor
    """[K]."""
    features: Tensor
    """[slots, K]."""
    info: Tensor
    """[K, 3], a, b, c of `statistics`."""
    grad: Tensor
    """[K, 2], g0, g1."""
    counts: Tensor
    """[K], n."""

    def predict(
        self,
        logits: Tensor,
        idx_mapping: Tensor,
        draft_step: Tensor,
        confidence_probs: Tensor,
        temperature: Tensor,
    ) -> None:
        """Write features, predictions and confidences."""

    def step(self, idx_mapping: Tensor, num_sampled: Tensor, num_rejected: Tensor) -> None:
        """Add a step's labels to the sums, and refit when it is time."""


@dataclass(frozen=True)
class _Closed:
    """What the host knows of a round whose sums are on their way to it."""

    graded: Version
    skipped: dict[str, int]


class DeviceEstimator:
    """Takes the place of an `OnlineAcceptanceEstimator` in vLLM's speculator.

    The speculator calls `step` once a step, and `predict` after it for the same requests.
    """

    def __init__(
        self,
        kernels: Kernels,
        steering: Steering,
        lease: Lease | None = None,
        depth: int = 4,
        event: Callable[[], Event] | None = None,
    ) -> None:
        """
        Args:
            kernels: vLLM's own, whose tensors are used.
            steering: says which steps explored.
            lease: how long the fleet stays in charge after an exchange.
            depth: snapshots that may be on their way to the host.
            event: makes an event of the device; by default what `event_of` says.
        """
        slots, self.positions = kernels.features.shape
        device = kernels.features.device
        self._kernels = kernels
        self._steering = steering
        self._lease = lease or Lease()
        self._tally = Tally(slots, self.positions, device)
        self._observable = torch.ones(slots, dtype=torch.int32, device=device)
        """[slots], whether the request there may be observed."""
        self._gradable = torch.zeros(slots, dtype=torch.int32, device=device)
        """[slots], whether the draft there may be: its request, and the coefficients in force
        predicted it."""
        self._unobservable: set[int] = set()
        self._nobody = (
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        coefficients = {"slope": kernels.slope, "intercepts": kernels.intercepts}
        sums = {"info": kernels.info, "grad": kernels.grad, "counts": kernels.counts}
        counts = {"cells": self._tally.cells, "admitted": self._tally.admitted}
        event = event or event_of(device)
        self._coming = Snapshots[_Closed](
            {**coefficients, **sums, **counts, "steps": self._tally.steps}, depth, event
        )
        self._proofs = Snapshots[Version](coefficients, depth, event)
        self._rounds: deque[Round] = deque(maxlen=ROUNDS_KEPT)
        self._skipped: Counter[str] = Counter()
        self._steps = 0
        """Since the round began."""
        self._own_steps = 0
        """Since the fleet was last in charge, or the last refit since then."""
        self._newest = Version()
        self.applied = Version()
        """In force; 0.0 for the cold start and for what was fitted here."""
        self.proof = CoefficientSet.initial(self.positions)
        """The coefficients in force, as the device held them when they were last looked at."""
        self.refits = 0
        """Refits made here, without the fleet."""
        self.dropped = 0
        """Rounds lost because nobody fetched them."""
        self.fault: str | None = None
        """Why learning has stopped, if it has."""
        # Called many times a step, and nothing is added to it.
        self.predict = kernels.predict

    @property
    def local(self) -> bool:
        """Whether vLLM fits by itself: nobody has exchanged for too long."""
        return not self._lease.held

    # The speculator's call.

    def step(self, idx_mapping: Tensor, num_sampled: Tensor, num_rejected: Tensor) -> None:
        """Grade the drafts that this step verified, those that may be.

        Args:
            idx_mapping: [R] int64, the slot of each request of the batch.
            num_sampled: [R] int32, accepted drafts and one more token, or 0.
            num_rejected: [R] int32, admitted drafts that were not accepted.
        """
        if self.fault is not None:
            return
        try:
            self._step(idx_mapping, num_sampled, num_rejected)
        except Exception as error:
            self.fail(error)

    def _step(self, idx_mapping: Tensor, num_sampled: Tensor, num_rejected: Tensor) -> None:
        kernels = self._kernels
        graded = self._tally.count(
            idx_mapping,
            num_sampled,
            num_rejected,
            self._gradable,
            kernels.features,
            explored=self._steering.exploring,
        )
        kernels._steps_since_refit = 0
        kernels.step(idx_mapping, *graded)
        self._steps += 1
        self._lease.step()
        if self.local:
            self._own_steps += 1
            if self._own_steps >= kernels.REFIT_INTERVAL:
                self._refit()
        # The drafts that follow are predicted by the coefficients in force now.
        self._gradable.index_copy_(0, idx_mapping, self._observable.index_select(0, idx_mapping))

    def _refit(self) -> None:
        """vLLM's own, from the sums there are: in a step in which nobody was graded."""
        self._steering.abandon()
        self._fetch()
        self.dropped += not self._hand_over()
        self._kernels._steps_since_refit = self._kernels.REFIT_INTERVAL - 1
        where, none = self._nobody
        self._kernels.step(where, none, none)
        self._clear()
        self._changed(Version())
        self.refits += 1

    def warm_up(self) -> None:
        """Run the kernel once, on nobody: it is compiled when it first runs."""
        where, none = self._nobody
        features = self._kernels.features
        self._tally.count(where, none, none, self._gradable, features, explored=False)
        self._tally.clear()

    def fail(self, error: Exception) -> None:
        """Stop learning for good; predictions go on."""
        self.fault = f"estimator: {error!r}"
        logger.exception("acceptance is no longer learned")

    # The requests.

    @torch.inference_mode()
    def begin(self, slot: int, skipped: str | None, *, count: bool = True) -> None:
        """A request takes a slot, whose last draft was another's.

        Args:
            slot: where its features will be.
            skipped: why it must not be observed, if it must not.
            count: it is a new request, and not one that comes back.
        """
        if self.fault is not None:
            return
        try:
            self._gradable[slot] = 0
            if (skipped is not None) != (slot in self._unobservable):
                self._observable[slot] = int(skipped is None)
                self._unobservable ^= {slot}
            if skipped is not None and count:
                self._skipped[skipped] += 1
        except Exception as error:
            self.fail(error)

    @torch.inference_mode()
    def forget(self) -> None:
        """Start anew: what was summed until now was vLLM warming up, on requests of its own."""
        if self.fault is not None:
            return
        try:
            self._clear()
            self._gradable.zero_()
            self._observable.fill_(1)
            self._unobservable.clear()
            self._skipped.clear()
        except Exception as error:
            self.fail(error)

    # The fleet.

    @torch.inference_mode()
    def exchange(self, coefficients: CoefficientSet | None) -> list[Round]:
        """Hand over what was summed, and go on with the fleet's coefficients.

        Those of a version below the newest ever seen are left alone. Those of the version in force
        are written again: it is how a rank that differs is corrected.

        Returns the rounds that have arrived on the host, oldest first. On a GPU that excludes the
        one that ends here: the next call brings it.
        """
        if self.fault is not None:
            return []
        try:
            self._lease.renew()
            self._own_steps = 0
            self._fetch()
            if coefficients is not None and self._takes(coefficients.version):
                self._close(changing=True)
                self._write(coefficients)
            else:
                self._close(changing=False)
            self._proofs.take(self.applied)
            if self._coming.immediate:
                self._fetch()
        except Exception as error:
            self.fail(error)
        rounds = list(self._rounds)
        self._rounds.clear()
        return rounds

    def _takes(self, version: Version) -> bool:
        # What was fitted here is 0.0, below what the fleet had published before.
        return version >= self._newest or version == self.applied

    def _write(self, coefficients: CoefficientSet) -> None:
        pinned = self._kernels.slope.is_cuda
        for tensor, values in (
            (self._kernels.slope, [coefficients.slope]),
            (self._kernels.intercepts, coefficients.intercepts_of(STRATUM)),
        ):
            staged = torch.tensor(values, dtype=tensor.dtype, pin_memory=pinned)
            tensor.copy_(staged, non_blocking=True)
        self._newest = max(self._newest, coefficients.version)
        self._changed(coefficients.version)

    def _changed(self, version: Version) -> None:
        self.applied = version
        self._own_steps = 0
        self._gradable.zero_()

    def _close(self, *, changing: bool) -> None:
        """End the round, unless nothing happened in it.

        With no room for another snapshot the round goes on, or is lost if its coefficients change.
        """
        if not self._steps:
            return
        handed_over = self._hand_over()
        if handed_over or changing:
            self.dropped += not handed_over
            self._clear()

    def _hand_over(self) -> bool:
        """Send the round on its way to the host; False if there is no room."""
        if not self._coming.take(_Closed(self.applied, dict(self._skipped))):
            return False
        self._skipped.clear()
        return True

    def _clear(self) -> None:
        for sums in (self._kernels.info, self._kernels.grad, self._kernels.counts):
            sums.zero_()
        self._tally.clear()
        self._steps = self._own_steps = 0

    def _fetch(self) -> None:
        for closed, arrays in self._coming.arrived():
            if len(self._rounds) == ROUNDS_KEPT:
                self.dropped += 1
            self._rounds.append(_round(closed, arrays))
        for version, arrays in self._proofs.arrived():
            source = Source.INITIAL if version == Version() else Source.FITTED
            self.proof = CoefficientSet(version, source, *_coefficients(arrays))


def _coefficients(arrays: Arrays) -> tuple[float, tuple[float, ...]]:
    return float(arrays["slope"][0]), tuple(float(b) for b in arrays["intercepts"])


def _round(closed: _Closed, arrays: Arrays) -> Round:
    slope, intercepts = _coefficients(arrays)
    sums = np.column_stack([arrays["info"], arrays["grad"], arrays["counts"]]).astype(np.float64)
    sketch = Sketch(arrays["cells"].astype(np.float64))
    strata = {}
    if arrays["counts"].any():
        strata[STRATUM] = StratumSums(intercepts, Statistics(sums), sketch)
    admitted = tuple(int(n) for n in arrays["admitted"])
    steps, explored = (int(n) for n in arrays["steps"])
    return Round(
        graded=closed.graded,
        slope=slope,
        strata=strata,
        admitted=admitted if any(admitted) else (),
        steps=steps,
        explored_steps=explored,
        skipped=closed.skipped,
    )
