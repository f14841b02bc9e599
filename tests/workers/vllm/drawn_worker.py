"""A worker whose lengths a test can force, or trim as no worker may: by the token drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from workers.vllm.host_worker import HostWorker


class DrawnWorker(HostWorker):
    """`HostWorker` until it is told otherwise."""

    naive = False
    broken = False
    forced: dict[str, int] = {}  # noqa: RUF012

    def trim_by_draw(self, naive: bool) -> None:
        """Verify only what the drafter was likely to draw; the record must be on."""
        self.naive = naive

    def force(self, lengths: dict[str, int]) -> None:
        """By the beginning of a request's id, how much of its drafts to verify."""
        self.forced = lengths

    def explore_budgets(self, share: float) -> None:
        """Try random budgets for a share of the steps."""
        cost = self._speculation.cost
        cost._config = cost._config.model_copy(update={"share": share, "warmup_share": share})

    def choose_depth(self, chosen: bool) -> None:
        """Choose how many positions to draft, too."""
        self._speculation.admission.draft_depth = chosen

    def fail(self, broken: bool) -> None:
        """Fail wherever the worker is called."""
        self.broken = broken

    def _schedule(self, scheduler_output: Any) -> None:
        self._break()
        super()._schedule(scheduler_output)

    def _verified(self, output: Any) -> None:
        self._break()
        super()._verified(output)

    def _break(self) -> None:
        if self.broken:
            raise RuntimeError("broken on purpose")

    def _drafted(self, drafts: Any) -> list[int] | None:
        self._break()
        lengths = super()._drafted(drafts)
        if lengths is None or self._capture is None:
            return lengths
        if self.naive:
            details = self._capture.details(drafts.draft_token_ids, self._speculation.positions)
            sure = details["q_drawn"] > details["q_max"] / 2.0
            lengths = np.cumprod(sure, axis=1).sum(axis=1).tolist()
        for i, request_id in enumerate(drafts.req_ids):
            for start, length in self.forced.items():
                if request_id.startswith(start):
                    lengths[i] = length
        return lengths
