"""Trace sets of made-up prompts, at no cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specctl.collect.commits import Commit
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


def replaced(root: Path, table: str, change: Callable[[Path], None]) -> None:
    """The only commit's file of a table, changed under an honest digest."""
    [record] = root.glob("commits/*/00000001.json")
    value = json.loads(record.read_bytes())
    [segment] = [one for one in value["files"] if one["table"] == table]
    path = root / "data" / f"{table}-{segment['sha256'][7:]}.parquet"
    change(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.rename(path.with_name(f"{table}-{digest}.parquet"))
    size_bytes = path.with_name(f"{table}-{digest}.parquet").stat().st_size
    segment.update(sha256=f"sha256:{digest}", size_bytes=size_bytes)
    record.write_bytes(Commit.model_validate(value).sealed().to_bytes())
