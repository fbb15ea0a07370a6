"""Tiny random models with the real classes: fast, seeded, and sharp enough to be decodable."""

from __future__ import annotations

from copy import deepcopy

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from specctl.runtime.attention import ATTENTION
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.drafter import SmallModelDrafter
from specctl.runtime.requests import Request, Sampling

VOCAB = 96


def toy_config(**changes: object) -> LlamaConfig:
    base = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return LlamaConfig(**{**base, **changes})


def toy_model(seed: int, config: object = None, noise: float = 0.0) -> PreTrainedModel:
    """A random model whose logits are spread out, so that ties do not happen by chance."""
    torch.manual_seed(seed)
    config = deepcopy(config or toy_config())  # from_config writes into what it is given
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return model.eval()


def toy_pair(seed: int = 0, noise: float = 0.02) -> tuple[CachedModel, SmallModelDrafter]:
    """A target and a drafter that agrees with it often but not always."""
    target = CachedModel(toy_model(seed))
    return target, SmallModelDrafter(CachedModel(toy_model(seed, noise=noise)))


def toy_requests(
    count: int, max_new_tokens: int = 24, sampling: Sampling | None = None
) -> list[Request]:
    """Prompts of uneven length, so that batches are ragged."""
    generator = torch.Generator().manual_seed(7)
    prompts = [
        torch.randint(3, VOCAB, (3 + 5 * i % 11,), generator=generator).tolist()
        for i in range(count)
    ]
    return [
        Request(f"r{i}", tuple(ids), max_new_tokens, sampling=sampling or Sampling(seed=i))
        for i, ids in enumerate(prompts)
    ]
