"""The EAGLE-3 head: one layer that drafts from the target's own hidden states.

Li et al., 2025, arXiv:2503.01840. It computes what vLLM's `Eagle3Qwen3ForCausalLM` does, so a head
written by `save_eagle` proposes there what `eagle_drafting.draft_tokens` proposes here.

A *slot* is a place i of a text x. The target has read token x_i there and left features of it;
the head adds the token behind, x_(i+1), and predicts x_(i+2). To go on from a slot it has no
features of the target's and takes its own hidden state for them. What starts at a slot and goes
on so is a *chain*: it sees the slots up to its own, and itself.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

AUX_LAYERS = (1, 3, 4)
"""After how many of the target's layers its hidden state is taken: early, late, last.

As vLLM counts: 0 would be the embeddings. Its default for a model of four layers, (2, 2, 1), is
but two different ones.
"""
Past = list[tuple[Tensor, Tensor]]
"""Keys and values: first the slots', then those of each step of the chains."""

AS_THE_TARGET = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Of the target's configuration: what a head has in common with it."""


def eagle_config(target: Any) -> Qwen3Config:
    """A head's configuration, from its target's."""
    own: dict[str, Any] = {
        "architectures": ["Eagle3Qwen3ForCausalLM"],
        "num_hidden_layers": 1,
        "intermediate_size": 384,
        "draft_vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        # The layers' states differ in scale: they grow from one to the next.
        "fc_norm": True,
        # The checkpoint has neither embeddings nor output layer, so nothing is tied in it.
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return Qwen3Config(**own, **{key: getattr(target, key) for key in AS_THE_TARGET})


class EagleHead(nn.Module):
    """What a head has of its own. Embeddings and output layer are the target's.

    Of its own they would be larger than all the rest and learn less from a head's few steps; and
    vLLM puts the target's in where a checkpoint has none.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config: Any = config
        self.aux_layers: list[int] = self.config.eagle_aux_hidden_state_layer_ids
        width = config.hidden_size
        self.fc_norm = nn.ModuleList(_norm(config, width) for _ in self.aux_layers)
        self.fc = nn.Linear(len(self.aux_layers) * width, width, bias=False)
        self.layers = nn.ModuleList([_Layer(config)])
        self.norm = _norm(config, width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=config.initializer_range)

    def combine(self, features: Tensor) -> Tensor:
        """[..., width] of the target's features [..., aux * width]."""
        chunks = features.chunk(len(self.fc_norm), -1)
        normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
        combined: Tensor = self.fc(torch.cat(normed, -1))
        return combined

    def forward(self, embeds: Tensor, hidden: Tensor, chains: Tensor, past: Past) -> Tensor:
        """One step: the hidden states [b, c, width] that it ends with.

        `chains` [b or 1, c] are the slots that the chains started at. `past` grows by this step;
        the first one, when it is empty, is the step of all slots, and `chains` counts them.
        """
        out: Tensor = self.layers[0](embeds, hidden, chains, past)
        return out

    def logits(self, hidden: Tensor, target: Any) -> Tensor:
        """[..., V] of the hidden states that a step ended with."""
        logits: Tensor = target.lm_head(self.norm(hidden))
        return logits


class _Layer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm = _norm(config, config.hidden_size)
        self.hidden_norm = _norm(config, config.hidden_size)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _norm(config, config.hidden_size)
        self.mlp = Qwen3MLP(config)

    def forward(self, embeds: Tensor, hidden: Tensor, chains: Tensor, past: Past) -> Tensor:
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, chains, past)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class _Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size, width = config.head_dim, config.hidden_size
        self.size = size
        self.q_proj = nn.Linear(2 * width, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(2 * width, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * width, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, width, bias=False)
        self.q_norm = _norm(config, size)
        self.k_norm = _norm(config, size)
        self.rotary = Qwen3RotaryEmbedding(config)

    def forward(self, x: Tensor, chains: Tensor, past: Past) -> Tensor:
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.rotary(x, chains + len(past))
        queries, keys = apply_rotary_pos_emb(self.q_norm(queries), self.k_norm(keys), cos, sin)
        past.append((keys, values))
        if len(past) == 1:
            out = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            )
        else:
            out = _attend(queries, chains, past)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


def _attend(queries: Tensor, chains: Tensor, past: Past) -> Tensor:
    """[b, heads, c, size]: each chain over the slots up to its first and over its own steps."""
    (keys, values), *own = past
    grouped = queries.unflatten(1, (keys.size(1), -1)) * queries.size(-1) ** -0.5
    over_slots = grouped @ keys.transpose(-1, -2)[:, :, None]
    unseen = torch.arange(keys.size(2)) > chains[:, None, None, :, None]
    scores = [over_slots.masked_fill(unseen, float("-inf"))]
    scores += [(grouped * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
    weights = torch.cat(scores, -1).softmax(-1)
    slots = keys.size(2)
    out = weights[..., :slots] @ values[:, :, None]
    for step, (_, v) in enumerate(own):
        out = out + weights[..., slots + step, None] * v[:, :, None]
    return out.flatten(1, 2)


def _norm(config: Qwen3Config, size: int) -> nn.RMSNorm:
    return nn.RMSNorm(size, eps=config.rms_norm_eps)


def save_eagle(head: EagleHead, directory: Path) -> None:
    """Write a head in bfloat16, as vLLM reads it."""
    head.config.save_pretrained(directory)
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in head.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def load_eagle(directory: Path) -> EagleHead:
    """A head in float32, ready to be asked."""
    head = EagleHead(Qwen3Config.from_pretrained(directory))
    head.load_state_dict(load_file(directory / "model.safetensors"))
    return head.eval()
