"""The files of a trace set as columns: the one place where a log touches Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specctl.errors import TraceCorruptError, TraceEmptyError
from specctl.logs.parquet import read_batches, read_columns
from specctl.logs.trace_set import TraceSet

UNKNOWN = -1
"""Stands for null in columns of truth values."""


class SegmentFiles(NamedTuple):
    """Two tables of the same rounds, in the same order."""

    rounds: Path
    nodes: Path


def segment_files(traces: TraceSet) -> tuple[SegmentFiles, ...]:
    """The files of a trace set, in the order in which they are read.

    Raises:
        TraceEmptyError: there are none.
    """
    files = tuple(SegmentFiles(f["rounds"], f["nodes"]) for f in traces.segment_files())
    if not files:
        raise TraceEmptyError(
            "traces", expected="rounds or positions", found="none", fix="collect some prompts"
        )
    return files


def round_columns(files: SegmentFiles, columns: Sequence[str]) -> Any:
    """Columns of the `rounds` table, as a `pyarrow.Table`."""
    return read_columns(files.rounds, columns)


class NodeColumns:
    """Columns of the `nodes` table as numpy arrays, front to back, some rows at a time.

    Truth values become int8: 1, 0 and `UNKNOWN` for null.
    """

    def __init__(self, files: SegmentFiles, columns: tuple[str, ...], batch_rows: int) -> None:
        self.path, self._columns = files.nodes, columns
        self._batches = map(self._arrays, read_batches(files.nodes, columns, batch_rows))
        self._held: list[dict[str, Any]] = []

    def take(self, num_rows: int) -> dict[str, Any]:
        """The next rows.

        Raises:
            TraceCorruptError: the file has fewer.
        """
        while (have := sum(map(_length, self._held))) < num_rows:
            part = next(self._batches, None)
            if part is None:
                raise self.corrupt(_AS_MANY_ROWS, f"{num_rows - have} fewer")
            self._held.append(part)
        whole = {name: _joined([p[name] for p in self._held]) for name in self._columns}
        self._held = [{name: values[num_rows:] for name, values in whole.items()}]
        # Copied: Arrow's buffers are read-only, and torch shares only what may be written to.
        return {name: values[:num_rows].copy() for name, values in whole.items()}

    def check_end(self) -> None:
        """Refuses rows that no round accounts for."""
        if any(map(_length, self._held)) or next(self._batches, None):
            raise self.corrupt(_AS_MANY_ROWS, "more")

    def corrupt(self, expected: str, found: str) -> TraceCorruptError:
        """The error for this file."""
        return TraceCorruptError(
            str(self.path), expected=expected, found=found, fix="collect them again"
        )

    def _arrays(self, batch: Any) -> dict[str, Any]:
        return {name: _array(batch.column(name)) for name in self._columns}


_AS_MANY_ROWS = "as many rows as the rounds table accounts for"


def _array(column: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_boolean(column.type):
        return column.to_numpy(zero_copy_only=False)
    if column.null_count:
        return pc.fill_null(column.cast("int8"), UNKNOWN).to_numpy(zero_copy_only=False)
    return column.to_numpy(zero_copy_only=False).view(np.int8)


def _length(part: dict[str, Any]) -> int:
    return len(next(iter(part.values())))


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def coded(column: Any) -> tuple[np.ndarray, tuple[str, ...]]:
    """A column of names as int32 codes, and the names in their order of appearance."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    found = column.dictionary_encode()
    return found.indices.to_numpy().astype(np.int32), tuple(found.dictionary.to_pylist())
