"""The nodes table of one commit, front to back, as numpy arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specctl.errors import TraceCorruptError
from specctl.parquet import read_batches


class NodeReader:
    """The columns of a nodes file as numpy arrays, a given number of rows at a time."""

    def __init__(self, path: Path, columns: tuple[str, ...], batch_rows: int) -> None:
        self.path, self._columns = path, columns
        self._batches = map(self._arrays, read_batches(path, columns, batch_rows))
        self._held: list[dict[str, Any]] = []

    def take(self, num_rows: int) -> dict[str, Any]:
        """The next rows.

        Raises:
            TraceCorruptError: the file has fewer.
        """
        while (have := sum(len(part["parent_idx"]) for part in self._held)) < num_rows:
            part = next(self._batches, None)
            if part is None:
                raise self._wrong_length(f"{num_rows - have} fewer")
            self._held.append(part)
        whole = {name: _joined([p[name] for p in self._held]) for name in self._columns}
        self._held = [{name: values[num_rows:] for name, values in whole.items()}]
        # Copied: Arrow's buffers are read-only, and torch shares only what may be written to.
        return {name: values[:num_rows].copy() for name, values in whole.items()}

    def check_end(self) -> None:
        """Refuses rows that no round accounts for."""
        if any(len(part["parent_idx"]) for part in self._held) or next(self._batches, None):
            raise self._wrong_length("more")

    def _arrays(self, batch: Any) -> dict[str, Any]:
        import pyarrow.compute as pc

        columns = {name: batch.column(name) for name in self._columns}
        # Null means that the text ended first: nothing there is emitted, so it accepts nothing.
        columns["path_accepted"] = pc.fill_null(columns["path_accepted"], fill_value=False)
        return {name: c.to_numpy(zero_copy_only=False) for name, c in columns.items()}

    def _wrong_length(self, found: str) -> TraceCorruptError:
        return TraceCorruptError(
            str(self.path),
            expected="as many rows as the rounds table accounts for",
            found=found,
            fix="collect them again",
        )


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
