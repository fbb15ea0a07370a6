"""How large a segment may become in memory: writers keep to it, and who reads strangers insists.

Bytes on disk say little. Runs and dictionaries hold millions of rows, or a long text for each of
them, in a few bytes that count as unpacked already. So what counts is rows by their width, texts
written out. Real rows expand 20 to 100 times, and rows that all repeat 250 times.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from specctl.trace import TABLES

if TYPE_CHECKING:
    import pyarrow as pa

MAX_EXPANDED_BYTES = 2 << 30
"""Of one segment: what a fit may have in memory twice."""
MAX_EXPANSION = 500
"""Expanded over packed bytes of a file, beyond what any file may have."""
FREE_BYTES = 64 << 20
MAX_TEXT_BYTES = 1024
"""Of one text: four times what a prompt file may call a prompt, as requests are called after it."""
_WIDTHS = {"dictionary": 4, "bool": 1, "int16": 2, "int32": 4, "float32": 4}


def expanded_limit(size_bytes: int) -> int:
    """What a file of so many bytes may expand to."""
    return min(MAX_EXPANDED_BYTES, FREE_BYTES + MAX_EXPANSION * size_bytes)


@cache
def row_bytes(table: str) -> int:
    """Width of a row without its texts."""
    return sum(_WIDTHS[column.dtype] for column in TABLES[table])


def text_bytes(rows: pa.Table | pa.RecordBatch) -> tuple[int, int]:
    """Bytes of the longest text that a row has or could have, and of all texts written out."""
    parts = [_text_bytes(chunk) for column in rows.columns for chunk in _chunks(column)]
    return max((longest for longest, _ in parts), default=0), sum(whole for _, whole in parts)


def _chunks(column: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    chunks: list[pa.Array] = getattr(column, "chunks", [column])
    return chunks


def _text_bytes(column: pa.Array) -> tuple[int, int]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return 0, 0
    lengths = pc.binary_length(column.dictionary)
    return pc.max(lengths).as_py() or 0, pc.sum(lengths.take(column.indices)).as_py() or 0
