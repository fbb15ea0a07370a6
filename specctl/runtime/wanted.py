"""What a user wants a policy for, in the words of a command line."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from specctl.artifacts.lookup import Wanted
from specctl.embedded import EMBEDDED, embedded_path
from specctl.runtime.identity import tokenizer_digest, weights_digest
from specctl.runtime.pretrained import load_tokenizer


def wanted_of(asked: Wanted) -> Wanted:
    """The same with the digests of the models that are on this machine.

    Args:
        asked: its `target` and `drafter` are a model's folder, `embedded`, or a hub id that is in
            the local cache, whose digests are then wanted; any other text is a part of a name.

    Raises:
        ModelError: a folder without a model, or without its tokenizer.
    """
    target, drafter = _folder(asked.target, "target"), _folder(asked.drafter, "eagle3")
    if target is not None:
        tokenizer = tokenizer_digest(load_tokenizer(target))
        asked = replace(asked, target_digest=weights_digest(target), tokenizer_digest=tokenizer)
    if drafter is not None:
        asked = replace(asked, drafter_digest=weights_digest(drafter))
    return asked


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
