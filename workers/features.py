"""The acceptance model's feature, from a drafter's logits on their device.

    f = clamp(z_m - logsumexp_{x != m} z_x, +-40)      m = argmax z

z are the logits divided by the request's temperature; temperature 0, or one that engines treat as
0, leaves them as they are. `estimator_service.logistic.feature` is the same on the host in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from estimator_service.logistic import MAX_LOG_ODDS

GREEDY_BELOW = 1e-5
"""vLLM decodes greedily below this temperature."""


def features(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Log-odds of the most likely token of each row.

    Args:
        logits: [N, V], before temperature; padding columns hold -inf. Left unchanged.
        temperature: [N], or None if every row is decoded greedily.

    Returns:
        [N], float32, within +-MAX_LOG_ODDS. NaN where a row has no finite maximum.

    >>> features(torch.tensor([[2.0, 0.0], [float("nan"), 1.0]]), None).tolist()
    [2.0, nan]
    """
    top, others = _complement(_scaled(logits, temperature))
    return _log_odds(top, others)


@dataclass(frozen=True, eq=False)
class Details:
    """What a recorded draft says beside its feature; each [N], float32."""

    feature: Tensor
    q_max: Tensor
    """Probability of the most likely token."""
    entropy: Tensor
    """Of the drafter's distribution, nats."""
    margin: Tensor
    """Probability of the most likely token less that of the second."""
    q_drawn: Tensor
    """Probability of the token that was drafted. Known only after the draw: nothing that decides
    a length may look at it."""

    @classmethod
    def of(cls, logits: Tensor, temperature: Tensor | None, drawn: Tensor) -> Details:
        """Of logits [N, V] and the tokens [N] that were drafted; otherwise as `features`."""
        z = _scaled(logits, temperature)
        top, others = _complement(z)
        q = z.softmax(-1)
        best = q.topk(2, dim=-1).values
        return cls(
            feature=_log_odds(top, others),
            q_max=best[:, 0],
            entropy=torch.special.entr(q).sum(-1),
            margin=best[:, 0] - best[:, 1],
            q_drawn=q.gather(-1, drawn.long()[:, None])[:, 0],
        )

    @classmethod
    def stack(cls, positions: list[Details]) -> dict[str, Tensor]:
        """By field, [N, K] of K positions."""
        names = [f.name for f in fields(cls)]
        return {name: torch.stack([getattr(p, name) for p in positions], 1) for name in names}


def _scaled(logits: Tensor, temperature: Tensor | None) -> Tensor:
    z = logits.float()
    if temperature is None:
        return z
    scale = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
    return z / scale[:, None]


def _complement(z: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum [N], and the odds [N] of all other tokens together against it."""
    top, best = z.max(dim=-1, keepdim=True)
    odds = (z - top).exp_()
    # Leaving the maximum out, rather than subtracting 1 from the whole sum, keeps every digit of
    # a confident row.
    return top[:, 0], odds.scatter_(-1, best, 0.0).sum(-1)


def _log_odds(top: Tensor, others: Tensor) -> Tensor:
    f = (-others.log()).clamp_(-MAX_LOG_ODDS, MAX_LOG_ODDS)
    return torch.where(top.isfinite(), f, torch.nan)
