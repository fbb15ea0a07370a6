"""Trace sets of made-up prompts: written, read, compared and damaged."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.collect.rows import join, round_tables
from specctl.collect.trace_writer import TraceWriter
from specctl.logs.trace_files import RECORD_KEY, Segment, SegmentRecord
from specctl.logs.trace_set import TraceSet, read_listing
from specctl.trace import TABLES, arrow_schema
from tests.collect.rounds import frame_of, header, random_record

NUM_ROUNDS, NUM_NODES = 2, 2 * 22
"""Of each prompt of `tables_of`."""


def sorted_rows(out: str | Path, table: str) -> pl.DataFrame:
    """Rows of a set, without timings, which differ from run to run."""
    frame = TraceSet.open(out).scan(table).collect()
    frame = frame.drop([name for name in frame.columns if name.endswith("_us")])
    return frame.sort([n for n in ("request_id", "round_idx", "node_idx") if n in frame.columns])


def rows_of(*prompt_ids: str, rounds: int = NUM_ROUNDS) -> dict[str, pa.Table]:
    """Rounds at random, through the code of the recorder."""
    frames = [
        frame_of(random_record([prompt], step)) for prompt in prompt_ids for step in range(rounds)
    ]
    return round_tables(join(frames))


@cache
def _pattern(rounds: int) -> dict[str, pa.Table]:
    return rows_of("p", rounds=rounds)


def tables_of(prompts: Sequence[str], rounds: int = NUM_ROUNDS) -> dict[str, pa.Table]:
    """Both tables of some prompts, all with the same values, at no cost."""
    parts = {name: [_named(name, prompt, rounds) for prompt in prompts] for name in TABLES}
    return {
        name: pa.concat_tables(part).unify_dictionaries().cast(arrow_schema(name))
        for name, part in parts.items()
    }


def _named(table: str, prompt: str, rounds: int) -> pa.Table:
    rows = _pattern(rounds)[table]
    for column, text in (("request_id", f"{prompt}/0"), ("prompt_id", prompt)):
        index = rows.schema.get_field_index(column)
        if index >= 0:
            same = pa.DictionaryArray.from_arrays(pa.array([0] * len(rows), pa.int32()), [text])
            rows = rows.set_column(index, rows.schema.field(index), same)
    return rows


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TraceWriter]:
    with TraceWriter.open(tmp_path / "traces", header()) as opened:
        yield opened


def collect(root: Path | str, *groups: Sequence[str], **changes: Any) -> Any:
    """A set with one segment more for each group of prompts."""
    with TraceWriter.open(root, header(**changes), resume=True) as opened:
        for group in groups:
            opened.commit(group, tables_of(group))
    return root


def again(root: Path | str, *prompts: str, rounds: int = NUM_ROUNDS) -> Segment:
    """Publishes prompts as a writer that does not know of the others."""
    with TraceWriter.open(root, header(), resume=True) as opened:
        opened.finished.clear()
        return opened.commit(prompts, rows_of(*prompts, rounds=rounds))


def files_of(root: Path) -> dict[str, Path]:
    """Of the first segment: the path of each table."""
    listing = read_listing(root, verify=False)
    return listing.paths(listing.segments[0])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 1
    path.write_bytes(content)


def honest(path: Path, record: SegmentRecord | None = None) -> Path:
    """Gives a rounds file that was changed the name of its bytes.

    Args:
        record: another one for its footer; the rows are then written anew.
    """
    if record is not None:
        rows = pq.ParquetFile(path).read()
        metadata = {**(rows.schema.metadata or {}), RECORD_KEY: record.to_bytes()}
        pq.write_table(rows.replace_schema_metadata(metadata), path)
    name = path.name.split("-")[0] + "-" + hashlib.sha256(path.read_bytes()).hexdigest()
    return path.rename(path.with_name(f"{name}.parquet"))


def replaced(root: Path, table: str, change: Callable[[Path], None]) -> None:
    """Changes a file of the only segment under honest digests; its record stays the same."""
    [segment] = read_listing(root, verify=False).segments
    paths = files_of(root)
    change(paths[table])
    record = segment.record
    if table == "nodes":
        assert record.nodes is not None
        content = paths["nodes"].read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        told = {"sha256": f"sha256:{sha256}", "size_bytes": len(content)}
        record = record.model_copy(update={"nodes": record.nodes.model_copy(update=told)})
        paths["nodes"].rename(paths["nodes"].with_name(f"{sha256}.parquet"))
    kept = (pq.read_metadata(paths["rounds"]).metadata or {}).get(RECORD_KEY) == record.to_bytes()
    honest(paths["rounds"], None if kept else record)


def rows(name: str | Path) -> dict[str, pl.DataFrame]:
    """Both tables as plain values, in the order of their keys."""
    texts = pl.col(pl.Categorical).cast(pl.String)
    traces = TraceSet.open(name)
    return {
        table: traces.scan(table)
        .with_columns(texts)
        .collect()
        .sort("request_id", "round_idx", maintain_order=True)
        for table in TABLES
    }


def equal(one: dict[str, pl.DataFrame], two: dict[str, pl.DataFrame]) -> bool:
    return all(one[table].equals(two[table]) for table in TABLES)
