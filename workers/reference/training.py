"""Trains one model: the same loop for a target and for whatever learns from it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from workers.reference.corpus import HARD_FIRST, Mix
from workers.reference.muon import Muon


@dataclass(frozen=True)
class Recipe:
    """How long, on how much and how fast a model learns."""

    steps: int
    rows: int = 6
    """Of `CONTEXT` tokens, in each step."""
    mix: Mix = field(default_factory=lambda: HARD_FIRST)
    """Of the workloads, in the rows."""
    matrix_rate: float = 0.02
    """Muon's, for the matrices inside the layers."""
    other_rate: float = 4e-3
    """AdamW's, for embeddings and norms."""
    warmup: int = 20
    """Steps until the full rate is reached."""
    decay: float = 0.5
    """Share of the steps, the last ones, over which the rate falls to nothing.

    A cosine would fix the length of a run at its start. This way a run that was cut short, or
    that has time left, ends well from any checkpoint of its first part.
    """

    def rate(self, step: int) -> float:
        """The share of the full rate at a step."""
        left = (self.steps - step) / max(self.decay * self.steps, 1.0)
        return min(1.0, (step + 1) / self.warmup, left)


@dataclass(frozen=True)
class Progress:
    """Where a run is."""

    step: int
    steps: int
    loss: float
    """Nats per token, averaged over the last fifty steps or so."""
    seconds_left: float


Loss = Callable[[int], Tensor]
"""The loss of one step's batch, with its graph."""


def train(
    model: nn.Module,
    loss: Loss,
    recipe: Recipe,
    checkpoint: Path,
    on_step: Callable[[Progress], None],
    *,
    save_every: int = 50,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train `model` in place, from `checkpoint` if there is one.

    A batch must depend on the number of its step alone. Then a run that was interrupted ends as
    one that was not.
    """
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in f".{n}"]
    known = {id(p) for p in inner}
    others = [p for p in model.parameters() if id(p) not in known]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (Muon(inner, lr=recipe.matrix_rate), recipe.matrix_rate),
        (
            torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
            recipe.other_rate,
        ),
    ]
    first, smooth = 0, float("nan")
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, smooth = state["step"], state["loss"]
    began = clock()
    for step in range(first, recipe.steps):
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * recipe.rate(step)
        value = loss(step)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen = float(value.detach())
        smooth = seen if smooth != smooth else 0.98 * smooth + 0.02 * seen
        done = step + 1
        left = (clock() - began) / (done - first) * (recipe.steps - done)
        on_step(Progress(done, recipe.steps, smooth, left))
        if done % save_every == 0 or done == recipe.steps:
            _save(checkpoint, model, [o for o, _ in optimizers], done, smooth)


def _save(
    path: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    loss: float,
) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "loss": loss,
    }
    fresh = path.with_suffix(".new")
    torch.save(state, fresh)
    fresh.rename(path)
