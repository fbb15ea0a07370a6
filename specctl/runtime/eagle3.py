"""The EAGLE-3 head: one decoder layer over fused target states and its own previous output.

Training and the runtime share this code: `block` leaves attention to its caller, who knows what
is visible (a causal prefix, a tree behind a cache, or the unrolled steps of a training run).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specctl.errors import CheckpointKeyError, CheckpointShapeError, ModelConfigError
from specctl.runtime.eagle3_config import Eagle3Config

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
LAYER_NAMES = {"official": "midlayer", "speculators": "layers.0"}
_IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a constant that old files carry


class Eagle3Head(nn.Module):
    """An EAGLE-3 draft head.

    Slot i pairs token i + 1 with the fused target state at i, stands at position i, and
    predicts token i + 2. A later level feeds the previous output as `hidden`.

    Args:
        config: the head's shape.
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
        self.q_size, self.kv_size = (
            config.num_attention_heads * dim,
            config.num_key_value_heads * dim,
        )
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.fc = nn.Linear(3 * config.target_hidden_size, width, bias=False)
        self.input_layernorm = nn.Parameter(torch.ones(width))
        self.hidden_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(2 * width, self.q_size + 2 * self.kv_size, bias=False)
        self.o_proj = nn.Linear(self.q_size, width, bias=False)
        self.post_attention_layernorm = nn.Parameter(torch.ones(width))
        self.gate_up = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)
        self.norm = nn.Parameter(torch.ones(width))
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)
        self.cover_positions(num_positions)
        draft_ids = torch.arange(config.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros_like(draft_ids))
        self.register_buffer("target_ids", draft_ids, persistent=False)

    @torch.no_grad()
    def cover_positions(self, num_positions: int) -> None:
        """Rebuilds the rotary table for positions 0 .. num_positions - 1."""
        rotary = LlamaRotaryEmbedding(self.config.rotary_config())
        like = self.norm
        cos, sin = rotary(torch.empty(0), torch.arange(num_positions)[None])
        # The sign of rotate-half is folded into the sine.
        half = self.config.head_dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        self.cos, self.sin = (table[0].to(like.device, like.dtype) for table in (cos, sin))

    def set_vocabulary(self, d2t: Tensor) -> None:
        """Sets the draft vocabulary: draft id i is target id `i + d2t[i]`."""
        self.d2t = d2t.to(self.norm.device)
        self.target_ids = self.d2t + torch.arange(len(d2t), device=self.norm.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token embeddings `[..., H]` of target ids."""
        return F.embedding(token_ids, self.embedding)

    def fuse(self, features: Tensor) -> Tensor:
        """Three target states `[..., 3 Ht]` to one hidden state `[..., H]`."""
        if features.shape[-1] == self.config.hidden_size:
            return features
        fused: Tensor = self.fc(features)
        return fused

    def block(self, embeds: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """One decoder layer.

        Args:
            embeds, hidden: `[B, T, H]`. position_ids: `[B, T]`.
            attend: takes rotated q `[B, Hq, T, D]`, k and v `[B, Hkv, T, D]`; gives
                `[B, Hq, T, D]`.

        Returns:
            `[B, T, H]`, before the final norm: what the next level takes as hidden.
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
        """`[..., draft_vocab]` of outputs of `block`."""
        scores: Tensor = self.lm_head(self._norm(hidden, self.norm))
        return scores

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary to target vocabulary."""
        return self.target_ids[draft_ids]

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)

    def _heads(self, mixed: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits heads and rotates queries and keys in one go; `[B, heads, T, D]` each."""
        rows, steps, _ = mixed.shape
        dim, num_queries = self.config.head_dim, self.config.num_attention_heads
        heads = mixed.view(rows, steps, -1, dim).transpose(1, 2)
        num_rotated = num_queries + self.config.num_key_value_heads
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        cos, sin = self.cos[position_ids][:, None], self.sin[position_ids][:, None]
        rotated = rotated * cos + rotated.roll(dim // 2, -1) * sin
        return rotated[:, :num_queries], rotated[:, num_queries:], value


def load_eagle3(
    folder: Path,
    *,
    target_embedding: Tensor,
    target_config: Any,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Eagle3Head:
    """Loads a head in the official or in speculators' naming, every tensor checked.

    Args:
        folder: has `config.json` and `model.safetensors`.
        target_embedding: `[V, Ht]`; used unless the file brings its own.
        target_config: the target's config, for its widths and context.

    Raises:
        CheckpointKeyError, CheckpointShapeError, ModelConfigError: see `specctl.errors`.
    """
    config = Eagle3Config.from_folder(folder)
    _check_target(config, target_config)
    tensors = _read_tensors(Path(folder), config)
    vocabulary = _read_vocabulary(tensors, config)
    embedding = tensors.pop("embed_tokens.weight", target_embedding)
    _check_shape("embed_tokens.weight", embedding, (config.vocab_size, config.hidden_size))
    positions = max(config.max_position_embeddings, target_config.max_position_embeddings)
    head = Eagle3Head(config, embedding.detach(), positions)
    head.load_state_dict(_fused(tensors) | {"embedding": embedding.detach(), "d2t": vocabulary})
    head = head.to(device=device, dtype=dtype).eval()
    head.set_vocabulary(vocabulary)
    return head


def save_eagle3(head: Eagle3Head, folder: Path, naming: str = "official") -> None:
    """Writes `config.json` and `model.safetensors`; the embedding stays with the target."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = head.config
    tensors = _split(head, LAYER_NAMES[naming])
    if config.draft_vocab_size != config.vocab_size:
        member = torch.zeros(config.vocab_size, dtype=torch.bool)
        member[head.target_ids.cpu()] = True
        tensors |= {"d2t": head.d2t, "t2d": member}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(
        config.to_dict(naming) | {"dtype": str(head.norm.dtype).removeprefix("torch.")}, indent=2
    )
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def expected_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint but the vocabulary maps, layer names without their prefix."""
    width, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    q_size, kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, 3 * config.target_hidden_size),
        "norm.weight": (width,),
        "lm_head.weight": (config.draft_vocab_size, width),
        "layer.self_attn.q_proj.weight": (q_size, 2 * width),
        "layer.self_attn.k_proj.weight": (kv_size, 2 * width),
        "layer.self_attn.v_proj.weight": (kv_size, 2 * width),
        "layer.self_attn.o_proj.weight": (width, q_size),
        "layer.mlp.gate_proj.weight": (inner, width),
        "layer.mlp.up_proj.weight": (inner, width),
        "layer.mlp.down_proj.weight": (width, inner),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    return shapes | {f"layer.{norm}.weight": (width,) for norm in norms}


def _check_target(config: Eagle3Config, target_config: Any) -> None:
    """The head must have been made for a target of these widths."""
    for name, ours in (
        ("hidden_size", config.target_hidden_size),
        ("vocab_size", config.vocab_size),
    ):
        theirs = getattr(target_config, name)
        if ours != theirs:
            raise ModelConfigError(
                f"EAGLE-3 head, target {name}",
                expected=f"{ours}, which the head was trained for",
                found=str(theirs),
                fix="pair the head with its own target",
            )


def _read_tensors(folder: Path, config: Eagle3Config) -> dict[str, Tensor]:
    """The file's tensors, layer names normalised to `layer.*`, keys and shapes checked."""
    path = folder / "model.safetensors"
    if not path.exists():
        found = "pytorch_model.bin" if (folder / "pytorch_model.bin").exists() else "no weights"
        raise CheckpointKeyError(
            f"EAGLE-3 checkpoint {folder}",
            expected="model.safetensors",
            found=found,
            fix="convert it on a machine that trusts it: safetensors.torch.save_file("
            "torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')",
        )
    raw = {k: v for k, v in load_file(path).items() if not k.endswith(_IGNORED_SUFFIX)}
    tensors = {_normalised(name): tensor for name, tensor in raw.items()}
    shapes = expected_shapes(config)
    optional = {"embed_tokens.weight", "d2t", "t2d"}
    _check_keys(path, set(shapes), set(tensors), optional)
    for name, shape in shapes.items():
        _check_shape(name, tensors[name], shape)
    return tensors


def _normalised(name: str) -> str:
    for prefix in LAYER_NAMES.values():
        if name.startswith(prefix + "."):
            return "layer" + name.removeprefix(prefix)
    return name


def _check_keys(path: Path, needed: set[str], found: set[str], optional: set[str]) -> None:
    missing, unexpected = sorted(needed - found), sorted(found - needed - optional)
    if missing or unexpected:
        raise CheckpointKeyError(
            f"EAGLE-3 checkpoint {path}",
            expected=f"also {', '.join(missing)}" if missing else "no other tensors",
            found=f"unexpected {', '.join(unexpected)}" if unexpected else "them missing",
            fix="use an EAGLE-3 checkpoint in the official or in speculators' naming",
        )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointShapeError(
            f"EAGLE-3 tensor {name}",
            expected=str(shape),
            found=str(tuple(tensor.shape)),
            fix="check that config.json belongs to these weights and to this target",
        )


def _read_vocabulary(tensors: dict[str, Tensor], config: Eagle3Config) -> Tensor:
    """`d2t` after its checks; zeros where both vocabularies are the same."""
    d2t, member = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None and member is None and config.draft_vocab_size == config.vocab_size:
        return torch.zeros(config.vocab_size, dtype=torch.int64)
    if d2t is None or member is None:
        _check_keys(Path("d2t, t2d"), {"d2t", "t2d"}, set(), set())
    assert d2t is not None
    assert member is not None
    _check_shape("d2t", d2t, (config.draft_vocab_size,))
    _check_shape("t2d", member, (config.vocab_size,))
    ids = d2t.long() + torch.arange(len(d2t))
    rebuilt = torch.zeros(config.vocab_size, dtype=torch.bool)
    is_inside = bool(((ids >= 0) & (ids < config.vocab_size)).all())
    if is_inside:
        rebuilt[ids] = True
    if not is_inside or not torch.equal(rebuilt, member.bool()) or len(ids.unique()) != len(ids):
        raise CheckpointShapeError(
            "EAGLE-3 vocabulary maps",
            expected=f"offsets d2t to distinct ids below {config.vocab_size}, the members of t2d",
            found=f"ids {int(ids.min())} to {int(ids.max())}, {int(member.sum())} members in t2d",
            fix="rebuild d2t and t2d from the same token list",
        )
    return d2t.long()


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint tensors as this module's state: q, k, v and gate, up stacked."""
    attention, mlp = "layer.self_attn.", "layer.mlp."
    state = {name: tensors[name] for name in ("fc.weight", "lm_head.weight")}
    state |= {"norm": tensors["norm.weight"], "o_proj.weight": tensors[attention + "o_proj.weight"]}
    state |= {"down_proj.weight": tensors[mlp + "down_proj.weight"]}
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        state[norm] = tensors[f"layer.{norm}.weight"]
    state["qkv.weight"] = torch.cat([tensors[f"{attention}{n}_proj.weight"] for n in "qkv"])
    state["gate_up.weight"] = torch.cat([tensors[f"{mlp}{n}_proj.weight"] for n in ("gate", "up")])
    return state


def _split(head: Eagle3Head, layer: str) -> dict[str, Tensor]:
    """Inverse of `_fused`, under the checkpoint's layer name."""
    tensors = {"fc.weight": head.fc.weight, "norm.weight": head.norm}
    tensors |= {"lm_head.weight": head.lm_head.weight}
    sizes = [head.q_size, head.kv_size, head.kv_size]
    for name, part in zip("qkv", head.qkv.weight.split(sizes), strict=True):
        tensors[f"{layer}.self_attn.{name}_proj.weight"] = part
    tensors[f"{layer}.self_attn.o_proj.weight"] = head.o_proj.weight
    for name, part in zip(("gate", "up"), head.gate_up.weight.chunk(2), strict=True):
        tensors[f"{layer}.mlp.{name}_proj.weight"] = part
    tensors[f"{layer}.mlp.down_proj.weight"] = head.down_proj.weight
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}.{norm}.weight"] = getattr(head, norm)
    return tensors
