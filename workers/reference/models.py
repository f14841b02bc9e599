"""Where the models lie, and how they are read and written."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM
from transformers.utils import logging

from workers.reference.paths import MODELS, model_path
from workers.reference.tokenizer import save_tokenizer


def load_model(name: str, root: Path = MODELS) -> Any:
    """A model in float32, ready to be asked: bfloat16 is for storage only."""
    return Qwen3ForCausalLM.from_pretrained(model_path(name, root), dtype=torch.float32).eval()


def load_tokenizer(root: Path = MODELS) -> Tokenizer:
    """The tokenizer that all models share."""
    return Tokenizer.from_file(str(model_path("target", root) / "tokenizer.json"))


def save_model(model: Any, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a model in bfloat16 with its tokenizer, as transformers and vLLM read them."""
    model.to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(tokenizer, directory)


def hide_loading_bars() -> None:
    """Keep transformers from drawing bars of its own over a command's."""
    logging.disable_progress_bar()


def parameters(model: Any) -> int:
    """How many there are; embeddings that are the output layer too count once."""
    return sum(parameter.numel() for parameter in model.parameters())
