"""GGUF files of a pair for llama.cpp, written by the `gguf` package.

Targets and small drafters are Llama models. An EAGLE-3 head shares the target's embedding. Drafters
carry the target's tokenizer, which llama.cpp compares with the target's own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specctl.durable import beside, output_errors
from specctl.engines.engine import GgufWeights
from specctl.errors import EngineError, ModelConfigError, ModelError
from specctl.runtime.checkpoints import kind_of
from specctl.runtime.eagle3 import load_eagle3, parameter_parts
from specctl.runtime.gguf import DIGITS, Fields, package, read_fields
from specctl.runtime.identity import load_tokenizer, quietly

log = logging.getLogger("specctl.models")
BLOCK = 32
"""Weights of a row that share a scale in q8_0."""
PRE_TOKENIZERS = {("Digits", "ByteLevel"): DIGITS, ("ByteLevel",): "gpt-2"}
"""llama.cpp's name by the pre-tokenizers of `tokenizer.json`. Others hide regular expressions that
differ in details: the tokenizer of their published GGUF files is copied."""
OF_HEAD = {"fc": "fc", "model.layers.0.hidden_norm": "blk.0.attn_norm_2"}
"""Names of an EAGLE-3 head's own tensors; the package has the others."""
CONVERT = "convert it with llama.cpp's convert_hf_to_gguf.py, and give the file"


def write_model(
    folder: Path, path: Path, weights: GgufWeights, *, target: Path | None = None
) -> None:
    """Writes a Llama model or an EAGLE-3 head.

    Args:
        target: folder or GGUF file of the target of a drafter, whose tokenizer it gets.

    Raises:
        ModelConfigError: another architecture, or the head of another target.
        ModelError: an unreadable checkpoint, or a missing package.
        EngineError: a tokenizer without a name in llama.cpp.
    """
    if target is not None and kind_of(folder) == "eagle3":
        _write_eagle3(folder, path, weights, target)
        return
    config = config_of(folder)
    model = quietly(AutoModelForCausalLM, folder, dtype=torch.float32)
    of = tokenizer_fields(folder) if target is None else target_facts(target)[1]
    fields = shape_fields("llama", config, config.num_hidden_layers)
    fields |= padded(of, config.vocab_size, folder)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    tensors = {name: of for name, of in model.state_dict().items() if name not in tied}
    write_gguf(path, "llama", fields, renamed(tensors, config, config.num_hidden_layers), weights)


def _write_eagle3(folder: Path, path: Path, weights: GgufWeights, target: Path) -> None:
    facts, tokenizer = target_facts(target)
    embedding = torch.zeros(facts.vocab_size, facts.hidden_size)
    loaded = load_eagle3(folder, target_embedding=embedding, target_config=facts)
    head, ways = loaded.head, [one.words for one in loaded.readings]
    config, state, tensors = head.config, head.state_dict(), dict[str, Tensor]()
    if len(ways) > 1:
        log.warning("EAGLE-3 head %s: read with %s, and not with %s", folder, *ways)
    if len(config.aux_layers) != 3:
        problem = f"EAGLE-3 head {folder} fuses {len(config.aux_layers)} target states, not three"
        raise ModelConfigError(f"{problem}, which is not written as GGUF here", hint=CONVERT)
    check_rope(config, folder)
    for name, part in parameter_parts(config).items():
        names = [one.replace("layer.", "model.layers.0.", 1) for one in part]
        pieces = state[name].split([size[0] for size in part.values()])
        tensors |= dict(zip(names, pieces, strict=True))
    if head.embedding.any():  # its own; without one llama.cpp takes the target's
        tensors["model.embed_tokens.weight"] = head.embedding.data
    fields = shape_fields("eagle3", config, 1) | padded(tokenizer, config.vocab_size, folder)
    fields |= {
        "eagle3.target_layers": list(config.aux_layers),
        "eagle3.target_hidden_size": config.target_hidden_size,
        "eagle3.norm_before_residual": config.norm_before_residual,
    }
    is_whole = config.draft_vocab_size == config.vocab_size
    ids = {} if is_whole else {"d2t": head.target_ids}
    write_gguf(path, "eagle3", fields, renamed(tensors, config, 1), weights, ids)


def config_of(folder: Path) -> Any:
    """The configuration of a Llama model without biases; `ModelConfigError` for another model."""
    config = quietly(AutoConfig, folder)
    kind = getattr(config, "model_type", None)
    biased = any(getattr(config, name, False) for name in ("attention_bias", "mlp_bias"))
    if kind != "llama" or biased:
        raise ModelConfigError(
            f"model {folder} is of kind {kind!r}{' with biases' * biased}, and only Llama models "
            "are written as GGUF here",
            hint=CONVERT,
        )
    check_rope(config, folder)
    return config


def check_rope(config: Any, folder: Path) -> None:
    """Raises `ModelConfigError` for rotary scaling, which has tensors of its own in GGUF."""
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        problem = f"model {folder} scales rotations by {kind!r}, which is not written as GGUF here"
        raise ModelConfigError(problem, hint=CONVERT)


def shape_fields(arch: str, config: Any, num_layers: int) -> Fields:
    """The sizes of a Llama-type model under the names of GGUF."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = {
        "block_count": num_layers,
        "vocab_size": config.vocab_size,
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
    """The tokenizer of a folder under the names of GGUF; `EngineError` for a kind without a name in
    llama.cpp."""
    tokenizer, kinds = load_tokenizer(folder), package().TokenType
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    splits = whole["pre_tokenizer"] or {}
    names = tuple(one["type"] for one in splits.get("pretokenizers", [splits]) if one)
    if whole["model"]["type"] != "BPE" or names not in PRE_TOKENIZERS:
        raise EngineError(
            f"tokenizer of {folder}: llama.cpp has no name for {whole['model']['type']} behind "
            f"{' and '.join(names) or 'no pre-tokenizer'}",
            hint="give a GGUF file of the target, whose tokenizer is taken",
        )
    added = {
        one["id"]: kinds.CONTROL if one["special"] else kinds.USER_DEFINED
        for one in whole["added_tokens"]
    }
    ids = list(range(len(tokenizer)))
    fields = {
        "ggml.model": "gpt2",
        "ggml.pre": PRE_TOKENIZERS[names],
        "ggml.tokens": tokenizer.convert_ids_to_tokens(ids),
        "ggml.token_type": [added.get(one, kinds.NORMAL) for one in ids],
        "ggml.merges": [" ".join(pair) for pair in whole["model"]["merges"]],
        "ggml.bos_token_id": tokenizer.bos_token_id,
        "ggml.eos_token_id": tokenizer.eos_token_id,
        "ggml.padding_token_id": tokenizer.pad_token_id,
        "ggml.add_bos_token": tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id,
        "ggml.add_space_prefix": False,
        "chat_template": tokenizer.chat_template,
    }
    return {f"tokenizer.{name}": value for name, value in fields.items() if value is not None}


def padded(tokenizer: Fields, vocab_size: int, folder: Path) -> Fields:
    """A tokenizer with as many tokens as a model has rows, the last ones unused."""
    tokens, types = tokenizer["tokenizer.ggml.tokens"], tokenizer["tokenizer.ggml.token_type"]
    if len(tokens) > vocab_size:
        raise ModelConfigError(
            f"model {folder} has {vocab_size} tokens, and its target's tokenizer {len(tokens)}",
            hint="use a drafter of the same model family",
        )
    extra = range(len(tokens), vocab_size)
    return tokenizer | {
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{one}]" for one in extra)],
        "tokenizer.ggml.token_type": [*types, *(package().TokenType.UNUSED for _ in extra)],
    }


def target_facts(target: Path) -> tuple[Any, Fields]:
    """The sizes of a target that its head must fit, and its tokenizer."""
    if target.is_dir():
        return config_of(target), tokenizer_fields(target)
    fields = read_fields(target)
    arch = fields.get("general.architecture")
    if arch == "eagle3":
        problem = f"{target} is an EAGLE-3 head, which drafts for a target and is none"
        raise ModelError(problem, hint="name the head's own target")
    try:
        facts = SimpleNamespace(
            hidden_size=fields[f"{arch}.embedding_length"],
            num_hidden_layers=fields[f"{arch}.block_count"],
            max_position_embeddings=fields[f"{arch}.context_length"],
            vocab_size=len(fields["tokenizer.ggml.tokens"]),
        )
    except KeyError as error:
        problem = f"{target} is no language model with a tokenizer: it lacks {error}"
        raise ModelError(problem) from error
    return facts, {name: value for name, value in fields.items() if name.startswith("tokenizer.")}


# --------------------------------------------------------------------------- files


def check_pair(target: Path, drafter: Path | None) -> Any:
    """The sizes of a target's file.

    Raises:
        ModelError: a file that cannot be read, or a target without a tokenizer.
        ModelConfigError: files of different pairs, at which llama.cpp may end the process.
    """
    facts, ours = target_facts(target)
    if drafter is None:
        return facts
    theirs, tokens = read_fields(drafter), "tokenizer.ggml.tokens"
    rules = {"another tokenizer": ours[tokens] == theirs.get(tokens)}
    if theirs.get("general.architecture") == "eagle3":
        width = theirs.get("eagle3.target_hidden_size")
        layers = theirs.get("eagle3.target_layers") or [0]
        rules |= {
            f"target states of width {width}": width == facts.hidden_size,
            f"target layers {layers}": 0 < max(layers) <= facts.num_hidden_layers,
        }
    for wrong, holds in rules.items():
        if not holds:
            raise ModelConfigError(
                f"drafter {drafter} is of another pair than {target}: it has {wrong}",
                hint="export the drafter again, with this --target",
            )
    return facts


def renamed(
    tensors: Mapping[str, Tensor], config: Any, num_layers: int
) -> Iterator[tuple[str, Tensor]]:
    """The tensors under the names of GGUF, queries and keys in its order of rotation."""
    gguf = package()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, num_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if (part := stem.rpartition(".")[2]) in heads:
            halves = tensor.view(heads[part], 2, -1, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        yield f"{OF_HEAD.get(stem) or names.get_name(stem)}.weight", tensor


def write_gguf(
    path: Path,
    arch: str,
    fields: Fields,
    tensors: Iterator[tuple[str, Tensor]],
    weights: GgufWeights,
    ids: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes or replaces a file. `ids` are integers, written as they are."""
    gguf = package()
    kinds, types = gguf.GGMLQuantizationType, gguf.GGUFValueType
    of_type = {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32, list: types.ARRAY}
    of_weights = {"float32": kinds.F32, "float16": kinds.F16, "q8_0": kinds.Q8_0}
    staged = beside(path)
    writer = gguf.GGUFWriter(staged, arch)
    for name, value in ({"general.name": path.stem} | fields).items():
        writer.add_key_value(name, value, of_type.get(type(value), types.STRING))
    for name, tensor in tensors:
        kind = of_weights[weights] if tensor.dim() > 1 else kinds.F32
        if kind == kinds.Q8_0 and tensor.shape[-1] % BLOCK:
            kind = kinds.F16
        rows = tensor.detach().float().contiguous().numpy()
        writer.add_tensor(name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    for name, values in (ids or {}).items():
        writer.add_tensor(name, values.numpy())
    try:
        with output_errors(path, "GGUF file"):
            with closing(writer):
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
            staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
