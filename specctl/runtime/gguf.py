"""GGUF files: their metadata by the `gguf` package, and the models that load from them.

transformers' reader turns weights into plain ones, and leaves out in silence what it has no place
for. Files with such parts are refused here.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specctl.errors import ModelConfigError, ModelError, reason_of

PARTS = {"token_embd", "output", "output_norm", "attn_norm", "attn_q", "attn_k", "attn_v"}
PARTS |= {"attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"}
"""Parts of a Llama model; each has the tensor `weight`."""
MORE_PARTS: dict[Any, set[str]] = {
    "llama": set(),
    "qwen2": {"attn_q.bias", "attn_k.bias", "attn_v.bias"},
    "qwen3": {"attn_q_norm.weight", "attn_k_norm.weight"},
}
"""Architectures that load, with the parts that a Llama model lacks."""
DIGITS = "smollm"
"""llama.cpp's name of byte-level BPE behind single digits, which transformers reads as GPT-2's."""
INSTALL = "pip install gguf accelerate"
INSTEAD = "give the model's folder or hub id"
Fields = dict[str, Any]


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def package() -> Any:
    """The `gguf` package; `ModelError` where it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise ModelError("GGUF files need the package gguf", hint=INSTALL) from error
    return gguf


def read_fields(path: Path) -> Fields:
    """The metadata of a GGUF file; `ModelError` if it cannot be read."""
    return _read(path)[0]


def _read(path: Path) -> tuple[Fields, tuple[str, ...]]:
    """The metadata, and the names of the tensors."""
    try:
        stat = os.stat(path)
        return _read_once(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {reason_of(error)}") from error
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # in words of numpy
        raise ModelError(
            f"{path} is no GGUF file, or cut off or damaged", hint="download or write it again"
        ) from error


@lru_cache(maxsize=2)
def _read_once(path: Path, *_: int) -> tuple[Fields, tuple[str, ...]]:
    """As `_read`; times and sizes tell versions of a file apart."""
    reader = package().GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, tuple(tensor.name for tensor in reader.tensors)


def check_loads(path: Path) -> None:
    """Rejects files that transformers' reader would load otherwise than llama.cpp.

    Raises:
        ModelConfigError: an architecture or a part that does not load. ModelError: no tokenizer, an
            unreadable file, or a missing package.
    """
    fields, tensors = _read(path)
    if find_spec("accelerate") is None:
        raise ModelError("GGUF models need the package accelerate", hint=INSTALL)
    arch = fields.get("general.architecture")
    if arch not in MORE_PARTS:
        raise ModelConfigError(
            f"{path} is of architecture {arch!r}, and GGUF models load of {', '.join(MORE_PARTS)}",
            hint=INSTEAD,
        )
    parts = {f"{name}.weight" for name in PARTS} | MORE_PARTS[arch]
    unread = [name for name in tensors if ".".join(name.split(".")[-2:]) not in parts]
    scaling = fields.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        unread.append(f"rotary scaling {scaling!r}")
    if unread:
        raise ModelConfigError(
            f"{path} has {unread[0]}, which transformers' GGUF reader leaves out",
            hint=INSTEAD,
        )
    if "tokenizer.ggml.tokens" not in fields:
        problem = f"{path} has no tokenizer: the field tokenizer.ggml.tokens is missing"
        raise ModelError(problem, hint="give a file with the model's tokenizer")


def tokenizer_of(path: Path) -> Any:
    """The tokenizer and chat template of a file; `ModelError` where transformers builds another."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import gguf_tokenizer_mapping as reader

    try:
        arch, fields, options = reader.get_gguf_tokenizer(str(path))
        whole = json.loads(reader.convert_gguf_tokenizer(arch, fields)[0].to_str())
        tokens, split = dict(enumerate(fields["tokens"])), fields.get("pre_tokenizer_type")
        known = {None, DIGITS, "gpt-2", "default", *reader.GGUF_PRE_TOKENIZER_SPLITS}
        if fields["tokenizer_type"] == "gpt2" and split not in known:
            raise ValueError(f"the pre-tokenizer {split!r} is unknown")
        # transformers adds tokens of its own, past the model's vocabulary
        whole["added_tokens"] = [one for one in whole["added_tokens"] if one["id"] in tokens]
        if split == DIGITS:
            digits = {"type": "Digits", "individual_digits": True}
            splits = [digits, whole["pre_tokenizer"]]
            whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": splits}
        backend, kinds = Tokenizer.from_str(json.dumps(whole)), package().TokenType
        for number, kind in enumerate(read_fields(path).get("tokenizer.ggml.token_type", [])):
            is_added = kind in (kinds.CONTROL, kinds.USER_DEFINED)
            if is_added and backend.token_to_id(tokens[number]) != number:
                raise ValueError(f"the token {tokens[number]!r} is lost")
    except Exception as error:  # the file's lists may be anything
        why = str(error) or type(error).__name__
        problem = f"{path} has a tokenizer that transformers cannot read: {why}"
        raise ModelError(problem, hint=INSTEAD) from error
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
