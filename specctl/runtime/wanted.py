"""What a user wants a policy for, in the words of a command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specctl.artifacts.lookup import Wanted
from specctl.embedded import EMBEDDED, embedded_path
from specctl.runtime.identity import tokenizer_digest, weights_digest


def wanted_of(target: str | None, drafter: str | None, **more: Any) -> Wanted:
    """What to look for.

    Args:
        target, drafter: a model's folder, `embedded`, or a hub id that is in the local cache, whose
            digests are then wanted; any other text is a part of its name.
        more: other fields of `Wanted`.

    Raises:
        ModelError: a folder without a model.
    """
    digests: dict[str, str] = {}
    target_folder = _folder(target, "target")
    if target_folder is not None:
        digests["target_digest"] = weights_digest(target_folder)
        digests["tokenizer_digest"] = _tokenizer_digest(target_folder)
    drafter_folder = _folder(drafter, "eagle3")
    if drafter_folder is not None:
        digests["drafter_digest"] = weights_digest(drafter_folder)
    return Wanted(target=target, drafter=drafter, **digests, **more)


def _folder(name: str | None, embedded_default: str) -> Path | None:
    """Where a model is on this machine; nothing is downloaded for a question."""
    if name is None or os.path.isdir(name):
        return None if name is None else Path(name)
    kind, _, part = name.partition(":")
    if kind == "embedded" and (not part or part in EMBEDDED):
        return embedded_path(part or embedded_default)
    return _cached(name)


def _cached(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None  # not a model here: the text is a part of a name


def _tokenizer_digest(folder: Path) -> str:
    from transformers import AutoTokenizer

    return tokenizer_digest(AutoTokenizer.from_pretrained(folder, local_files_only=True))
