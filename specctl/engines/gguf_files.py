"""GGUF files of a pair for llama.cpp, written by the `gguf` package.

Targets and small drafters are Llama models; an EAGLE-3 head shares the target's embedding and
carries the target's tokenizer, which llama.cpp compares with the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specctl.durable import beside, output_errors
from specctl.errors import EngineError, ModelConfigError, ModelError, reason_of
from specctl.lazy import LazyModule
from specctl.runtime.eagle3 import load_eagle3, parameter_parts
from specctl.runtime.identity import load_tokenizer, quietly

gguf: Any = LazyModule("gguf")
Weights = Literal["float32", "float16", "q8_0"]
"""Number format of matrices; norms are float32."""
BLOCK = 32
"""Weights of a row that share a scale in q8_0."""
PRE_TOKENIZERS = {
    ("Digits", "ByteLevel"): "smollm",
    ("ByteLevel",): "gpt-2",
}
"""llama.cpp's name by the pre-tokenizers of `tokenizer.json`. Others hide regular expressions that
differ in details: their models have published GGUF files, which are copied from."""
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "hidden_norm": "attn_norm_2",  # of an EAGLE-3 head
}
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "norm": "output_norm",
    "fc": "fc",
}
Tensors = Iterator[tuple[str, Tensor]]
Fields = dict[str, Any]


def write_llama(folder: Path, path: Path, weights: Weights, *, target: Path | None = None) -> None:
    """Writes a Llama model.

    Args:
        target: folder or GGUF file of the target of a drafter, whose tokenizer it gets.

    Raises:
        ModelConfigError: another architecture. ModelError: an unreadable checkpoint.
        EngineError: a tokenizer without a name in llama.cpp, or a missing package.
    """
    config = config_of(folder)
    model = quietly(AutoModelForCausalLM, folder, dtype=torch.float32)
    tokenizer = tokenizer_fields(folder) if target is None else target_facts(target)[1]
    shape = shape_fields("llama", config) | {
        "llama.block_count": config.num_hidden_layers,
        "llama.vocab_size": config.vocab_size,
    }
    _write(path, "llama", shape, tokenizer, _renamed(model.state_dict(), config), weights)


def write_eagle3(folder: Path, path: Path, weights: Weights, *, target: Path) -> None:
    """Writes an EAGLE-3 head.

    Args:
        target: the target's folder, or its GGUF file.

    Raises:
        ModelError: a head that cannot be read, or of another target. EngineError: as `write_llama`.
    """
    facts, tokenizer = target_facts(target)
    embedding = torch.zeros(facts.vocab_size, facts.hidden_size)
    head = load_eagle3(folder, target_embedding=embedding, target_config=facts)
    config, state = head.config, head.state_dict()
    check_rope(config.rope_parameters, folder)
    tensors: dict[str, Tensor] = {}
    for name, part in parameter_parts(config).items():
        pieces = state[name].split([size[0] for size in part.values()])
        named = (
            (one.replace("layer.", "model.layers.0.", 1), piece)
            for one, piece in zip(part, pieces, strict=True)
        )
        tensors |= dict(named)
    if head.embedding.any():  # its own; without one llama.cpp takes the target's
        tensors["model.embed_tokens.weight"] = head.embedding.data
    shape = shape_fields("eagle3", config) | {
        "eagle3.block_count": 1,
        "eagle3.vocab_size": config.vocab_size,
        "eagle3.target_layers": list(config.resolve_aux_layers(facts.num_hidden_layers)),
        "eagle3.target_hidden_size": config.target_hidden_size,
        "eagle3.norm_before_residual": config.norm_before_residual,
    }
    vocabulary = None if config.draft_vocab_size == config.vocab_size else head.target_ids
    _write(path, "eagle3", shape, tokenizer, _renamed(tensors, config), weights, vocabulary)


def config_of(folder: Path) -> Any:
    """The configuration of a Llama model without biases; `ModelConfigError` for another model."""
    config = quietly(AutoConfig, folder)
    kind = getattr(config, "model_type", None)
    biased = any(getattr(config, name, False) for name in ("attention_bias", "mlp_bias"))
    if kind != "llama" or biased:
        raise ModelConfigError(
            f"model {folder} is of kind {kind!r}{' with biases' * biased}, and only Llama models "
            "are written as GGUF here",
            hint="convert it with llama.cpp's convert_hf_to_gguf.py, and give the file",
        )
    check_rope(config.rope_parameters, folder)
    return config


def check_rope(parameters: dict[str, Any], folder: Path) -> None:
    """Raises `ModelConfigError` for rotary scaling, which has tensors of its own in GGUF."""
    if parameters.get("rope_type", "default") != "default":
        raise ModelConfigError(
            f"model {folder} scales its rotary embedding by {parameters['rope_type']!r}, which is "
            "not written as GGUF here",
            hint="convert it with llama.cpp's convert_hf_to_gguf.py, and give the file",
        )


def shape_fields(arch: str, config: Any) -> Fields:
    """The sizes of a Llama-type model under the names of GGUF."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    return {f"{arch}.{name}": value for name, value in sizes.items()}


# --------------------------------------------------------------------------- tokenizers


def tokenizer_fields(folder: Path) -> Fields:
    """The tokenizer of a folder under the names of GGUF.

    Raises:
        EngineError: a tokenizer whose kind has no name in llama.cpp.
    """
    import json

    tokenizer = load_tokenizer(folder)
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    splits = whole["pre_tokenizer"] or {}
    names = tuple(one["type"] for one in splits.get("pretokenizers", [splits]) if one)
    pre = PRE_TOKENIZERS.get(names)
    if whole["model"]["type"] != "BPE" or pre is None:
        raise EngineError(
            f"tokenizer of {folder}: llama.cpp has no name for {whole['model']['type']} behind "
            f"{' and '.join(names) or 'no pre-tokenizer'}",
            hint="give a GGUF file of the target, whose tokenizer is taken",
        )
    special = {one["id"]: one["special"] for one in whole["added_tokens"]}
    kinds = gguf.TokenType
    types = [
        kinds.NORMAL if id not in special else kinds.CONTROL if special[id] else kinds.USER_DEFINED
        for id in range(len(tokenizer))
    ]
    first = tokenizer("a")["input_ids"][0]
    fields = {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))),
        "ggml.token_type": types,
        "ggml.merges": [" ".join(pair) for pair in whole["model"]["merges"]],
        "ggml.bos_token_id": tokenizer.bos_token_id,
        "ggml.eos_token_id": tokenizer.eos_token_id,
        "ggml.padding_token_id": tokenizer.pad_token_id,
        "ggml.add_bos_token": first == tokenizer.bos_token_id,
        "ggml.add_space_prefix": False,
        "chat_template": tokenizer.chat_template,
    }
    return {f"tokenizer.{name}": value for name, value in fields.items() if value is not None}


def target_facts(target: Path) -> tuple[Any, Fields]:
    """The sizes of a target that its head must fit, and its tokenizer."""
    if target.is_dir():
        return config_of(target), tokenizer_fields(target)
    fields = read_fields(target)
    arch = fields.get("general.architecture")
    try:
        facts = SimpleNamespace(
            hidden_size=fields[f"{arch}.embedding_length"],
            num_hidden_layers=fields[f"{arch}.block_count"],
            max_position_embeddings=fields[f"{arch}.context_length"],
            vocab_size=len(fields["tokenizer.ggml.tokens"]),
        )
    except KeyError as error:
        raise ModelError(
            f"{target} is no language model with a tokenizer: it lacks {error}"
        ) from error
    return facts, {name: value for name, value in fields.items() if name.startswith("tokenizer.")}


def read_fields(path: Path) -> Fields:
    """The metadata of a GGUF file; `ModelError` if it cannot be read."""
    try:
        reader = package().GGUFReader(path)
        return {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} is no readable GGUF file: {reason_of(error)}") from error


# --------------------------------------------------------------------------- writing


def package() -> Any:
    """The `gguf` package; `EngineError` where it is missing."""
    try:
        import gguf as found
    except ImportError as error:
        raise EngineError(
            "GGUF files need the package gguf", hint="pip install 'specctl[gguf]'"
        ) from error
    return found


def _renamed(tensors: Mapping[str, Tensor], config: Any) -> Tensors:
    """The tensors under the names of GGUF, queries and keys in its order of rotation."""
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in OUTSIDE:
            if stem == "lm_head" and getattr(config, "tie_word_embeddings", False):
                continue
            yield f"{OUTSIDE[stem]}.weight", tensor
            continue
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = (
                config.num_attention_heads
                if part.endswith("q_proj")
                else config.num_key_value_heads
            )
            halves = tensor.view(heads, 2, -1, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        yield f"blk.{number}.{LAYER[part]}.weight", tensor


def _write(
    path: Path,
    arch: str,
    shape: Fields,
    tokenizer: Fields,
    tensors: Tensors,
    weights: Weights,
    vocabulary: Tensor | None = None,
) -> None:
    kinds = package().GGMLQuantizationType
    types = {"float32": kinds.F32, "float16": kinds.F16, "q8_0": kinds.Q8_0}
    staged = beside(path)
    writer = gguf.GGUFWriter(staged, arch)
    writer.add_name(path.stem)
    for name, value in (shape | tokenizer).items():
        _add(writer, name, value)
    for name, tensor in tensors:
        kind = types[weights] if tensor.dim() > 1 else kinds.F32
        if kind == kinds.Q8_0 and tensor.shape[-1] % BLOCK:
            kind = kinds.F16
        rows = np.ascontiguousarray(tensor.detach().float().numpy())
        writer.add_tensor(name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    if vocabulary is not None:
        writer.add_tensor("d2t", vocabulary.numpy())
    try:
        with output_errors(path, "GGUF file"):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _add(writer: Any, name: str, value: Any) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_key_value(name, value, kinds.UINT32)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_string(name, value)
