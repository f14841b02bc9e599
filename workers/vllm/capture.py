"""Reads features off a drafter's logits while it drafts.

A drafter keeps the probabilities that it sampled from, but only if something in the batch samples;
its logits it always computes, one position after the other or all in one pass. So its model's
`compute_logits` and its own `propose` are wrapped, on these two objects and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from estimator_service.logistic import Array
from workers.features import Details, features

HELD = 1 << 22
"""Logits that are held at most before they become features: 16 MiB of float32."""


class Capture:
    """The features of the last draft.

    `failures` counts drafts whose features could not be taken; the drafting itself goes on.
    """

    def __init__(self, drafter: Any, *, details: bool, clock: Callable[[], float]) -> None:
        """Wraps `drafter`.

        Args:
            drafter: a proposer of vLLM with a model of its own.
            details: keep what a record wants beside the feature; costs another pass or two.
            clock: seconds, for `seconds`.

        Raises:
            TypeError: a drafter without a model that computes logits: there is nothing to read.
        """
        model: Any = getattr(drafter, "model", None)
        if not callable(getattr(model, "compute_logits", None)):
            raise TypeError(f"{type(drafter).__name__} computes no logits to predict from")
        self.failures = 0
        self.seconds = 0.0
        """That the last `propose` took."""
        self.own_seconds = 0.0
        """Spent in here, in all."""
        self.keep_details = details
        self._clock = clock
        self._temperature: Tensor | None = None
        self._open = False
        self._features: list[Tensor] = []
        self._held: list[Tensor] = []
        """Logits that wait to become features."""
        self._logits: list[Tensor] = []
        self._compute_logits = model.compute_logits
        self._propose = drafter.propose
        model.compute_logits = self._on_logits
        drafter.propose = self._on_propose

    def reset(self) -> None:
        """Forget the last draft."""
        self.seconds = 0.0
        self._clear()

    def take(self, requests: int, positions: int) -> Array | None:
        """[R, K] features of the last draft, float64; None if there was none of that shape.

        A draft of fewer positions is NaN in the others.
        """
        self._flush()
        if not self._features:
            return None
        f = _arrange(self._features, requests)
        if f is None or f.shape[1] > positions:
            return None
        whole = np.full((requests, positions), np.nan)
        whole[:, : f.shape[1]] = f.cpu().numpy()
        return whole

    def details(self, tokens: list[list[int]], positions: int) -> dict[str, Array]:
        """[R, K] by name, of the last draft's tokens [R][K]; empty if they are not kept."""
        if not self._logits:
            return {}
        drawn = torch.tensor(tokens)
        requests, drafted = drawn.shape
        if len(self._logits) == 1:
            drawn = drawn.reshape(-1, 1)
        device = self._logits[0].device
        columns = Details.stack(
            [
                Details.of(logits, self._rows(len(logits)), drawn[:, k].to(device))
                for k, logits in enumerate(self._logits)
            ]
        )
        whole = {}
        for name, values in columns.items():
            whole[name] = np.full((requests, positions), np.nan)
            whole[name][:, :drafted] = values.reshape(requests, drafted).cpu().numpy()
        return whole

    def _on_propose(self, *args: Any, **kwargs: Any) -> Any:
        self.reset()
        self._open = True
        start = self._clock()
        try:
            metadata = kwargs.get("sampling_metadata")
            if metadata is None:
                self._open = False
                self.failures += 1
            else:
                self._temperature = None if metadata.all_greedy else metadata.temperature
            return self._propose(*args, **kwargs)
        finally:
            self._open = False
            self.seconds = self._clock() - start

    def _on_logits(self, *args: Any, **kwargs: Any) -> Any:
        logits = self._compute_logits(*args, **kwargs)
        if self._open:
            start = self._clock()
            try:
                # A copy: the drafter divides these logits by the temperature in place.
                kept = logits.clone()
                self._held.append(kept)
                if self.keep_details:
                    self._logits.append(kept)
                if sum(held.numel() for held in self._held) >= HELD:
                    self._flush()
            except Exception:
                self.failures += 1
                self._open = False
                self._clear()
            self.own_seconds += self._clock() - start
        return logits

    def _flush(self) -> None:
        """Turn the logits that are held into features, all at once: a call of torch's costs as much
        for many rows as for a few.
        """
        if not self._held:
            return
        rows = [len(held) for held in self._held]
        temperatures = [t for n in rows if (t := self._rows(n)) is not None]
        temperature = torch.cat(temperatures) if temperatures else None
        self._features += features(torch.cat(self._held), temperature).split(rows)
        self._held = []

    def _clear(self) -> None:
        self._features = []
        self._held = []
        self._logits = []

    def _rows(self, rows: int) -> Tensor | None:
        """[rows], each row's temperature: a drafter in one pass has K rows for each request."""
        if self._temperature is None or rows == len(self._temperature):
            return self._temperature
        return self._temperature.repeat_interleave(rows // len(self._temperature))


def _arrange(columns: list[Tensor], requests: int) -> Tensor | None:
    """[R, K]; one column of R K rows is a pass that drafted all positions of each request."""
    if len(columns) == 1 and len(columns[0]) % requests == 0:
        return columns[0].reshape(requests, -1)
    if any(len(column) != requests for column in columns):
        return None
    return torch.stack(columns, dim=1)
