"""Identity of models and tokenizers: what fingerprints of traces and artifacts are made of."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from specctl.errors import ModelError

_FULL_LIMIT_BYTES = 256 * 2**20
_SAMPLED_BLOCKS, _BLOCK_BYTES = 256, 64 * 2**10


def weights_digest(folder: Path) -> str:
    """`sha256:<hex>` of a checkpoint: its config and its weight files.

    Files up to 256 MiB are read whole. Of larger ones the size, the header and 256 evenly
    spread blocks of 64 KiB are read: seconds instead of minutes, and any retraining changes
    practically every block.

    Raises:
        ModelError: no config or no weights in the folder.
    """
    config, files = folder / "config.json", weight_files(folder)
    if not config.is_file() or not files:
        raise ModelError(
            f"model folder {folder}",
            expected="config.json, and .safetensors files or pytorch_model.bin",
            found=", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "an empty folder",
            fix="save the model with save_pretrained",
        )
    digest = hashlib.sha256(_canonical_config(config))
    for path in files:
        digest.update(path.name.encode())
        digest.update(_file_digest(path))
    return f"sha256:{digest.hexdigest()}"


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint: safetensors, or torch's own where there are none."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def config_digest(folder: Path) -> str:
    """`sha256:<hex>` of a checkpoint's config alone: the same for two trainings of one shape.

    Raises:
        ModelError: no config that can be read.
    """
    return "sha256:" + hashlib.sha256(_canonical_config(folder / "config.json")).hexdigest()


def hub_revision(folder: Path) -> str | None:
    """The hub's commit of a checkpoint in its cache (`snapshots/<commit>`); None elsewhere."""
    place = folder.absolute()
    is_snapshot = place.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", place.name)
    return place.name if is_snapshot else None


def tokenizer_digest(tokenizer: Any) -> str:
    """`sha256:<hex>` of all that maps text to ids; the chat template is not part of it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        described: Any = sorted(tokenizer.get_vocab().items())
    else:
        described = json.loads(backend.to_str())
        for volatile in ("truncation", "padding"):
            described.pop(volatile, None)
    text = json.dumps(described, sort_keys=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _canonical_config(path: Path) -> bytes:
    """The config without what loading rewrites."""
    config = read_config(path)
    kept = {k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version")}
    return json.dumps(kept, sort_keys=True).encode()


def read_config(path: Path) -> dict[str, Any]:
    """A model's `config.json`.

    Raises:
        ModelError: not readable, or not a JSON object.
    """
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _bad_config(path, str(error)) from error
    if not isinstance(config, dict):
        raise _bad_config(path, type(config).__name__)
    return config


def _bad_config(path: Path, found: str) -> ModelError:
    return ModelError(str(path), expected="a JSON object", found=found, fix="restore the file")


def _file_digest(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _FULL_LIMIT_BYTES:
            digest.update(file.read())
        else:
            for block in range(_SAMPLED_BLOCKS):
                file.seek(block * (size - _BLOCK_BYTES) // (_SAMPLED_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.digest()
