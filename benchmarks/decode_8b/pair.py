"""A target and an EAGLE-3 head of a given size with random weights, built on the device.

How long a pass takes depends on shapes, not on weights, so nothing has to be downloaded. The head's
logits are drawn sharp enough for its likeliest token to have about half of the probability, as a
trained head's has: else no policy would find anything worth drafting. The target accepts next to
nothing, so a round emits about one token, and the text means nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specctl.artifacts.manifest import digest_of
from specctl.runtime.attention import ATTENTION
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.drafter import Eagle3Drafter
from specctl.runtime.eagle3_head import Eagle3Config, Eagle3Head, default_layers
from specctl.runtime.load import Pair, Target

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
NUM_POSITIONS = 131_072
LOGIT_SPREAD = 8.0
"""Standard deviation of the head's logits: their largest of 32,000 gets a half, by and large."""


@dataclass(frozen=True)
class Size:
    """What a pair measures; fields as in a Llama config.

    Attributes:
        draft_vocab_size: tokens that the head can say.
        vocab_stride: target ids between two of them, so that the map between both is no identity.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    draft_vocab_size: int
    vocab_stride: int
    dtype: torch.dtype

    @property
    def target_config(self) -> LlamaConfig:
        """Llama 3.1's, at this size."""
        return LlamaConfig(
            **self._shared(),
            num_hidden_layers=self.num_hidden_layers,
            rms_norm_eps=1e-5,
            rope_parameters=dict(LLAMA3_ROPE),
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=None,
        )

    @property
    def head_config(self) -> Eagle3Config:
        """An EAGLE-3 head's of one layer as wide as the target's."""
        return Eagle3Config(
            **self._shared(),
            target_hidden_size=self.hidden_size,
            draft_vocab_size=self.draft_vocab_size,
            aux_layers=default_layers(self.num_hidden_layers),
        )

    def _shared(self) -> dict[str, Any]:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        return {name: getattr(self, name) for name in (*names, "num_key_value_heads")} | {
            "head_dim": self.hidden_size // self.num_attention_heads,
            "max_position_embeddings": NUM_POSITIONS,
        }


LLAMA_8B = Size(
    name="8b",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    draft_vocab_size=32_000,
    vocab_stride=4,
    dtype=torch.bfloat16,
)
TINY = replace(
    LLAMA_8B,
    name="tiny",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    draft_vocab_size=160,
    vocab_stride=3,
    dtype=torch.float32,
)
SIZES = {size.name: size for size in (LLAMA_8B, TINY)}


def random_pair(size: Size, device: torch.device) -> Pair:
    """The pair, loaded; its digests are of its configs, as no checkpoint stands behind it."""
    torch.manual_seed(0)
    config = size.target_config
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=size.dtype, attn_implementation=ATTENTION
        )
    name = f"random {size.name}"
    target = Target(
        name=name,
        folder=Path(),
        model=CachedModel(model.eval()),
        tokenizer=None,
        eos_ids=(),
        digest=_digest({"random": config.to_dict()}),
        tokenizer_digest=_digest({"random": "no tokenizer"}),
    )
    head = random_head(size, model.get_input_embeddings().weight.detach(), device)
    drafter = Eagle3Drafter(head, head.config.aux_layers)
    return Pair(target, drafter, f"{name}, EAGLE-3", _digest({"random": head.config.model_dump()}))


@torch.no_grad()
def random_head(size: Size, embedding: torch.Tensor, device: torch.device) -> Eagle3Head:
    """A head whose draft id i is the target's id `vocab_stride · i`."""
    with torch.device(device):
        head = Eagle3Head(size.head_config, embedding, NUM_POSITIONS)
        vocabulary = torch.arange(size.draft_vocab_size) * (size.vocab_stride - 1)
    head.lm_head.weight.normal_(0.0, LOGIT_SPREAD / size.hidden_size**0.5)
    head = head.to(size.dtype).eval()
    head.set_vocabulary(vocabulary)
    return head


def _digest(value: dict[str, Any]) -> str:
    return digest_of(json.dumps(value, sort_keys=True, default=str).encode())
