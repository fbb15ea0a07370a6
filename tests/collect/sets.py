"""Trace sets of a few prompts: written, read, compared and damaged."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from specctl import durable
from specctl.collect.commits import Segment
from specctl.collect.formats import Prompt
from specctl.collect.frames import join
from specctl.collect.header import TraceHeader
from specctl.collect.logs import read_commits
from specctl.collect.reader import TraceSet
from specctl.collect.rows import to_tables
from specctl.collect.store import TraceWriter
from specctl.policy.parse import canonical_json
from tests.collect.rounds import frame_of, header, random_record


def rows_of(*prompt_ids: str, rounds: int = 2) -> dict[str, pa.Table]:
    frames = [
        frame_of(random_record([prompt], step)) for prompt in prompt_ids for step in range(rounds)
    ]
    return to_tables(join(frames))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TraceWriter]:
    with TraceWriter.open(tmp_path / "traces", header()) as opened:
        yield opened


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str, fail_at: int | None) -> list[int]:
    """Counts `os.<name>`; the `fail_at`-th call, from 0, fails."""
    real, seen = getattr(os, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if seen[0] - 1 == fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **kwargs)

    monkeypatch.setattr(durable.os, name, wrapped)
    return seen


def collect(root: Path, *groups: str, made: TraceHeader | None = None) -> Path:
    """A folder with one commit for each group of one-letter prompts."""
    with TraceWriter.open(root, made or header()) as writer:
        for group in groups:
            writer.commit(group, rows_of(*group))
    return root


def segments(root: Path) -> list[Segment]:
    return list(read_commits(root).segments)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 1
    path.write_bytes(content)


def edit(path: Path, **changes: Any) -> None:
    """Other fields in a record, with a digest that is right."""
    value = json.loads(path.read_text()) | changes
    value.pop("body_digest", None)
    digest = hashlib.sha256(canonical_json(value).encode()).hexdigest()
    path.write_text(canonical_json(value | {"body_digest": f"sha256:{digest}"}))


def rows(name: str | Path) -> dict[str, pl.DataFrame]:
    """Both tables as plain values, in the order of the set."""
    texts = pl.col(pl.Categorical).cast(pl.String)
    traces = TraceSet.open(name)
    return {
        table: traces.scan(table).with_columns(texts).collect() for table in ("rounds", "nodes")
    }


def equal(one: dict[str, pl.DataFrame], two: dict[str, pl.DataFrame]) -> bool:
    key = ["request_id", "round_idx"]
    one, two = (
        {table: rows.sort(key, maintain_order=True) for table, rows in side.items()}
        for side in (one, two)
    )
    return all(one[table].equals(two[table]) for table in one)


PROMPTS = [Prompt(name, "", (f"Say {name}.",)) for name in "abc"]
