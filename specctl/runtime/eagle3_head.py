"""The EAGLE-3 head: one decoder layer over fused target states and its own previous output.

Training and the runtime share this code: the caller of `block` supplies attention (over a causal
prefix, a tree behind a cache, or the unrolled steps of training). `eagle3` reads published heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Eagle3Config(BaseModel):
    """Shape of an EAGLE-3 head."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    hidden_size: int  # width of the head
    target_hidden_size: int  # width of one fused target state
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # width of an attention head, by default hidden / heads
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # target layers whose *input* is fused, low to high
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    """In transformers' form."""
    norm_before_residual: bool = False  # the residual is the normed hidden state


def default_layers(num_target_layers: int) -> tuple[int, ...]:
    """The layers whose inputs the authors' heads fuse, which is what every maker and engine takes
    where a head lists none (`eagle/model/modeling_llama_kv.py`: 2, n // 2, n - 3)."""
    return 2, num_target_layers // 2, num_target_layers - 3


class Eagle3Head(nn.Module):
    """An EAGLE-3 draft head.

    Slot i has position i, pairs token i + 1 with the fused target state at i, and predicts token
    i + 2. Deeper levels take the previous output as `hidden`.

    Args:
        embedding: `[V, H]`, the target's token embedding.
        num_positions: positions that the rotary table covers.
    """

    cos: Tensor
    sin: Tensor
    d2t: Tensor
    target_ids: Tensor

    def __init__(self, config: Eagle3Config, embedding: Tensor, num_positions: int) -> None:
        super().__init__()
        self.config = config
        width, dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.fc = nn.Linear(len(config.aux_layers) * config.target_hidden_size, width, bias=False)
        self.input_layernorm = nn.Parameter(torch.ones(width))
        self.hidden_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(2 * width, q_size + 2 * kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, width, bias=False)
        self.post_attention_layernorm = nn.Parameter(torch.ones(width))
        self.gate_up = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)
        self.norm = nn.Parameter(torch.ones(width))
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
        shape = {name: getattr(config, name) for name in names}
        rotary = LlamaRotaryEmbedding(
            LlamaConfig(**shape, rope_parameters=dict(config.rope_parameters))
        )
        with torch.no_grad():
            cos, sin = rotary(torch.empty(0), torch.arange(num_positions)[None])
        # The sign of rotate-half is folded into the sine.
        sin = torch.cat([-sin[..., : dim // 2], sin[..., dim // 2 :]], -1)
        self.register_buffer("cos", cos[0], persistent=False)
        self.register_buffer("sin", sin[0], persistent=False)
        draft_ids = torch.arange(config.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros_like(draft_ids))
        self.register_buffer("target_ids", draft_ids, persistent=False)

    def set_vocabulary(self, d2t: Tensor) -> None:
        """Sets the draft vocabulary: draft id i is target id `i + d2t[i]`."""
        self.d2t = d2t.to(self.norm.device)
        self.target_ids = self.d2t + torch.arange(len(d2t), device=self.norm.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.embedding)

    def fuse(self, features: Tensor) -> Tensor:
        """Fuses target states `[..., layers * Ht]` into one hidden state `[..., H]`."""
        if features.shape[-1] == self.config.hidden_size:
            return features
        fused: Tensor = self.fc(features)
        return fused

    def block(self, embeds: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """One decoder layer.

        Args:
            embeds, hidden: `[B, T, H]`. position_ids: `[B, T]`.
            attend: from rotated q `[B, Hq, T, D]`, k and v `[B, Hkv, T, D]` to `[B, Hq, T, D]`.

        Returns:
            `[B, T, H]`, before the final norm: the next level's `hidden`.
        """
        normed = self._norm(hidden, self.hidden_norm)
        residual = normed if self.config.norm_before_residual else hidden
        mixed = self.qkv(torch.cat([self._norm(embeds, self.input_layernorm), normed], -1))
        query, key, value = self._heads(mixed, position_ids)
        context = attend(query, key, value).transpose(1, 2).flatten(2)
        residual = residual + self.o_proj(context)
        gate, up = self.gate_up(self._norm(residual, self.post_attention_layernorm)).chunk(2, -1)
        output: Tensor = residual + self.down_proj(F.silu(gate) * up)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., draft_vocab]`: logits of outputs of `block`."""
        scores: Tensor = self.lm_head(self._norm(hidden, self.norm))
        return scores

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.target_ids[draft_ids]

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)

    def _heads(self, mixed: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits heads and rotates queries and keys together; `[B, heads, T, D]` each."""
        rows, steps, _ = mixed.shape
        dim, num_queries = self.config.head_dim, self.config.num_attention_heads
        heads = mixed.view(rows, steps, -1, dim).transpose(1, 2)
        num_rotated = num_queries + self.config.num_key_value_heads
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        cos, sin = self.cos[position_ids][:, None], self.sin[position_ids][:, None]
        rotated = rotated * cos + rotated.roll(dim // 2, -1) * sin
        return rotated[:, :num_queries], rotated[:, num_queries:], value
