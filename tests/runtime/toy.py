"""Tiny random models with the real classes, fast, seeded and sharp enough to be decodable, one of
each model family; decode loops of the toy pair, who watches them, and what fails in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from specctl.policy import Chain, EntropyBins, Policy, RootOnly, StaticTree
from specctl.runtime.attention import ATTENTION
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.drafter import SmallModelDrafter
from specctl.runtime.requests import Completion, Request, RoundRecord, Sampling

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


# --------------------------------------------------------------------------- loops


Texts = dict[str, tuple[int, ...]]
TREE = StaticTree(depth=3, top_k=3, num_tokens=10)
POLICIES = {
    "ar": Policy(shape=RootOnly()),
    "chain": Policy(shape=Chain(num_draft_tokens=4)),
    "eagle2": Policy(shape=TREE),
    "hetero": Policy(shape=EntropyBins(base=TREE, edges=(9.0, 10.0, 11.0))),
}


@dataclass
class Kept:
    """An observer that keeps every round."""

    records: list[RoundRecord] = field(default_factory=list)

    def on_round(self, record: RoundRecord) -> None:
        self.records.append(record)


def loop_of(policy: Policy, *, noise: float = 0.02, **options: object) -> DecodeLoop:
    """Args: noise: the more, the less the drafter agrees with the target."""
    target, drafter = toy_pair(noise=noise)
    settings = {"batch_size": 1, "max_text_tokens": 64, "eos_ids": ()}
    return DecodeLoop(target, drafter, policy, **{**settings, **options})


def decode(policy: Policy, requests: list[Request], **options: object) -> dict[str, Completion]:
    return {done.request.request_id: done for done in loop_of(policy, **options).run(requests)}


def texts_of(done: Iterable[Completion]) -> Texts:
    return {one.request.request_id: one.token_ids for one in done}


def mixed_requests() -> list[Request]:
    """Uneven prompts and lengths; every other request samples."""
    return [
        replace(
            request,
            max_new_tokens=2 + 5 * i % 17,
            sampling=Sampling(0.8, top_p=0.95, seed=i) if i % 2 else Sampling(),
        )
        for i, request in enumerate(toy_requests(9))
    ]


def join_at_random(
    loop: DecodeLoop,
    requests: list[Request],
    random: Random,
    joining: Sequence[int] = (0, 0, 0, 1, 2),
) -> list[Completion]:
    """Requests are submitted in any order, some in front of the queue, between any two rounds."""
    waiting, done = random.sample(requests, len(requests)), []
    while waiting or loop.busy:
        for _ in range(random.choice(joining)):
            if waiting:
                loop.submit(waiting.pop(), first=random.random() < 0.3)
        done += loop.step()
    return done


@dataclass
class Failing:
    """A rule that raises in some of its calls."""

    inner: Any
    method: str
    fails: Callable[[], bool]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return self._call if name == self.method else found

    def _call(self, *given: Any) -> Any:
        if self.fails():
            raise RuntimeError("a bug of the policy's")
        return getattr(self.inner, self.method)(*given)


# --------------------------------------------------------------------------- families


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
