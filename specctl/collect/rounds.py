"""Recording of decoded rounds: the runtime's observer, and the rows of its rounds.

    decoding thread          recording thread
    on_round(record)  ──►    statistics on the round's device ──► to the host, logits dropped
    finish_prompt(id) ──►    rows held until their prompt has ended

The decoding thread marks its place in the device's work and appends to a queue; it never waits for
the device. Rounds take about 70 bytes per drafted node until their prompt ends. A dropped prompt is
not published, so `--resume` collects it again.
"""

from __future__ import annotations

from collections import Counter
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

COPY_BYTES = 64 << 20
"""Host memory that statistics are copied to, pinned on CUDA."""


class Losses(NamedTuple):
    """Dropped prompts, and their rounds, one per request as in the table `rounds`."""

    num_prompts: int = 0
    num_rounds: int = 0


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
        may_drop: allow `give_up`.
    """

    def __init__(
        self, lane: Lane | None = None, *, may_drop: bool = False, copy_bytes: int = COPY_BYTES
    ) -> None:
        self.lane, self.dropped = lane, set[str]()  # both threads add to it
        self._may_drop, self._copy_bytes = may_drop, copy_bytes
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
        self._held.take(frozenset(self.dropped))
        # Ends come after all rounds of the batch: a prompt's id follows its last round.
        self._ended |= {item for item in items if isinstance(item, str)} - self.dropped

    def _read(self, waiting: list[Waiting]) -> list[RoundRows]:
        """Statistics of rounds, on the host; `waiting` keeps tensors until the device has read
        them."""
        if not waiting or self.lane is None:
            return []
        transfer = self._transfer = self._transfer or Transfer(self.lane, self._copy_bytes)
        landed, marks = [], iter([item.mark for item in waiting])
        for records in alike(item.record for item in waiting):
            with transfer.lane.after(list(islice(marks, len(records)))):
                landed += transfer.send(statistics(records), headings(records))
        landed += transfer.land()
        return [RoundRows(*parcel) for parcel in landed]

    def publish(self) -> list[Publication]:
        ended, self._ended = self._ended, set()
        rows = self._held.take(ended)
        size_bytes = sum(part.size_bytes for part in rows)
        return [Publication(ended, lambda: round_tables(join(rows)) if rows else {}, size_bytes)]

    def unfinished(self) -> list[str]:
        return list(self._held.counts())

    def give_up(self) -> bool:
        if self._may_drop:
            [(prompt_id, _)] = self._held.counts().most_common(1)
            self.dropped.add(prompt_id)
            self._held.take(frozenset(self.dropped))
        return self._may_drop


class TraceRecorder(Recorder[Item]):
    """An observer of a decoder that records its rounds.

    Attributes:
        losses: dropped prompts, complete after `close`.
    """

    source: RoundRowSource

    def __init__(
        self,
        writer: TraceWriter,
        config: RecorderConfig | None = None,
        on_commit: Callable[[Segment], None] | None = None,
        lane: Lane | None = None,
        copy_bytes: int = COPY_BYTES,
    ) -> None:
        self.losses = Losses()
        self._num_offered: Counter[str] = Counter()  # rounds of each prompt
        may_drop = config is not None and config.when_full == "drop"
        source = RoundRowSource(lane, may_drop=may_drop, copy_bytes=copy_bytes)
        super().__init__(lambda: writer, source, config, on_commit)

    def on_round(self, record: RoundRecord) -> None:
        """Enqueues a round; waits only at a full queue under `block`."""
        if self.source.lane is None:
            self.source.lane = lane_for(record.target_logits.device)
        prompts = [request.prompt_id for request in record.requests]
        self._num_offered.update(prompts)
        if self.source.dropped.issuperset(prompts):
            return
        logits = {id(one): one for one in (record.target_logits, record.target_logp_source)}
        size_bytes = sum(one.nbytes for one in logits.values())
        if not self.put(Waiting(record, self.source.lane.mark()), size_bytes):
            self.source.dropped.update(prompts)  # the whole batch: prompts are traced whole

    def finish_prompt(self, prompt_id: str) -> None:
        """Marks the end of a prompt; unless dropped, it goes into the next segment."""
        self.put(prompt_id)

    def close(self) -> None:
        try:
            super().close()
        finally:
            dropped = self.source.dropped
            lost = [count for prompt, count in self._num_offered.items() if prompt in dropped]
            self.losses = Losses(len(lost), sum(lost))
