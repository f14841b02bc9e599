"""What a DFlash drafter drafts, in training and outside of an engine; `dflash` says its words."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from estimator_service.logistic import Array
from workers.reference.dflash import DFlash
from workers.reference.training import Loss

ANCHORS = 32
"""Blocks in each row of a batch. They share the target's pass, the dearest part of a step."""
DECAY = 4.0
"""Positions over which a block's weights fall to 1/e: a token counts only if all before it do."""
EVERY = 4
"""Every such place of a held-out document is an anchor of the loss."""


def read_target(
    module: DFlash, target: Any, tokens: Tensor, pads: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the target makes of `tokens` [n, T]: features [n, T, layers * H] and logits [n, T, V].

    `pads` [n] says how many of a row's first tokens are padding; none if it is left out.
    """
    places = torch.arange(tokens.size(1)) - _column(pads)
    with torch.no_grad():
        out = target(
            input_ids=tokens,
            attention_mask=(places >= 0).long().expand_as(tokens),
            position_ids=places.clamp(min=0).expand_as(tokens),
            use_cache=False,
            output_hidden_states=True,
        )
    # The first of the hidden states are the embeddings.
    features = torch.cat([out.hidden_states[layer + 1] for layer in module.target_layers], -1)
    return features, out.logits


def draft_blocks(
    module: DFlash,
    target: Any,
    tokens: Tensor,
    features: Tensor,
    anchors: Tensor,
    pads: Tensor | None = None,
) -> Tensor:
    """[n, A, K, H], the last states of the masks behind each anchor; `lm_head` makes them logits.

    Args:
        tokens: [n, T]. Of what is behind an anchor its block sees nothing.
        features: [n, T, layers * H], of `read_target`.
        anchors: [n, A], indices into `tokens`, each with a token before it.
        pads: [n], how many of a row's first tokens are padding.
    """
    n, count = anchors.shape
    size = module.positions + 1
    ids = torch.full((n, count, size), module.mask)
    ids[..., 0] = tokens.gather(1, anchors)
    first = _column(pads)
    columns = torch.arange(tokens.size(1)).expand(n, -1)
    anchor = anchors.repeat_interleave(size, 1)[..., None]
    sees_text = (columns[:, None] < anchor) & (columns[:, None] >= first[..., None])
    number = torch.arange(count).repeat_interleave(size)
    sees_block = (number[:, None] == number).expand(n, -1, -1)
    states: Tensor = module(
        features=features,
        text_at=(columns - first).clamp(min=0),
        block=target.get_input_embeddings()(ids.flatten(1)),
        block_at=(anchors[..., None] + torch.arange(size)).flatten(1) - first,
        sees=torch.cat([sees_text, sees_block], -1),
    )
    blocks: Tensor = states.unflatten(1, (count, size))
    return blocks[:, :, 1:]


def _column(pads: Tensor | None) -> Tensor:
    return torch.zeros(1, 1, dtype=torch.long) if pads is None else pads[:, None]


def dflash_loss(
    module: DFlash, target: Any, batch: Callable[[int], Tensor], anchors: int = ANCHORS
) -> Loss:
    """KL divergence of the drafter's distributions from the target's, behind random anchors.

    The target reads the text itself up to each token; the drafter only up to the anchor. The
    weights exp(-(k - 1) / DECAY) of the positions k = 1..K are DFlash's (equation 4); the
    divergence stands in for its cross-entropy, because the target's whole distribution says more
    than one token of it, and it is what drafts are judged by.
    """
    weight = torch.exp(-torch.arange(module.positions) / DECAY)
    weight /= weight.sum()

    def loss(step: int) -> Tensor:
        tokens = batch(step)
        n, width = tokens.shape
        random = torch.Generator().manual_seed(step)
        at = torch.randint(1, width - module.positions, (n, anchors), generator=random)
        features, logits = read_target(module, target, tokens)
        states = draft_blocks(module, target, tokens, features, at)
        wanted = _behind(logits, at, module.positions).log_softmax(-1)
        got = target.lm_head(states).log_softmax(-1)
        divergence = (wanted.exp() * (wanted - got)).sum(-1)
        mean: Tensor = (divergence * weight).sum(-1).mean()
        return mean

    return loss


def _behind(values: Tensor, anchors: Tensor, count: int) -> Tensor:
    """[n, A, count, ...], of values [n, T, ...] those from each anchor on."""
    rows = torch.arange(len(values))[:, None, None]
    found: Tensor = values[rows, anchors[..., None] + torch.arange(count)]
    return found


@torch.inference_mode()
def heldout_block_loss(module: DFlash, target: Any, documents: list[list[int]]) -> Array:
    """[K], mean negative log-likelihood of the k-th token behind an anchor, nats.

    Raises:
        ValueError: no document is longer than a block.
    """
    k = module.positions
    total, count = np.zeros(k), 0
    for document in (d for d in documents if len(d) > k + 1):
        anchors = torch.arange(1, len(document) - k, EVERY)[None]
        tokens = torch.tensor([document])
        features, _ = read_target(module, target, tokens)
        states = draft_blocks(module, target, tokens, features, anchors)
        log_q = target.lm_head(states).log_softmax(-1)
        came = _behind(tokens, anchors + 1, k)
        total -= log_q.gather(-1, came[..., None]).double().sum((0, 1, 3)).numpy()
        count += anchors.numel()
    if not count:
        raise ValueError(f"a document must have more than {k + 1} tokens; the longest has fewer")
    return total / count


@dataclass
class BlockDrafter:
    """A DFlash drafter as `decoding.decode` asks one: called as a model that goes token by token.

    The first call of a draft computes the block, and the ones behind it read it off: no token of
    the block depends on another. So each is drawn from its distribution independently.
    """

    module: DFlash
    target: Any
    states: list[Tensor] = field(default_factory=list)
    """[n, K, H] of each step: concatenated, they are in the order of `Drafts`."""

    def __call__(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        past_key_values: tuple[Tensor, int] | None,
        **_: Any,
    ) -> SimpleNamespace:
        """Logits [n, 1, V] of the next token of the block."""
        if past_key_values is None:
            logits, states = propose(self.module, self.target, input_ids, attention_mask)
            self.states.append(states)
            past_key_values = logits, 0
        logits, k = past_key_values
        return SimpleNamespace(logits=logits[:, k : k + 1], past_key_values=(logits, k + 1))


@torch.inference_mode()
def propose(
    module: DFlash, target: Any, contexts: Tensor, attention_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [n, K, V] of a draft for each context, and the states [n, K, H] they come from.

    Args:
        contexts: [n, T], at least two tokens each, padded on the left.
        attention_mask: [n, T], 0 where it is padding.
    """
    pads = (attention_mask == 0).sum(1)
    features, _ = read_target(module, target, contexts, pads)
    anchors = torch.full((len(contexts), 1), contexts.size(1) - 1)
    states = draft_blocks(module, target, contexts, features, anchors, pads)[:, 0]
    return target.lm_head(states), states
