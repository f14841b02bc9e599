"""How large the reference models are."""

from typing import Any

from transformers import Qwen3Config

from workers.reference.tokenizer import CONTEXT, VOCABULARY

SHAPES: dict[str, dict[str, Any]] = {
    # As large as an hour or so of two CPU cores can train: more parameters would see fewer tokens.
    "target": {
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    # Less than a tenth of it. Two layers are the least that can look up what followed the same
    # words before.
    "draft": {
        "hidden_size": 80,
        "intermediate_size": 208,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
}


def config(name: str) -> Qwen3Config:
    """The configuration of `target` or `draft`."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        **SHAPES[name],
    )
