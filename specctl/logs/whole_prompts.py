"""Rows that count, where a segment holds more than those: repeats, and prompts that span segments.

    segment 1   p p q        p, q open                      ─►  nothing
    segment 2   q p q        p finished, q open             ─►  p p p
    segment 3   q            q finished                     ─►  q q q q

A prompt counts at the segment that finishes it, with the rows of its earlier segments in front, so
that whoever reads rows sees whole prompts. The set is read once, front to back; in memory are the
rows of prompts that are open at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from specctl.logs.parquet import Tables, drop_prompts, join_tables, keep_prompts
from specctl.logs.trace_files import Segment

if TYPE_CHECKING:
    import pyarrow as pa


def counted_tables(
    segments: Sequence[Segment],
    read: Callable[[Segment], Tables],
    unfinished: Collection[str] = (),
) -> Iterator[tuple[Segment, Tables | None]]:
    """Segment by segment, the rows that count there; None where these are all rows of its files.

    Args:
        segments: of one set, in order, as `count_once` marks them.
        read: gives all rows of a segment. It is called where these are not what counts.
        unfinished: prompts that no segment finishes; their rows come with the last segment.
    """
    awaited = {p for one in segments for p in one.prompt_ids if p in one.record.num_earlier}
    awaited.update(unfinished)
    held: Tables = {}
    held_ids: set[str] = set()
    for segment in segments:
        record, ready = segment.record, set(segment.prompt_ids)
        if not (record.open_ids or record.num_earlier or segment.repeats):
            yield segment, None
            continue
        held_ids |= awaited.intersection(record.open_ids)
        if ready or held_ids.intersection(record.open_ids):
            tables = join_tables([held, read(segment)])
            named = held_ids.union(record.prompt_ids, record.open_ids)
            awaited -= ready
            held_ids -= ready
            held = keep_prompts(tables, held_ids)
            # What no record names stays, for the checks of rows to find.
            yield segment, request_by_request(drop_prompts(tables, named - ready))
    if held_ids:
        yield segments[-1], request_by_request(held)


def batched(parts: Iterable[Tables], num_rows: int = 1 << 20) -> Iterator[list[Tables]]:
    """Tables in turn, some at a time, with so many rows together or at the end fewer."""
    batch: list[Tables] = []
    for part in parts:
        batch.append(part)
        if sum(len(rows) for tables in batch for rows in tables.values()) >= num_rows:
            yield batch
            batch = []
    if batch:
        yield batch


def request_by_request(tables: Tables) -> Tables:
    """Rows of each request together, in order of `round_idx`; nodes in the order of their rounds.

    Requests stay in the order in which their first rounds stand.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if "rounds" not in tables:
        return tables
    requests = tables["rounds"]["request_id"].cast(pa.string()).unique()

    def ordered(rows: pa.Table) -> pa.Table:
        place = pc.index_in(rows["request_id"].cast(pa.string()), requests)
        order = np.lexsort((rows["round_idx"].to_numpy(), pc.fill_null(place, -1).to_numpy()))
        return rows.take(pa.array(order))

    return {table: ordered(rows) for table, rows in tables.items()}
