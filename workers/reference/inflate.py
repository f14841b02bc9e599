"""Makes a model cost more and compute the same.

Whether speculation pays depends on what the target costs beside its drafter. So every MLP gets
more neurons whose output weights are zero: they are computed like the others and add nothing.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from workers.reference.models import load_model, load_tokenizer, parameters, save_model
from workers.reference.paths import MODELS


def inflate(model: Any, count: int) -> None:
    """Widen `model` in place to `count` parameters, or up to one neuron per layer more.

    Raises:
        ValueError: it has more than `count` already.
    """
    missing = count - parameters(model)
    if missing < 0:
        raise ValueError(f"the model has {parameters(model):,} parameters, more than {count:,}")
    layers = model.model.layers
    more = -(-missing // (3 * model.config.hidden_size * len(layers)))
    for layer in layers:
        mlp = layer.mlp
        for name in ("gate_proj", "up_proj"):
            setattr(mlp, name, _widen(getattr(mlp, name), more, dim=0))
        mlp.down_proj = _widen(mlp.down_proj, more, dim=1)
        mlp.down_proj.weight.data[:, mlp.intermediate_size :] = 0.0
        mlp.intermediate_size += more
    model.config.intermediate_size += more


def _widen(linear: nn.Linear, more: int, dim: int) -> nn.Linear:
    """The same weights and `more` of them again: numbers like the others, none of them special."""
    weight = linear.weight.data
    again = torch.arange(weight.size(dim) + more) % weight.size(dim)
    wider = weight.index_select(dim, again)
    made = nn.Linear(wider.size(1), wider.size(0), bias=False, dtype=weight.dtype)
    made.weight.data = wider
    return made


def write_inflated(count: int, directory: Path, root: Path = MODELS) -> int:
    """Write an inflated target to `directory`; returns how many parameters it has."""
    model = load_model("target", root)
    inflate(model, count)
    save_model("target", model, directory, load_tokenizer(root))
    return parameters(model)
