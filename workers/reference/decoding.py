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
    admitted: NDArray[np.int64]
    """[N], how many tokens can be of the text: those up to END, if END is among them."""
    accepted: NDArray[np.int64]
    """[N], how many of these were."""

    @property
    def was_observed(self) -> NDArray[np.bool_]:
        """[N, K], whether a token was admitted and all before it accepted."""
        return self._position < np.minimum(self.admitted, self.accepted + 1)[:, None]

    @property
    def was_accepted(self) -> NDArray[np.bool_]:
        """[N, K]."""
        return self._position < self.accepted[:, None]

    @property
    def _position(self) -> NDArray[np.int64]:
        return np.arange(self.feature.shape[1])


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
        tokens, q_logits = draft_tokens(drafter, contexts, positions, generator)
        p = _verify(target, contexts, tokens)
        q = q_logits.softmax(-1)
        ratio = (_at(p[:, :-1], tokens) / _at(q, tokens)).clamp(max=1.0)
        coins = torch.rand(ratio.shape, generator=generator)
        accepted = (coins < ratio).long().cumprod(-1).sum(-1)
        last = _last_token(p, q, accepted, generator)
        is_end = (tokens == END).long()
        admitted = (is_end.cumsum(-1) == is_end).sum(-1)
        kept.append(
            Graded(
                request=np.array(live),
                step=np.array([steps[i] for i in live]),
                feature=feature(q_logits.numpy()),
                entropy=torch.special.entr(q).sum(-1).double().numpy(),
                admitted=admitted.numpy(),
                accepted=torch.minimum(accepted, admitted).numpy(),
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
def draft_tokens(
    drafter: Any,
    contexts: list[list[int]],
    positions: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens [n, K], one behind the other, and the logits [n, K, V] that each came from.

    Drawn with the generator, or the most likely one without.
    """
    inputs = _pad(contexts)
    tokens, logits = [], []
    cache = None
    for _ in range(positions):
        out = drafter(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logits.append(out.logits[:, -1])
        tokens.append(choose(logits[-1], generator))
        inputs = {
            "input_ids": tokens[-1],
            "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1),
            "position_ids": inputs["position_ids"][:, -1:] + 1,
        }
    return torch.cat(tokens, 1), torch.stack(logits, 1)


def choose(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """[n, 1], a token of each row of logits [n, V]: drawn, or the most likely one."""
    if generator is None:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


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
