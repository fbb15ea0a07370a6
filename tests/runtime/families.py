"""A tiny configuration of each model family that is known."""

from __future__ import annotations

from transformers import (
    GPT2Config,
    GPTNeoXConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from tests.runtime.toy import VOCAB, toy_config

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": toy_config(),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "mistral": MistralConfig(**GROUPED, sliding_window=None),
    "phi3": Phi3Config(**GROUPED),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=None
    ),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "qwen2_moe": Qwen2MoeConfig(
        **GROUPED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
}
