"""Speculative decoding with transformers alone, as a reference for what an engine does.

The drafter proposes K tokens from its distribution q, the target accepts each with probability
min(1, p/q), and the first one that it rejects is replaced by a draw from max(p - q, 0)
(Leviathan et al., 2023, arXiv:2211.17192). If none is rejected, one more is drawn from p.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from estimator_service.logistic import Array, feature

END = 0
"""The token that ends a document."""


@dataclass(frozen=True, eq=False)
class Graded:
    """N drafts of K tokens, and what became of them."""

    request: NDArray[np.int64]
    """[N], which prompt each belongs to."""
    step: NDArray[np.int64]
    """[N], its number within the request."""
    feature: Array
    """[N, K], log-odds of the drafter's most likely token."""
    entropy: Array
    """[N, K], of the drafter's distribution, nats."""
    ratio: Array
    """[N, K], min(1, p/q) of the token drafted."""
    overlap: Array
    """[N, K], sum of min(p, q): the chance of acceptance before the token is drawn."""
    accepted: NDArray[np.int64]
    """[N], how many tokens were."""


@dataclass(frozen=True, eq=False)
class Drafts(Graded):
    """All drafts of a run, and what they came to."""

    emitted: list[list[int]]
    """For each prompt, the tokens that followed it, END included if it came."""


def decode(
    target: Any,
    drafter: Any,
    prompts: list[list[int]],
    *,
    positions: int,
    new_tokens: int,
    generator: torch.Generator,
    on_step: Callable[[int], None] = lambda emitted: None,
) -> Drafts:
    """Continue each prompt at temperature 1 until END or `new_tokens`.

    `on_step` is told after each step how many tokens all requests together have emitted.
    """
    texts = [list(prompt) for prompt in prompts]
    steps = [0] * len(prompts)
    live = list(range(len(prompts)))
    kept: list[Graded] = []
    while live:
        contexts = [texts[i] for i in live]
        tokens, q_logits = _draft(drafter, contexts, positions, generator)
        p = _verify(target, contexts, tokens)
        q = q_logits.softmax(-1)
        ratio = (_at(p[:, :-1], tokens) / _at(q, tokens)).clamp(max=1.0)
        coins = torch.rand(ratio.shape, generator=generator)
        accepted = (coins < ratio).long().cumprod(-1).sum(-1)
        last = _last_token(p, q, accepted, generator)
        kept.append(
            Graded(
                request=np.array(live),
                step=np.array([steps[i] for i in live]),
                feature=feature(q_logits.numpy()),
                entropy=torch.special.entr(q).sum(-1).double().numpy(),
                ratio=ratio.double().numpy(),
                overlap=torch.minimum(p[:, :-1], q).sum(-1).double().numpy(),
                accepted=accepted.numpy(),
            )
        )
        for row, i in enumerate(live):
            texts[i] += [*tokens[row, : accepted[row]].tolist(), int(last[row])]
            steps[i] += 1
        live = [i for i in live if not _is_over(texts[i][len(prompts[i]) :], new_tokens)]
        on_step(sum(len(t) for t in texts) - sum(len(p) for p in prompts))
    return Drafts(
        **{f.name: np.concatenate([getattr(g, f.name) for g in kept]) for f in fields(Graded)},
        emitted=[
            _until_end(text[len(prompt) :]) for text, prompt in zip(texts, prompts, strict=True)
        ],
    )


def _is_over(emitted: list[int], new_tokens: int) -> bool:
    return END in emitted or len(emitted) >= new_tokens


def _until_end(emitted: list[int]) -> list[int]:
    return emitted[: emitted.index(END) + 1] if END in emitted else emitted


@torch.inference_mode()
def _draft(
    drafter: Any, contexts: list[list[int]], positions: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens [n, K] drawn one behind the other, and the logits [n, K, V] that each came from."""
    inputs = _pad(contexts)
    tokens, logits = [], []
    cache = None
    for _ in range(positions):
        out = drafter(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logits.append(out.logits[:, -1])
        tokens.append(torch.multinomial(logits[-1].softmax(-1), 1, generator=generator))
        inputs = {
            "input_ids": tokens[-1],
            "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1),
            "position_ids": inputs["position_ids"][:, -1:] + 1,
        }
    return torch.cat(tokens, 1), torch.stack(logits, 1)


@torch.inference_mode()
def _verify(target: Any, contexts: list[list[int]], tokens: Tensor) -> Tensor:
    """[n, K + 1, V], the target's distributions for each drafted token and the one behind."""
    whole = [[*c, *t] for c, t in zip(contexts, tokens.tolist(), strict=True)]
    out = target(**_pad(whole), use_cache=False, logits_to_keep=tokens.size(1) + 1)
    p: Tensor = out.logits.softmax(-1)
    return p


def _pad(rows: list[list[int]]) -> dict[str, Tensor]:
    """Rows of unequal length, padded on the left."""
    width = max(map(len, rows))
    pads = [width - len(row) for row in rows]
    return {
        "input_ids": torch.tensor([[END] * n + row for n, row in zip(pads, rows, strict=True)]),
        "attention_mask": torch.tensor([[0] * n + [1] * (width - n) for n in pads]),
        "position_ids": torch.tensor([[0] * n + list(range(width - n)) for n in pads]),
    }


def _at(distributions: Tensor, tokens: Tensor) -> Tensor:
    """[n, K], the probability of each token."""
    return distributions.gather(-1, tokens[..., None])[..., 0]


def _last_token(p: Tensor, q: Tensor, accepted: Tensor, generator: torch.Generator) -> Tensor:
    """[n], drawn from what of the target's distribution is left once the draft is used up."""
    nothing = torch.zeros_like(p[:, :1])
    left = (p - torch.cat([q, nothing], 1)).clamp(min=0.0)
    rows = left[torch.arange(len(left)), accepted]
    return torch.multinomial(rows, 1, generator=generator)[:, 0]
