"""Muon: momentum whose matrices are made orthogonal before each step (Jordan et al., 2024).

A step that moves every direction of a matrix alike learns more from the same tokens than AdamW,
and here tokens cost hours. PyTorch's own Muon orthogonalizes in bfloat16, which is a hundred times
slower than float32 on CPUs without the instructions for it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients that drive every singular value into about [0.7, 1.2] in five steps."""


def orthogonalize(gradient: Tensor, steps: int = 5) -> Tensor:
    """About U V' of the singular value decomposition U S V' of a matrix."""
    a, b, c = NEWTON_SCHULZ
    wide = gradient.size(0) <= gradient.size(1)
    x: Tensor = gradient if wide else gradient.T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else x.T


class Muon(torch.optim.Optimizer):
    """For the matrices inside a model's layers; the rest is left to AdamW."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step along the orthogonalized Nesterov momentum."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._move(parameter, group)

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(parameter.grad, 1.0 - group["momentum"])
        direction = orthogonalize(parameter.grad.lerp(momentum, group["momentum"]))
        # Root-mean-square size of a step is alike for all shapes.
        scale = max(1.0, parameter.size(0) / parameter.size(1)) ** 0.5
        parameter.mul_(1.0 - group["lr"] * group["decay"])
        parameter.add_(direction, alpha=-group["lr"] * scale)
