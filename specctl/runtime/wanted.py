"""What a user wants a policy for, in the words of a command line."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from specctl.artifacts.compatibility import Wanted, words
from specctl.embedded import EMBEDDED, embedded_path
from specctl.errors import UsageError
from specctl.runtime.identity import tokenizer_digest, weights_digest
from specctl.runtime.pretrained import load_tokenizer

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def wanted_of(asked: Wanted) -> Wanted:
    """The same with the digests of the models that are on this machine.

    Args:
        asked: its `target` and `drafter` are a model's folder, `embedded`, or a hub id that is in
            the local cache, whose digests are then wanted; any other text is a name, or whole
            words of it. Its `dtype` may be a short name, e.g. bf16.

    Raises:
        ModelError: a folder without a model, or without its tokenizer.
        UsageError: a path that is no folder, a word without letters, or no dtype that we run.
    """
    words_asked = (asked.target, asked.drafter, asked.gpu, asked.workload)
    for option, word in zip(("--for", "--draft", "--gpu", "--workload"), words_asked, strict=True):
        _check_word(option, word)
    asked = replace(asked, dtype=_dtype(asked.dtype))
    target, drafter = _folder(asked.target, "target"), _folder(asked.drafter, "eagle3")
    if target is not None:
        tokenizer = tokenizer_digest(load_tokenizer(target))
        asked = replace(asked, target_digest=weights_digest(target), tokenizer_digest=tokenizer)
    if drafter is not None:
        asked = replace(asked, drafter_digest=weights_digest(drafter))
    return asked


def _check_word(option: str, word: str | None) -> None:
    if word is None or (words(word) and not _is_lost_path(word)):
        return
    is_path = _is_lost_path(word)
    raise UsageError(
        option,
        expected="a folder that is there, or a name"
        if is_path
        else "a word with letters or digits",
        found=f"no folder {word!r}" if is_path else repr(word),
        fix="correct it, or leave it out to have any",
    )


def _is_lost_path(word: str) -> bool:
    """Whether a text can only be meant as a folder, and is none."""
    return word.startswith(("/", ".", "~")) and not os.path.isdir(word)


def _dtype(name: str | None) -> str | None:
    """A dtype by its own name; what specctl never writes would differ from every artifact."""
    if name is None:
        return None
    from specctl.runtime.load import DTYPES  # here: it needs torch and transformers

    long = SHORT_DTYPES.get(name.casefold(), name.casefold())
    if long in DTYPES:
        return long
    raise UsageError(
        "--dtype",
        expected=f"one of {', '.join([*DTYPES, *SHORT_DTYPES])}",
        found=repr(name),
        fix="choose one",
    )


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
