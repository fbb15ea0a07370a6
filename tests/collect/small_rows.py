"""Rows of made-up prompts at no cost: one prompt's tables under other names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from specctl.trace import TABLES, arrow_schema

GOLDEN = Path(__file__).parents[1] / "golden" / "traces-v1" / "data"
NUM_ROUNDS, NUM_NODES = 2, 2 * 22
"""Of each prompt."""


@cache
def _pattern() -> dict[str, Any]:
    """Read from a golden set, so that a process that is about to die need not load torch."""
    import pyarrow.parquet as pq

    found = {}
    for name in TABLES:
        [path] = GOLDEN.glob(f"{name}-*")
        rows = pq.ParquetFile(path).read(use_threads=False).cast(arrow_schema(name))
        found[name] = rows.slice(0, NUM_ROUNDS if name == "rounds" else NUM_NODES)
    return found


def tables_of(prompts: Sequence[str]) -> dict[str, Any]:
    """`rounds` and `nodes` of some prompts, all with the same values."""
    import pyarrow as pa

    parts = {name: [_named(name, prompt) for prompt in prompts] for name in TABLES}
    return {
        name: pa.concat_tables(part).unify_dictionaries().cast(arrow_schema(name))
        for name, part in parts.items()
    }


def _named(table: str, prompt: str) -> Any:
    import pyarrow as pa

    rows = _pattern()[table]
    for column, text in (("request_id", f"{prompt}/0"), ("prompt_id", prompt)):
        index = rows.schema.get_field_index(column)
        if index >= 0:
            same = pa.DictionaryArray.from_arrays(pa.array([0] * len(rows), pa.int32()), [text])
            rows = rows.set_column(index, rows.schema.field(index), same)
    return rows
