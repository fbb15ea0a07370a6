"""Recording of decoded rounds: the runtime's observer, and the rows of its rounds.

    decoding thread          recording thread
    on_round(record)  ──►    statistics on the round's device ──► to the host, logits dropped
    finish_prompt(id) ──►    rows held until their prompt has ended

The decoding thread marks its place in the device's work and appends to a queue; it never waits for
the device. Rounds take about 70 bytes per drafted node until their prompt ends.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from specctl.collect.recorder import Publication, Recorder, RecorderConfig
from specctl.collect.rows import Heading, HeldRows, RoundRows, join, round_tables
from specctl.collect.statistics import alike, headings, statistics
from specctl.collect.trace_writer import TraceWriter
from specctl.collect.transfer import Event, Lane, Transfer, lane_for
from specctl.logs.trace_files import Segment
from specctl.runtime.requests import RoundRecord


class Waiting(NamedTuple):
    """A round in the queue."""

    record: RoundRecord
    mark: Event  # the decoding stream has written all of the round


Item = Waiting | str
"""A round, or the id of a prompt that has ended."""


class RoundRowSource:
    """The recorder's source of decoded rounds.

    Args:
        lane: to the host; None takes that of the first round's device.
    """

    def __init__(self, lane: Lane | None = None) -> None:
        self.lane = lane
        self._held, self._ended = HeldRows(), set[str]()
        self._transfer: Transfer[list[Heading]] | None = None

    @property
    def held_bytes(self) -> int:
        return self._held.size_bytes

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)

    def take(self, items: list[Item]) -> None:
        self._held.parts += self._read([item for item in items if isinstance(item, Waiting)])
        # Ends come after all rounds of the batch: a prompt's id follows its last round.
        self._ended |= {item for item in items if isinstance(item, str)}

    def _read(self, waiting: list[Waiting]) -> list[RoundRows]:
        """Statistics of rounds, on the host; `waiting` keeps tensors until the device has read
        them."""
        if not waiting or self.lane is None:
            return []
        transfer = self._transfer = self._transfer or Transfer(self.lane)
        marks = iter([item.mark for item in waiting])
        for records in alike(item.record for item in waiting):
            with transfer.lane.after(list(islice(marks, len(records)))):
                transfer.send(statistics(records), headings(records))
        return [RoundRows(*parcel) for parcel in transfer.land()]

    def publish(self) -> list[Publication]:
        ended, self._ended = self._ended, set()
        rows = self._held.take(ended)
        size_bytes = sum(part.size_bytes for part in rows)
        return [Publication(ended, lambda: round_tables(join(rows)) if rows else {}, size_bytes)]

    def unfinished(self) -> list[str]:
        return list(self._held.prompt_ids())


class TraceRecorder(Recorder[Item]):
    """An observer of a decoder that records its rounds."""

    source: RoundRowSource

    def __init__(
        self,
        writer: TraceWriter,
        config: RecorderConfig | None = None,
        on_commit: Callable[[Segment], None] | None = None,
        lane: Lane | None = None,
    ) -> None:
        super().__init__(lambda: writer, RoundRowSource(lane), config, on_commit)

    def on_round(self, record: RoundRecord) -> None:
        """Enqueues a round; waits only at a full queue."""
        if self.source.lane is None:
            self.source.lane = lane_for(record.target_logits.device)
        logits = {id(one): one for one in (record.target_logits, record.processed)}
        size_bytes = sum(one.nbytes for one in logits.values())
        self.put(Waiting(record, self.source.lane.mark()), size_bytes)

    def finish_prompt(self, prompt_id: str) -> None:
        """Marks the end of a prompt, which goes into the next segment."""
        self.put(prompt_id)
