"""Rows that count: of each prompt those of one writer, all of them.

    segment 1   p p q        p, q open                      ─►  nothing
    segment 2   q p q        p finished, q open             ─►  p p p
    segment 3   q            q finished                     ─►  q q q q

A prompt counts at the segment that finishes it, with the rows of its earlier segments in front, so
that whoever reads rows sees whole prompts. A prompt that two writers finished counts at the segment
whose name comes first, so every reader of the same files decides alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specctl.errors import TraceCorruptError
from specctl.formatting import count
from specctl.logs.parquet import Tables, drop_prompts, join_tables, keep_prompts
from specctl.logs.trace_files import Place, Segment

if TYPE_CHECKING:
    import pyarrow as pa


def count_once(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Segments of a set in order, each with the prompts marked that do not count there.

    Those are repeats, which an earlier segment has finished too, and broken ones: earlier segments
    with their rows are missing, or are of two writers, so that nobody knows whose they are.
    """
    seen: set[str] = set()
    num_open, broken = Counter[str](), set[str]()
    counted = []
    for segment in sorted(segments, key=lambda one: one.name):
        record, prompts = segment.record, set(segment.record.prompt_ids)
        spanning = {*record.num_earlier, *record.open_ids} - seen
        broken |= {p for p in spanning if record.num_earlier.get(p, 0) != num_open[p]}
        here = frozenset(spanning & broken)
        counted.append(replace(segment, repeats=frozenset(prompts & seen), broken=here))
        num_open.update(spanning - prompts)
        seen |= prompts - here
    return tuple(counted)


def lost_rows(place: Place, segments: Sequence[Segment]) -> Iterator[tuple[str, TraceCorruptError]]:
    """The segments, by key, at which prompts are found to be broken, with the refusal of each.

    Args:
        segments: as `count_once` gives them.
    """
    told: set[str] = set()
    for idx, segment in enumerate(segments):
        new = sorted(segment.broken - told)
        told.update(new)
        if not new:
            continue
        stated = segment.record.num_earlier.get(new[0], 0)
        found = sum(new[0] in one.record.open_ids for one in segments[:idx])
        fix = "restore the one that is missing, or read the rest with --skip-damaged"
        if found > stated:
            fix = "give requests ids of their own, or each writer a set of its own"
        others = f" (and {count(len(new) - 1, 'more prompt')})" if new[1:] else ""
        error = TraceCorruptError(
            f"{place.at(segment.key)}, prompt {new[0]!r}{others}",
            expected=f"{count(stated, 'earlier segment')} with its rows",
            found=f"{found}",
            fix=fix,
        )
        yield segment.key, error


def counted_tables(
    segments: Sequence[Segment],
    read: Callable[[Segment], Tables],
    unfinished: Collection[str] = (),
) -> Iterator[tuple[Segment, Tables | None]]:
    """Segment by segment, the rows that count there; None where these are all rows of its files.

    The set is read once, front to back; in memory are the rows of prompts that are then open.

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


def batches(parts: Iterable[Tables], num_rows: int = 1 << 20) -> Iterator[list[Tables]]:
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
