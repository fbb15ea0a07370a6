"""The trained pair as package data (bf16 safetensors, Hugging Face layout), and its record."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specctl.answers import is_correct
from specctl.runtime.api import Decoder

from .corpus import stdlib_files

MAX_NEW_TOKENS = 128


def write_model(model: LlamaForCausalLM, folder: Path) -> None:
    """`config.json`, `generation_config.json` and `model.safetensors` in bf16."""
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, getattr(model.config, name))
    model.to(torch.bfloat16).save_pretrained(folder)


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The tokenizer, its configuration in the form that older transformers read too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for name in ("backend", "is_local", "local_files_only"):
        config.pop(name, None)
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": config.pop("extra_special_tokens"),
        "chat_template": tokenizer.chat_template,
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def evaluate(target: Path, drafter: Path, prompts: Path) -> dict[str, dict[str, float]]:
    """By category and over all: prompts, tokens, mean acceptance length and right answers.

    As a user would have them: specctl's own runtime, greedy, 48 nodes in 6 levels.
    """
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    asked = [
        r["prompt"] if r.get("raw") else [{"role": "user", "content": r["prompt"]}] for r in rows
    ]
    decoder = Decoder.from_pretrained(str(target), str(drafter), dtype="float32", batch_size=16)
    groups: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for row, done in zip(rows, decoder.generate(asked, max_new_tokens=MAX_NEW_TOKENS), strict=True):
        for name in (row["category"], "all"):
            groups[name].append((row.get("answer"), done))
    return {name: _summary(found) for name, found in sorted(groups.items())}


def _summary(found: list[tuple[Any, Any]]) -> dict[str, float]:
    accepted, calls = (
        sum(getattr(done.metrics, name) for _, done in found) for name in ("num_accepted", "calls")
    )
    right = [is_correct(done.text, answer) for answer, done in found if answer]
    return {
        "num_prompts": len(found),
        "num_tokens": sum(len(done.token_ids) for _, done in found),
        "mean_acceptance_length": round(1 + accepted / calls, 3),
        **({"exact_match_frac": round(sum(right) / len(right), 3)} if right else {}),
    }


def source_records(texts: list[Path]) -> list[dict[str, Any]]:
    """What the corpus was read from, with digests and sizes."""
    stdlib = f"CPython {platform.python_version()} standard library"
    sources = {stdlib: stdlib_files(), **{p.name: [p] for p in texts if p.is_file()}}
    generated = {"name": "arithmetic, string and chat generators of scripts/embedded_pair"}
    return [*(_source(name, files) for name, files in sources.items()), generated]


def _source(name: str, files: list[Path]) -> dict[str, Any]:
    data = b"".join(file.read_bytes() for file in files)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    return {"name": name, "num_files": len(files), "size_bytes": len(data), "digest": digest}


def versions() -> dict[str, str]:
    """Versions of what did the work."""
    modules = {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)}
    return {"python": sys.version.split()[0], "machine": platform.machine(), **modules}
