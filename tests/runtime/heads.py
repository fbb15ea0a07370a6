"""An EAGLE-3 head of small sizes: its documented tensors, and its folder in two layouts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specctl.runtime.eagle3 import load_eagle3
from specctl.runtime.eagle3_head import Eagle3Head

Tensors = dict[str, Tensor]
H, VOCAB, DRAFT_VOCAB, INNER = 32, 96, 40, 48
TARGET = SimpleNamespace(
    hidden_size=H, vocab_size=VOCAB, max_position_embeddings=128, num_hidden_layers=8
)
EMBEDDING = torch.randn(VOCAB, H, generator=torch.Generator().manual_seed(0))
# 4 query heads and 2 key heads of width 16: the head_dim that H / heads would not give.
DOCUMENTED_SHAPES = {
    "fc.weight": (H, 3 * H),
    "norm.weight": (H,),
    "lm_head.weight": (DRAFT_VOCAB, H),
    "{}.hidden_norm.weight": (H,),
    "{}.input_layernorm.weight": (H,),
    "{}.post_attention_layernorm.weight": (H,),
    "{}.self_attn.q_proj.weight": (64, 2 * H),
    "{}.self_attn.k_proj.weight": (32, 2 * H),
    "{}.self_attn.v_proj.weight": (32, 2 * H),
    "{}.self_attn.o_proj.weight": (H, 64),
    "{}.mlp.gate_proj.weight": (INNER, H),
    "{}.mlp.up_proj.weight": (INNER, H),
    "{}.mlp.down_proj.weight": (H, INNER),
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": H,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
}
OFFICIAL = {
    "architectures": ["LlamaForCausalLMEagle3"],
    **LLAMA,
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": LLAMA,
    "draft_vocab_size": DRAFT_VOCAB,
    "norm_before_residual": False,
}


def make_tensors(prefix: str = "midlayer", seed: int = 1) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name.format(prefix): torch.randn(shape, generator=generator) * 0.2
        for name, shape in DOCUMENTED_SHAPES.items()
    }
    target_ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    member = torch.zeros(VOCAB, dtype=torch.bool)
    member[target_ids] = True
    return tensors | {"d2t": target_ids - torch.arange(DRAFT_VOCAB), "t2d": member}


def write_head(
    folder: Path, tensors: Tensors | None = None, config: dict[str, Any] = OFFICIAL
) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(make_tensors() if tensors is None else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, target: SimpleNamespace = TARGET) -> Eagle3Head:
    return load_eagle3(folder, target_embedding=EMBEDDING, target_config=target).head
