"""EAGLE-3 checkpoints, in the official naming and that of speculators."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specctl.errors import CheckpointKeyError, CheckpointShapeError, ModelConfigError
from specctl.runtime.eagle3_head import Eagle3Config, Eagle3Head

log = logging.getLogger("specctl.models")
LAYER_NAMES = ("midlayer", "layers.0")
"""The layer in the official naming, and in that of speculators."""
NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
_IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a constant that old files carry
Shape = tuple[int, ...]


def load_eagle3(
    folder: Path,
    *,
    target_embedding: Tensor,
    target_config: Any,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Eagle3Head:
    """Loads a head and checks the name and shape of every tensor.

    Args:
        folder: with `config.json`, and `model.safetensors` or `pytorch_model.bin`.
        target_embedding: `[V, Ht]`, used unless the file has its own.
        target_config: for the target's widths and context.
    """
    config = Eagle3Config.from_folder(folder)
    widths = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
    for name, ours in widths.items():
        theirs = getattr(target_config, name)
        if ours != theirs:
            raise ModelConfigError(
                f"the EAGLE-3 head was trained for a target of {name} {ours}, but this one "
                f"has {theirs}",
                hint="pair the head with its own target",
            )
    parts = parameter_parts(config)
    tensors = _read_tensors(
        Path(folder), {k: v for part in parts.values() for k, v in part.items()}
    )
    vocabulary = _read_vocabulary(tensors, config)
    embedding = tensors.pop("embed_tokens.weight", target_embedding).detach()
    _check_shape("embed_tokens.weight", embedding, (config.vocab_size, config.hidden_size))
    stated, context = config.max_position_embeddings, target_config.max_position_embeddings
    if stated < context:
        log.warning(
            "EAGLE-3 head %s was made for %d positions, its target for %d: drafts at later "
            "positions may be accepted less often",
            folder, stated, context,
        )  # fmt: skip
    head = Eagle3Head(config, embedding, max(stated, context))
    state = {name: torch.cat([tensors[one] for one in part]) for name, part in parts.items()}
    head.load_state_dict(state | {"embedding": embedding, "d2t": vocabulary})
    head = head.to(device=device, dtype=dtype).eval()
    head.set_vocabulary(vocabulary)
    return head


def parameter_parts(config: Eagle3Config) -> dict[str, dict[str, Shape]]:
    """Names and shapes of the checkpoint's tensors, by the parameter of the head that stacks them.

    The layer's tensors are named `layer.*`. Vocabulary maps are not listed.
    """
    width, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    q_size, kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim
    heads = {"q": q_size, "k": kv_size, "v": kv_size}
    return {
        "fc.weight": {"fc.weight": (width, 3 * config.target_hidden_size)},
        "norm": {"norm.weight": (width,)},
        "lm_head.weight": {"lm_head.weight": (config.draft_vocab_size, width)},
        "qkv.weight": {
            f"layer.self_attn.{name}_proj.weight": (size, 2 * width) for name, size in heads.items()
        },
        "o_proj.weight": {"layer.self_attn.o_proj.weight": (width, q_size)},
        "gate_up.weight": {
            f"layer.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")
        },
        "down_proj.weight": {"layer.mlp.down_proj.weight": (width, inner)},
        **{norm: {f"layer.{norm}.weight": (width,)} for norm in NORMS},
    }


def _read_tensors(folder: Path, shapes: dict[str, Shape]) -> dict[str, Tensor]:
    """The file's tensors after its checks, with the layer named `layer.*`."""
    path = folder / "model.safetensors"
    if not path.exists():  # as official heads are published
        path = folder / "pytorch_model.bin"
    if not path.exists():
        raise CheckpointKeyError(
            f"EAGLE-3 checkpoint {folder} has no model.safetensors or pytorch_model.bin; "
            "download the head again"
        )
    tensors = {}
    for name, tensor in _load(path).items():
        for prefix in LAYER_NAMES:
            if name.startswith(prefix + "."):
                name = "layer" + name.removeprefix(prefix)
        if not name.endswith(_IGNORED_SUFFIX):
            tensors[name] = tensor
    _check_keys(path, set(shapes), tensors.keys() - {"embed_tokens.weight", "d2t", "t2d"})
    for name, shape in shapes.items():
        _check_shape(name, tensors[name], shape)
    return tensors


def _load(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # torch rejects pickles of anything but plain tensors.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # readers of damaged files raise anything
        reason = str(error).strip().partition("\n")[0][:200]
        raise CheckpointKeyError(
            f"EAGLE-3 checkpoint {path} is not a readable file of plain tensors: {reason}",
            hint="download or convert it again",
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise CheckpointKeyError(
            f"EAGLE-3 checkpoint {path} is a {type(loaded).__name__}, not a dictionary of tensors",
            hint="save the head's state_dict",
        )
    return loaded


def _check_keys(path: Path, needed: set[str], found: set[str]) -> None:
    missing, unexpected = sorted(needed - found), sorted(found - needed)
    if missing or unexpected:
        wrong = {"lacks": missing, "has unexpected": unexpected}
        listing = " and ".join(
            f"{verb} {', '.join(names)}" for verb, names in wrong.items() if names
        )
        raise CheckpointKeyError(
            f"EAGLE-3 checkpoint {path} {listing}",
            hint="use an EAGLE-3 checkpoint in the official or in speculators' naming",
        )


def _check_shape(name: str, tensor: Tensor, shape: Shape) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointShapeError(
            f"EAGLE-3 tensor {name} has shape {tuple(tensor.shape)}, not {shape}",
            hint="check that config.json belongs to these weights and to this target",
        )


def _read_vocabulary(tensors: dict[str, Tensor], config: Eagle3Config) -> Tensor:
    """`d2t` after its checks; zeros for equal vocabularies."""
    d2t, member = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None and member is None and config.draft_vocab_size == config.vocab_size:
        return torch.zeros(config.vocab_size, dtype=torch.int64)
    if d2t is None:
        _check_keys(Path("d2t"), {"d2t"}, set())
    assert d2t is not None
    _check_shape("d2t", d2t, (config.draft_vocab_size,))
    ids = d2t.long() + torch.arange(len(d2t))
    is_sound = bool(((ids >= 0) & (ids < config.vocab_size)).all())
    is_sound = is_sound and len(torch.unique(ids)) == len(ids)
    if is_sound and member is not None:  # some heads are published without it
        _check_shape("t2d", member, (config.vocab_size,))
        is_sound = torch.equal(ids.sort().values, member.nonzero()[:, 0])
    if not is_sound:
        raise CheckpointShapeError(
            "EAGLE-3 vocabulary maps: d2t and t2d do not name the same distinct ids below "
            f"{config.vocab_size} (d2t leads to {int(ids.min())} to {int(ids.max())})",
            hint="rebuild d2t and t2d from the same token list",
        )
    return d2t.long()
