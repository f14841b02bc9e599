"""What an EAGLE-3 head drafts, in training and outside of an engine; `eagle` says its words."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workers.reference.decoding import choose
from workers.reference.eagle import EagleHead, Past
from workers.reference.training import Loss

UNROLLED = 7
"""Steps of a chain in training, as many as in a draft: after the last of them a head is at a loss.

Trained on four, it lost a tenth of its overlap with the target at each of these, and a quarter at
the fifth.
"""
CHAIN_EVERY = 2
"""Slots from one chain to the next in training. Neighbours learn much the same."""
FADING = 0.8
"""Weight of each step's loss against the one before: a later one counts less often."""


@torch.no_grad()
def target_outputs(target: Any, tokens: Tensor, layers: list[int]) -> tuple[Tensor, Tensor]:
    """The target's features [b, n, aux * width] and logits [b, n, V] for tokens [b, n].

    The features are its hidden states after so many `layers` each, one behind the other.
    """
    states: list[Tensor] = []
    # Not `output_hidden_states`: the last of those is normed, and vLLM's is not.
    hooks = [
        target.model.layers[i - 1].register_forward_hook(lambda *call: states.append(call[-1]))
        for i in layers
    ]
    try:
        logits: Tensor = target(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(states, -1), logits


def unroll(
    head: EagleHead,
    target: Any,
    tokens: Tensor,
    features: Tensor,
    steps: int,
    chains: Tensor,
) -> Iterator[Tensor]:
    """Logits [b, c, V] of step k = 0, 1, ...: for a chain that started at i, of token i + k + 2.

    The training-time test: all chains [c] of texts [b, n] at once, each fed with the text's own
    tokens. The last may start at n - 1 - steps.
    """
    embeds = target.get_input_embeddings()(tokens).detach()
    past: Past = []
    slots = torch.arange(tokens.size(1) - 1)
    hidden = head(embeds[:, 1:], head.combine(features[:, :-1]), slots[None], past)[:, chains]
    yield head.logits(hidden, target)
    for step in range(1, steps):
        hidden = head(embeds[:, chains + 1 + step], hidden, chains[None], past)
        yield head.logits(hidden, target)


def eagle_loss(head: EagleHead, target: Any, batch: Callable[[int], Tensor]) -> Loss:
    """KL divergence of the head's distribution from the target's, over UNROLLED steps.

    A mean over the chains at each step, and over the steps weighted by FADING.
    """
    weights = [FADING**k for k in range(UNROLLED)]

    def loss(step: int) -> Tensor:
        tokens = batch(step)
        features, logits = target_outputs(target, tokens, head.aux_layers)
        wanted = logits.softmax(-1)
        entropy = torch.special.entr(wanted).sum(-1)
        chains = torch.arange(step % CHAIN_EVERY, tokens.size(1) - UNROLLED, CHAIN_EVERY)
        total = torch.zeros(())
        for k, got in enumerate(unroll(head, target, tokens, features, UNROLLED, chains)):
            at = chains + 1 + k
            cross = functional.cross_entropy(got.flatten(0, 1), wanted[:, at].flatten(0, 1))
            total = total + weights[k] * (cross - entropy[:, at].mean())
        return total / sum(weights)

    return loss


@torch.inference_mode()
def eagle_heldout_loss(head: EagleHead, target: Any, documents: list[list[int]]) -> float:
    """Mean negative log-likelihood of tokens at the first place of a draft, nats.

    Of every token but each document's first two: the head predicts from a slot and the token
    behind it. `figures.heldout_loss` leaves out the first one only.
    """
    total, count = 0.0, 0
    for document in documents:
        tokens = torch.tensor([document])
        features, _ = target_outputs(target, tokens, head.aux_layers)
        chains = torch.arange(len(document) - 2)
        (logits,) = unroll(head, target, tokens, features, 1, chains)
        log_p = logits.log_softmax(-1)
        total -= float(log_p.gather(-1, tokens[:, 2:, None]).double().sum())
        count += len(document) - 2
    return total / count


@torch.inference_mode()
def draft_tokens(
    head: EagleHead,
    target: Any,
    contexts: list[list[int]],
    positions: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens [n, K] that may follow each context, and the logits [n, K, V] each came from.

    Drawn with the generator, or the most likely one without. A context has two tokens or more:
    the target has read all but the last.
    """
    width = max(map(len, contexts))
    # Padded behind: nothing looks there.
    tokens = torch.tensor([[*context, *[0] * (width - len(context))] for context in contexts])
    chains = torch.tensor([[len(context) - 2] for context in contexts])
    embed = target.get_input_embeddings()
    features, _ = target_outputs(target, tokens[:, :-1], head.aux_layers)
    past: Past = []
    slots = torch.arange(width - 1)
    hidden = head(embed(tokens[:, 1:]), head.combine(features), slots[None], past)
    hidden = hidden.take_along_dim(chains[..., None], 1)
    drafted: list[Tensor] = []
    logits: list[Tensor] = []
    while True:
        logits.append(head.logits(hidden, target)[:, 0])
        drafted.append(choose(logits[-1], generator))
        if len(drafted) == positions:
            return torch.cat(drafted, 1), torch.stack(logits, 1)
        hidden = head(embed(drafted[-1]), hidden, chains, past)
