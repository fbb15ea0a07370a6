"""Peak memory of the verbs that read trace sets, against the number of rows.

    python benchmarks/bench_memory.py grow SOURCE OUT --num-nodes 1e8

`grow` repeats the segments of a real set under new prompt ids, through the project's own writer,
until there are so many node rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from specctl.collect.trace_writer import TraceWriter
from specctl.logs.trace_set import read_listing


def grow(source: Path, out: Path, num_nodes: int) -> int:
    """Writes a set of the rows of another, over and over, every time of other prompts.

    Returns:
        The number of node rows, `num_nodes` at least.
    """
    listing, written, turn = read_listing(source, verify=False), 0, 0
    with TraceWriter.open(out, listing.header) as writer:
        while written < num_nodes:
            for segment in listing.segments:
                tables = {
                    name: renamed(table, f"{turn}:")
                    for name, table in listing.tables(segment).items()
                }
                writer.commit([f"{turn}:{prompt}" for prompt in segment.prompt_ids], tables)
                written += tables["nodes"].num_rows
                if written >= num_nodes:
                    break
            turn += 1
    return written


def renamed(table: Any, prefix: str) -> Any:
    """A table with other prompt and request ids."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in ("prompt_id", "request_id"):
        if name in table.column_names:
            column = table[name].combine_chunks()
            if isinstance(column, pa.ChunkedArray):
                column = column.chunk(0)
            names = pc.binary_join_element_wise(prefix, column.dictionary.cast("string"), "")
            fresh = pa.DictionaryArray.from_arrays(column.indices, names)
            table = table.set_column(table.schema.get_field_index(name), name, fresh)
    return table


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("source", type=Path)
    options.add_argument("out", type=Path)
    options.add_argument("--num-nodes", type=float)
    given = options.parse_args()
    print(grow(given.source, given.out, int(given.num_nodes)))


if __name__ == "__main__":
    main()
