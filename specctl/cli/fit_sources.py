"""The traces of a fit: opened, and frozen so that what the artifact names stays readable."""

from __future__ import annotations

from typing import Any


def open_to_fit(traces: list[str]) -> Any:
    """The `TraceSet`, a snapshot of which is stored in each of its sets.

    A fit may read a set that it cannot write. It goes on and says so: the rows are what they
    are, but a later compaction may remove their files.
    """
    from specctl import console
    from specctl.collect.reader import TraceSet
    from specctl.collect.snapshots import take_snapshot
    from specctl.errors import StoreError

    opened = TraceSet.open(*traces)
    for log in opened.logs:
        try:
            take_snapshot(log)
        except StoreError as error:
            console.warn(
                f"no snapshot was stored, so later compactions may remove what this fit "
                f"reads; run `specctl traces snapshot {log.place.name}` as its owner ({error})"
            )
    return opened
