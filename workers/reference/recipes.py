"""Which model is trained how: the target on text, a drafter on what the target makes of it.

The confidence head has no recipe: it is fitted in one go.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from workers.reference.confidence import (
    Comparison,
    Confidence,
    Sample,
    compare,
    fit_confidence,
    gather,
)
from workers.reference.corpus import EVEN, Corpus
from workers.reference.dflash import mask_token, new_dflash
from workers.reference.dflash_drafting import dflash_loss
from workers.reference.eagle import EagleHead, eagle_config
from workers.reference.eagle_drafting import eagle_loss
from workers.reference.heldout import read_heldout
from workers.reference.models import load_model, load_tokenizer
from workers.reference.shapes import config
from workers.reference.tokenizer import train_tokenizer
from workers.reference.training import Loss, Progress, Recipe, train
from workers.reference.workloads import WORKLOADS

RECIPES = {
    "target": Recipe(steps=1800, rows=8),
    "draft": Recipe(steps=3600, mix=EVEN),
    "eagle": Recipe(steps=400),
    "dflash": Recipe(steps=1000),
}
SEED = 0
LABELLED, HELDOUT = 480, 24
"""Prompts that the confidence head learns from, and of each workload those that judge it."""
PROMPT, CONTINUED = 64, 48
"""Tokens of such a prompt, and those with which it is continued."""
WARM_SHARE = 5 / 6
"""Of a draft model's steps; see `draft_loss`."""

Batch = Callable[[int], Tensor]
"""Tokens [rows, CONTEXT] of a step."""


def prepare_tokenizer(directory: Path) -> Tokenizer:
    """Train the tokenizer, or read the one that an earlier run has left."""
    path = directory / "tokenizer.json"
    if not path.exists():
        documents = (text for w in WORKLOADS.values() for text in w.training())
        tokenizer = train_tokenizer(documents)
        tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))


def train_model(
    name: str,
    models: Path,
    work: Path,
    recipe: Recipe,
    on_step: Callable[[Progress], None],
) -> Any:
    """The model `name`, trained from the corpora; its checkpoint stays in `work`.

    A drafter learns from the target in `models`: in bfloat16, as it is served.

    Raises:
        UnknownModelError: that target is not there.
    """
    tokenizer = prepare_tokenizer(work) if name == "target" else load_tokenizer(models)
    corpus = Corpus.load(WORKLOADS, tokenizer, work)

    def batch(step: int) -> Tensor:
        return torch.from_numpy(corpus.batch(SEED, step, recipe.rows, mix=recipe.mix))

    target = None if name == "target" else load_model("target", models).requires_grad_(False)
    torch.manual_seed(SEED)
    model, loss = _START[name](target, tokenizer, batch, recipe.steps)
    train(model, loss, recipe, work / f"{name}.pt", on_step)
    return model


def _target(_: Any, __: Tokenizer, batch: Batch, ___: int) -> tuple[Any, Loss]:
    model: Any = Qwen3ForCausalLM(config("target"))
    return model, text_loss(model, batch)


def _draft(target: Any, _: Tokenizer, batch: Batch, steps: int) -> tuple[Any, Loss]:
    model: Any = Qwen3ForCausalLM(config("draft"))
    return model, draft_loss(model, target, batch, steps)


def _eagle(target: Any, _: Tokenizer, batch: Batch, __: int) -> tuple[Any, Loss]:
    head = EagleHead(eagle_config(target.config))
    return head, eagle_loss(head, target, batch)


def _dflash(target: Any, tokenizer: Tokenizer, batch: Batch, _: int) -> tuple[Any, Loss]:
    module = new_dflash(target, mask_token(tokenizer))
    return module, dflash_loss(module, target, batch)


_START = {"target": _target, "draft": _draft, "eagle": _eagle, "dflash": _dflash}


def text_loss(model: Any, batch: Batch) -> Loss:
    """Cross-entropy of the next token."""

    def loss(step: int) -> Tensor:
        tokens = batch(step)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def draft_loss(model: Any, target: Any, batch: Batch, steps: int) -> Loss:
    """The text's next token first, then the chance that the target rejects the model's.

    For the first WARM_SHARE of `steps` it is `text_loss`, which needs no pass of the target, and
    behind them the total variation distance, which is the very chance that a drafted token is
    rejected (Leviathan et al., 2023). It makes a drafter sure of one continuation where a
    likelihood keeps all of them open. From the start it would not do: where distributions hardly
    overlap it has next to no gradient.
    """
    of_text = text_loss(model, batch)

    def loss(step: int) -> Tensor:
        if step < WARM_SHARE * steps:
            return of_text(step)
        tokens = batch(step)
        with torch.no_grad():
            p = target(input_ids=tokens, use_cache=False).logits.softmax(-1)
        q = model(input_ids=tokens, use_cache=False).logits.softmax(-1)
        rejected: Tensor = 1.0 - torch.minimum(p, q).sum(-1).mean()
        return rejected

    return loss


def train_confidence(
    models: Path, work: Path, on_progress: Callable[[float], None]
) -> tuple[Confidence, Comparison]:
    """The confidence head of the DFlash drafter in `models`, and how it does on held-out prompts.

    Its labels come from drafting behind pieces of the training texts. `on_progress` is told the
    share of them that is there.

    Raises:
        UnknownModelError: target or drafter is not there.
    """
    tokenizer = load_tokenizer(models)
    target, drafter = load_model("target", models), load_model("dflash", models)
    corpus = Corpus.load(WORKLOADS, tokenizer, work)
    heldout = [
        tokenizer.encode(text).ids[:PROMPT]
        for name in WORKLOADS
        for text in read_heldout(name).documents[:HELDOUT]
    ]
    prompts = corpus.batch(SEED + 1, 0, LABELLED, PROMPT).tolist()
    goal = (len(prompts) + len(heldout)) * CONTINUED
    before = 0

    def gathered(texts: list[list[int]], seed: int) -> Sample:
        return gather(
            drafter,
            target,
            texts,
            new_tokens=CONTINUED,
            generator=torch.Generator().manual_seed(seed),
            on_step=lambda emitted: on_progress(min((before + emitted) / goal, 1.0)),
        )

    training = gathered(prompts, SEED)
    before = len(prompts) * CONTINUED
    head = fit_confidence(training.states, training.seen, training.accepted)
    return head, compare(head, training, gathered(heldout, SEED + 1))
