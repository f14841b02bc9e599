"""DFlash: a drafter that proposes a whole block in one pass, from what the target has seen.

Chen, Liang and Liu, "DFlash: Block Diffusion for Flash Speculative Decoding", 2026,
arXiv:2602.06036. The block is the last token of the text, the anchor, and K masks behind it; mask i
stands at the i-th place after the anchor and predicts the token there. All of the block attend to
each other and to the text before the anchor. Of that text they see no embeddings but the target's
hidden states after some of its layers, projected. Embedding and output layer are the target's.

What is computed here is what `DFlashQwen3ForCausalLM` of vLLM 0.32.0 computes, tensor for tensor.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

BLOCK = 8
"""The anchor and K = 7 masks."""
SHAPE = {
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TARGET_LAYERS = (0, 1, 2)
"""After which of the target's layers its hidden states are read; the first is 0.

Not the last: transformers hands its output out normalized, vLLM does not.
"""
UNUSED_BYTE = "ÿ"
"""How a byte-level vocabulary writes 0xFF, which occurs in no UTF-8."""


def mask_token(tokenizer: Tokenizer) -> int:
    """The token that no text contains.

    Raises:
        ValueError: the tokenizer is not byte-level.
    """
    token: int | None = tokenizer.token_to_id(UNUSED_BYTE)
    if token is None:
        raise ValueError(f"a byte-level vocabulary holds the byte 0xFF, {UNUSED_BYTE!r}")
    return token


def new_dflash(target: Any, mask: int) -> "DFlash":
    """An untrained drafter for `target`, with `mask` as its mask token.

    Its last norm is the target's: their output layer expects states of that size.
    """
    of = target.config
    options: dict[str, Any] = dict(
        architectures=["DFlashDraftModel"],
        vocab_size=of.vocab_size,
        hidden_size=of.hidden_size,
        max_position_embeddings=of.max_position_embeddings,
        rope_parameters=of.rope_parameters,
        rms_norm_eps=of.rms_norm_eps,
        tie_word_embeddings=True,
        bos_token_id=of.bos_token_id,
        eos_token_id=of.eos_token_id,
        pad_token_id=of.pad_token_id,
        block_size=BLOCK,
        num_target_layers=of.num_hidden_layers,
        dflash_config={
            "target_layer_ids": list(TARGET_LAYERS),
            "mask_token_id": mask,
            "causal": False,
        },
        **SHAPE,
    )
    module = DFlash(Qwen3Config(**options))
    module.norm.load_state_dict(target.model.norm.state_dict())
    return module


class DFlash(nn.Module):
    """The drafter's own weights."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        extra: Any = config
        self.config = config
        self.positions: int = extra.block_size - 1
        """K, tokens in a draft."""
        self.mask: int = extra.dflash_config["mask_token_id"]
        self.target_layers: list[int] = extra.dflash_config["target_layer_ids"]
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(self.target_layers) * size, size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(size, eps)
        # One norm of the keys for all layers: on CPUs vLLM applies the first layer's to the text's
        # keys of every layer. What a layer needs of its own its norm of the queries can learn.
        k_norm = Qwen3RMSNorm(config.head_dim, eps)
        self.layers = nn.ModuleList(
            [_Layer(config, k_norm) for _ in range(config.num_hidden_layers)]
        )
        self.norm = Qwen3RMSNorm(size, eps)
        self.rotary = Qwen3RotaryEmbedding(config)
        for matrix in (p for p in self.parameters() if p.ndim == 2):
            nn.init.normal_(matrix, std=config.initializer_range)

    def forward(
        self, features: Tensor, text_at: Tensor, block: Tensor, block_at: Tensor, sees: Tensor
    ) -> Tensor:
        """[n, Q, H], the normalized states of Q places in blocks.

        Args:
            features: [n, T, layers * H], the target's hidden states of the text.
            text_at: [n, T], the text's positions.
            block: [n, Q, H], the embedded blocks, one behind the other.
            block_at: [n, Q], their positions.
            sees: [n, Q, T + Q], which places of text and blocks each attends to.
        """
        text = self.hidden_norm(self.fc(features))
        turns = self.rotary(text, torch.cat([text_at, block_at], 1))
        states = block
        for layer in self.layers:
            states = layer(states, text, turns, sees)
        normalized: Tensor = self.norm(states)
        return normalized


class _Layer(nn.Module):
    def __init__(self, config: Qwen3Config, k_norm: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config, k_norm)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(
        self, states: Tensor, text: Tensor, turns: tuple[Tensor, Tensor], sees: Tensor
    ) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), text, turns, sees)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class _Attention(nn.Module):
    def __init__(self, config: Qwen3Config, k_norm: nn.Module) -> None:
        super().__init__()
        of: Any = config
        size, self.head = of.hidden_size, of.head_dim
        wide, narrow = of.num_attention_heads * of.head_dim, of.num_key_value_heads * of.head_dim
        self.q_proj = nn.Linear(size, wide, bias=False)
        self.k_proj = nn.Linear(size, narrow, bias=False)
        self.v_proj = nn.Linear(size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, size, bias=False)
        self.q_norm = Qwen3RMSNorm(self.head, config.rms_norm_eps)
        self.k_norm = k_norm

    def forward(
        self, block: Tensor, text: Tensor, turns: tuple[Tensor, Tensor], sees: Tensor
    ) -> Tensor:
        places = torch.cat([text, block], 1)
        q = self.q_norm(self._heads(self.q_proj(block)))
        k = self.k_norm(self._heads(self.k_proj(places)))
        v = self._heads(self.v_proj(places))
        cos, sin = turns
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        q, _ = apply_rotary_pos_emb(q, q, cos[:, text.size(1) :], sin[:, text.size(1) :])
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=sees[:, None], enable_gqa=True
        )
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head))
        return heads.transpose(1, 2)


def save_dflash(module: DFlash, directory: Path) -> None:
    """Write `config.json` and `model.safetensors`, in bfloat16, as vLLM reads them."""
    module.config.save_pretrained(directory)
    weights = {name: w.to(torch.bfloat16, copy=True) for name, w in module.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def load_dflash(directory: Path) -> DFlash:
    """A drafter in float32, ready to be asked."""
    module = DFlash(Qwen3Config.from_pretrained(directory))
    module.load_state_dict(load_file(directory / "model.safetensors"))
    return module.eval()
