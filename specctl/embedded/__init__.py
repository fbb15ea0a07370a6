"""The embedded pair: a tiny but real target with two drafters, shipped as package data.

It is a fixture for people and tests, never a claim about large models. `record.json` says how
it was made; `scripts/train_embedded_pair.py` trains another one like it.
"""

from __future__ import annotations

from pathlib import Path

from specctl.errors import UsageError

__all__ = ["EMBEDDED", "PROMPTS", "RECORD", "embedded_path", "name_of"]

_FOLDER = Path(__file__).parent
EMBEDDED = {name: _FOLDER / name for name in ("target", "eagle3", "small")}
PROMPTS = _FOLDER / "prompts.jsonl"
RECORD = _FOLDER / "record.json"


def embedded_path(name: str) -> Path:
    """The folder of `target`, `eagle3` or `small`, in the Hugging Face layout."""
    if name not in EMBEDDED:
        raise UsageError(
            f"embedded model: expected one of {', '.join(EMBEDDED)}, found {name!r}",
            hint="choose one of these, or give a folder or a model id",
        )
    return EMBEDDED[name]


def name_of(model: str) -> str:
    """A model as traces and artifacts name it: as it was given, or `embedded:NAME` where that is a
    folder of the pair, so that its figures say that they are a fixture's."""
    folder = Path(model).resolve()
    return next((f"embedded:{name}" for name, one in EMBEDDED.items() if one == folder), model)
