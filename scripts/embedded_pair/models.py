"""The target's and the small drafter's shape, and their losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.train_eagle3.features import Example

VOCAB_SIZE = 4096
BOS_ID, USER_ID, ASSISTANT_ID = 0, 2, 3  # see tokenizer.SPECIALS
PROMPT_WEIGHT = 0.25  # of questions, whose names and numbers nobody can predict
SOFT_FRAC = 0.25  # share of the target's distribution in the small drafter's label


def target_config(
    layers: int = 8, hidden: int = 256, intermediate: int = 640, heads: int = 4, kv_heads: int = 2
) -> LlamaConfig:
    """The target's shape; special ids follow `tokenizer.SPECIALS`."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=4,
        initializer_range=0.02,
    )


def token_losses(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Next-token cross-entropy in nats, `[B, T - 1]`."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens, use_cache=False).logits[:, :-1]
    flat = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return flat.view(len(tokens), -1)


def training_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Weighted mean of `token_losses`: what a user says counts `PROMPT_WEIGHT`."""
    weights = 1 - (1 - PROMPT_WEIGHT) * is_user_text(tokens)[:, 1:].float()
    return (token_losses(model, tokens) * weights).sum() / weights.sum()


def is_user_text(tokens: Tensor) -> Tensor:
    """Where the last role token before or at a place is the user's, `[B, T]` bool."""
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    is_role = torch.isin(tokens, torch.tensor([BOS_ID, USER_ID, ASSISTANT_ID]))
    last = torch.where(is_role, places, 0).cummax(1).values
    return tokens.gather(1, last) == USER_ID


@torch.no_grad()
def validation_losses(model: LlamaForCausalLM, rows: dict[str, Tensor]) -> dict[str, float]:
    """Cross-entropy in nats by domain."""
    return {
        domain: round(float(token_losses(model, ids).mean()), 4) for domain, ids in rows.items()
    }


def small_loss(small: Any, example: Example, unembedding: Tensor) -> Tensor:
    """Of an independent drafter: cross-entropy in nats against the target, answers alone."""
    is_scored = F.pad(example.is_answer[:, 1:], (0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        logits = small(example.token_ids, use_cache=False).logits[is_scored].float()
        teacher = (example.states[is_scored] @ unembedding.T).float()
    hard = F.cross_entropy(logits, example.labels[is_scored])
    return (1 - SOFT_FRAC) * hard + SOFT_FRAC * F.cross_entropy(logits, teacher.softmax(-1))
