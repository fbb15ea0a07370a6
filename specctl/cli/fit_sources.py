"""The traces of a fit: opened, and frozen so that the rows that the artifact names stay known."""

from __future__ import annotations

from typing import Any


def open_to_fit(traces: list[str]) -> Any:
    """The `TraceSet`, a snapshot of which is stored in each of its sets.

    A fit may read a set that it cannot write. It goes on and says so.
    """
    from specctl import console
    from specctl.collect.rewriting import take_snapshot
    from specctl.errors import StoreError
    from specctl.logs.trace_set import TraceSet

    opened = TraceSet.open(*traces)
    for part in opened.parts:
        try:
            take_snapshot(part)
        except StoreError as error:
            console.warn(
                f"no snapshot was stored, so the rows of this fit cannot be named once others are "
                f"written; run `specctl traces snapshot {part.place.name}` as its owner ({error})"
            )
    return opened
