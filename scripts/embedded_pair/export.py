"""Writes the trained models as package data: bf16 safetensors in the Hugging Face layout."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .corpus import stdlib_files

LIMIT_BYTES = 20_000_000
FOLDERS = ("target", "eagle3", "small")


def write_model(model: LlamaForCausalLM, folder: Path) -> None:
    """`config.json`, `generation_config.json` and `model.safetensors` in bf16."""
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.generation_config.bos_token_id = model.config.bos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id
    model.to(torch.bfloat16).save_pretrained(folder)


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The tokenizer, its configuration in the form that older transformers read too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    kept = {
        k: v
        for k, v in config.items()
        if k not in ("backend", "is_local", "local_files_only", "extra_special_tokens")
    }
    kept |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": config["extra_special_tokens"],
    }
    kept |= {"chat_template": tokenizer.chat_template}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def copy_pair(work_dir: Path, out: Path) -> int:
    """Replaces the package's three folders and returns their size in bytes."""
    for name in FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir(parents=True)
        for file in sorted((work_dir / "export" / name).iterdir()):
            shutil.copyfile(file, out / name / file.name)
    total_bytes = sum(f.stat().st_size for n in FOLDERS for f in (out / n).iterdir())
    if total_bytes > LIMIT_BYTES:
        raise ValueError(f"the pair has {total_bytes} bytes, more than {LIMIT_BYTES}")
    return total_bytes


def file_digest(path: Path) -> str:
    """`sha256:<hex>` of a file."""
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def source_records(texts: list[Path]) -> list[dict[str, Any]]:
    """What the corpus was read from, with digests and sizes."""
    files = stdlib_files()
    joined = hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()
    size = sum(p.stat().st_size for p in files)
    stdlib = {
        "name": f"CPython {platform.python_version()} standard library",
        "num_files": len(files),
        "size_bytes": size,
        "digest": f"sha256:{joined}",
    }
    given = [
        {"name": p.name, "size_bytes": p.stat().st_size, "digest": file_digest(p)}
        for p in texts
        if p.is_file()
    ]
    generated = {"name": "arithmetic, string and chat generators of scripts/embedded_pair"}
    return [stdlib, *given, generated]


def versions() -> dict[str, str]:
    """Versions of what did the work."""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "machine": platform.machine(),
    }


def write_record(out: Path, record: dict[str, Any]) -> None:
    """`record.json` beside the weights."""
    (out / "record.json").write_text(
        json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
