"""What the device counts beside vLLM's own sums: the sketch, admitted drafts and steps.

vLLM's kernel sums gradient and Hessian of the labels; the estimator also wants to know where their
features lay. One more launch a step counts that, and writes down the verdicts that vLLM's kernel
may see: those of drafts that may be graded now.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from estimator_service.sketch import BINS, EDGES, UNITS_PER_LOGIT

ROWS = 32
"""Requests that a program looks at together; a batch is a loop over these."""


@triton.jit(do_not_specialize=["explored", "num_reqs"])  # type: ignore[untyped-decorator]
def _tally_kernel(
    cells: Any,
    admitted: Any,
    steps: Any,
    graded_sampled: Any,
    graded_rejected: Any,
    edges: Any,
    idx_mapping: Any,
    num_sampled: Any,
    num_rejected: Any,
    gradable: Any,
    features: Any,
    features_stride: Any,
    explored: Any,
    num_reqs: Any,
    POSITIONS: tl.constexpr,
    BINS: tl.constexpr,
    BIN_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    """One program for each position: its cells belong to nobody else, so nothing is atomic."""
    k = tl.program_id(0)
    bins = tl.arange(0, BIN_BLOCK)
    lower = tl.load(edges + bins, mask=bins < BINS, other=float("inf"))
    # The last bin holds its upper edge, where features are clamped.
    upper = tl.load(edges + bins + 1, mask=bins < BINS - 1, other=float("inf"))
    counts = tl.zeros([BIN_BLOCK], dtype=tl.int32)
    accepted_counts = tl.zeros([BIN_BLOCK], dtype=tl.int32)
    offsets = tl.zeros([BIN_BLOCK], dtype=tl.int32)
    admitted_here = 0
    sampling = 0
    for start in range(0, num_reqs, ROWS):
        row = start + tl.arange(0, ROWS)
        there = row < num_reqs
        slot = tl.load(idx_mapping + row, mask=there, other=0).to(tl.int64)
        sampled = tl.load(num_sampled + row, mask=there, other=0).to(tl.int32)
        rejected = tl.load(num_rejected + row, mask=there, other=0).to(tl.int32)
        may = tl.load(gradable + slot, mask=there, other=0)
        accepted = tl.maximum(sampled - 1, 0)
        drafts = accepted + rejected
        observed = there & (may != 0) & (k <= accepted) & (k < drafts)
        f = tl.load(features + slot * features_stride + k, mask=there, other=0.0)

        here = observed[:, None] & (f[:, None] >= lower[None, :]) & (f[:, None] < upper[None, :])
        offset = tl.floor((f[:, None] - lower[None, :]) * UNITS + 0.5)
        label = (k < accepted)[:, None]
        counts += tl.sum(here.to(tl.int32), axis=0)
        accepted_counts += tl.sum((here & label).to(tl.int32), axis=0)
        offsets += tl.sum(tl.where(here, offset, 0.0).to(tl.int32), axis=0)
        admitted_here += tl.sum((there & (k < drafts)).to(tl.int32), axis=0)
        sampling = tl.maximum(sampling, tl.max(sampled, axis=0))
        if k == 0:
            tl.store(graded_sampled + row, tl.where(may != 0, sampled, 0), mask=there)
            tl.store(graded_rejected + row, tl.where(may != 0, rejected, 0), mask=there)

    size = POSITIONS * BINS
    cell = cells + k * BINS + bins
    tl.store(cell, tl.load(cell, mask=bins < BINS) + counts, mask=bins < BINS)
    cell += size
    tl.store(cell, tl.load(cell, mask=bins < BINS) + accepted_counts, mask=bins < BINS)
    cell += size
    tl.store(cell, tl.load(cell, mask=bins < BINS) + offsets, mask=bins < BINS)
    tl.store(admitted + k, tl.load(admitted + k) + admitted_here)
    if k == 0:
        verifying = tl.where(sampling > 0, 1, 0)
        tl.store(steps, tl.load(steps) + verifying)
        tl.store(steps + 1, tl.load(steps + 1) + verifying * explored)


class Tally:
    """Counts of one round, on the device."""

    def __init__(self, slots: int, positions: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._positions = positions
        # A cell's features add up to more than 32 bits hold before its labels do.
        self.cells = torch.zeros(3, positions, BINS, dtype=torch.int64, device=device)
        """[3, K, BINS] int64, as `Sketch.cells`; half a unit is rounded up, not to even."""
        self._edges = torch.tensor(EDGES, dtype=torch.float32, device=device)
        self._graded = zeros(2, slots)
        self.admitted = zeros(positions)
        """[K] int32, draft tokens verified."""
        self.steps = zeros(2)
        """[2] int32: steps in which a request emitted a token, and those of them that explored."""

    def count(
        self,
        idx_mapping: Tensor,
        num_sampled: Tensor,
        num_rejected: Tensor,
        gradable: Tensor,
        features: Tensor,
        *,
        explored: bool,
    ) -> tuple[Tensor, Tensor]:
        """Count a step's verdicts, without waiting for the device.

        Args:
            idx_mapping: [R], the slot of each request of the batch.
            num_sampled: [R], accepted drafts and one more token, or 0.
            num_rejected: [R], admitted drafts that were not accepted.
            gradable: [slots] int32, whether the draft in a slot may be graded.
            features: [slots, K] float32.
            explored: the step was told to verify in full.

        Returns:
            `num_sampled` and `num_rejected` with zeros for drafts that may not be graded.
            They hold until the next call.

        Raises:
            ValueError: more requests than slots.
        """
        requests = idx_mapping.shape[0]
        if requests > self._graded.shape[1]:
            raise ValueError(f"{requests} requests in {self._graded.shape[1]} slots")
        sampled, rejected = self._graded[0, :requests], self._graded[1, :requests]
        _tally_kernel[(self._positions,)](
            self.cells,
            self.admitted,
            self.steps,
            sampled,
            rejected,
            self._edges,
            idx_mapping,
            num_sampled,
            num_rejected,
            gradable,
            features,
            features.stride(0),
            int(explored),
            requests,
            POSITIONS=self._positions,
            BINS=BINS,
            BIN_BLOCK=triton.next_power_of_2(BINS),
            ROWS=ROWS,
            UNITS=UNITS_PER_LOGIT,
        )
        return sampled, rejected

    def clear(self) -> None:
        """Start a round."""
        for counts in (self.cells, self.admitted, self.steps):
            counts.zero_()
