"""Trace sets of made-up prompts, at no cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.collect.places import open_place
from specctl.collect.store import TraceWriter
from tests.collect.rounds import header
from tests.collect.small_rows import tables_of


def collect(root: Path, *groups: str, empty: str = "") -> Path:
    """One commit a group of prompts; those of `empty` have no rows."""
    with TraceWriter.open(root, header(), resume=True) as writer:
        for group in groups:
            with_rows = [prompt for prompt in group if prompt not in empty]
            writer.commit(group, tables_of(with_rows) if with_rows else {})
    return root


def again(root: Path, *prompts: str, made: dict[str, Any] | None = None) -> None:
    """Commits prompts as a writer would that does not know of the others."""
    with TraceWriter.named(open_place(root), "another", allow_repeats=True) as writer:
        writer.committed.clear()
        writer.commit(prompts, tables_of(prompts) if made is None else made)
