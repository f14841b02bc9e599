"""Which model is trained how: the target on text, a drafter on what the target makes of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from workers.reference.corpus import Corpus
from workers.reference.shapes import config
from workers.reference.tokenizer import train_tokenizer
from workers.reference.training import Loss, Progress, Recipe, train
from workers.reference.workloads import WORKLOADS

RECIPES = {
    "target": Recipe(steps=1650),
    "draft": Recipe(steps=700),
}
SEED = 0


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
    directory: Path,
    recipe: Recipe,
    on_step: Callable[[Progress], None],
) -> Any:
    """The model `name`, trained from the corpora; its checkpoint stays in `directory`.

    A drafter needs `target.pt` of a finished run there.
    """
    corpus = Corpus.load(WORKLOADS, prepare_tokenizer(directory), directory)
    torch.manual_seed(SEED)
    model: Any = Qwen3ForCausalLM(config(name))

    def batch(step: int) -> Tensor:
        return torch.from_numpy(corpus.batch(SEED, step, recipe.rows))

    if name == "target":
        loss = text_loss(model, batch)
    else:
        target: Any = Qwen3ForCausalLM(config("target"))
        target.load_state_dict(torch.load(directory / "target.pt", weights_only=True)["model"])
        loss = distillation_loss(model, target, batch)
    train(model, loss, recipe, directory / f"{name}.pt", on_step)
    return model


def text_loss(model: Any, batch: Callable[[int], Tensor]) -> Loss:
    """Cross-entropy of the next token."""

    def loss(step: int) -> Tensor:
        tokens = batch(step)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def distillation_loss(model: Any, target: Any, batch: Callable[[int], Tensor]) -> Loss:
    """KL divergence of the model's distribution from the target's, at every position."""

    def loss(step: int) -> Tensor:
        tokens = batch(step)
        with torch.no_grad():
            wanted = target(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
        got = model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
        return functional.kl_div(
            got.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
        )

    return loss
