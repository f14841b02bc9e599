"""Where the models lie, and how they are read and written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM
from transformers.utils import logging

from workers.reference.confidence import load_confidence, save_confidence
from workers.reference.dflash import load_dflash, save_dflash
from workers.reference.eagle import load_eagle, save_eagle
from workers.reference.paths import MODELS, model_path
from workers.reference.tokenizer import save_tokenizer


def load_model(name: str, root: Path = MODELS) -> Any:
    """A model in float32, ready to be asked: bfloat16 is for storage only.

    Raises:
        UnknownModelError: it has no such name, or is not in `root`.
    """
    return _FILES.get(name, (_load_causal, None))[0](model_path(name, root))


def load_tokenizer(root: Path = MODELS) -> Tokenizer:
    """The tokenizer that all models share."""
    return Tokenizer.from_file(str(model_path("target", root) / "tokenizer.json"))


def save_model(name: str, model: Any, directory: Path, tokenizer: Tokenizer) -> None:
    """Write a model as transformers and vLLM read it, in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    if name in _FILES:
        _FILES[name][1](model, directory)
    else:
        model.to(torch.bfloat16).save_pretrained(directory)
        save_tokenizer(tokenizer, directory)


def _load_causal(path: Path) -> Any:
    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


_FILES: dict[str, tuple[Callable[[Path], Any], Callable[[Any, Path], None]]] = {
    "eagle": (load_eagle, save_eagle),
    "dflash": (load_dflash, save_dflash),
    "confidence": (load_confidence, save_confidence),
}
"""How models that are no language models of their own are read and written."""


def hide_loading_bars() -> None:
    """Keep transformers from drawing bars of its own over a command's."""
    logging.disable_progress_bar()


def parameters(model: Any) -> int:
    """How many there are; embeddings that are the output layer too count once."""
    return sum(parameter.numel() for parameter in model.parameters())
