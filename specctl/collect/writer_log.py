"""The log of one writer, and the fence between the processes that take it over.

    seq     0       1       2       3       4
           open    commit  commit  open    commit
    epoch   1       1       1       2       2

A slot (writer, seq) is created at most once, and a writer goes to the next slot only when it knows
what the one before holds. So the log is one history whatever its processes believe:

- Who takes a writer over opens the next epoch *in the log*, in the first free slot. From then on
  the earlier process, whose next slot is this one or an earlier one, finds it taken: it has no way
  to acknowledge another row, and stops with `WriterFencedError`.
- What it had acknowledged stands before the opening and stays: nothing that was acknowledged is
  ever ignored. A commit that was under way when the other one opened its epoch got its slot first,
  and then the opening moves one slot on, or lost it, and was never acknowledged.

An epoch object beside the log could not promise that: a commit that came between reading the head
and writing the epoch would be acknowledged and then ignored. Nothing here needs a clock, a lease
or a lock.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from specctl.collect.chains import check_header, list_records, read_chain, read_slot
from specctl.collect.commits import Commit, Segment, record_key, writer_id
from specctl.collect.places import MAX_RECORD_BYTES, Place
from specctl.errors import OutputError
from specctl.stores import KeyTakenError, create

MAX_LOST_SLOTS = 1000
"""Commits that a holder may make while it is being fenced, before that is called hopeless."""

RETIRED = "retired"
"""What opens an epoch that no process holds."""


class WriterFencedError(OutputError):
    """Another process took this writer over; what was acknowledged before stays."""


class WriterLog:
    """Appends to one writer's log; for one thread.

    Attributes:
        name: what the writer is called, e.g. `shard 1/4`. epoch: of this holder.
        taken: records of the log up to the one that opened the epoch.
    """

    def __init__(self, place: Place, name: str, taken: Sequence[Commit]) -> None:
        self.place, self.name, self.taken, self._last = place, name, tuple(taken), taken[-1]
        self.epoch = self._last.epoch

    @classmethod
    def take(cls, place: Place, name: str, header_digest: str) -> WriterLog:
        """Opens the next epoch of a writer; an earlier holder can acknowledge nothing any more.

        Args:
            header_digest: of the set's header, which every record of the epoch names.

        Raises:
            OutputError: another process is taking it over as well, and was first.
            TraceError: a damaged log.
            StoreError: the store refuses.
        """
        return cls(place, name, _opened(place, name, header_digest, opens=name))

    @classmethod
    def retire(cls, place: Place, name: str, header_digest: str) -> tuple[Commit, ...]:
        """Opens an epoch that nobody holds, unless the last one is such.

        Returns:
            the records of the log, which grows no more until somebody takes it.

        Args, Raises:
            As `take`.
        """
        return tuple(_opened(place, name, header_digest, opens=RETIRED))

    def append(
        self,
        files: Sequence[Segment],
        prompt_ids: Sequence[str],
        supersedes: Sequence[str] | None = None,
        text_digests: Sequence[str | None] | None = None,
    ) -> Commit:
        """Acknowledges prompts; durable when this returns.

        Raises:
            WriterFencedError: the writer was taken over; nothing was acknowledged.
            OutputError: a record that no reader would take.
            StoreError: the store refuses; whether it was acknowledged is unknown to all but the
                log.
        """
        record = _following(
            self._last.writer,
            self._last,
            header_digest=self._last.header_digest,
            files=list(files),
            prompt_ids=list(prompt_ids),
            supersedes=None if supersedes is None else list(supersedes),
            text_digests=None if text_digests is None else list(text_digests),
        )
        content = record.to_bytes()
        self._check_size(len(content))
        try:
            create(self.place.store, record.key, content)
        except KeyTakenError as error:
            raise self._fenced(record.key) from error
        self._last = record
        return record

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > MAX_RECORD_BYTES:
            raise OutputError(
                f"trace set {self.place.name}, commit record",
                expected=f"at most {MAX_RECORD_BYTES} bytes",
                found=f"{num_bytes} bytes",
                fix="commit fewer prompts at a time (`traces compact --target-rows`)",
            )

    def _fenced(self, key: str) -> WriterFencedError:
        *_, record = read_chain(self.place, self._last.writer, range(self._last.seq + 2))
        return WriterFencedError(
            f"trace set {self.place.name}, writer {self.name!r}",
            expected=f"epoch {self.epoch} to be the newest",
            found=f"epoch {record.epoch} in {key}, opened {record.created}",
            fix="let the process that took over go on; what this one acknowledged is kept",
        )


def _opened(place: Place, name: str, header_digest: str, *, opens: str) -> list[Commit]:
    """A writer's records up to one that opens a new epoch."""
    writer = writer_id(name)
    records = list(read_chain(place, writer, range(_length(place, writer))))
    check_header(place, records, header_digest)
    for _ in range(MAX_LOST_SLOTS):
        if opens == RETIRED and records and records[-1].opens == RETIRED:
            return records
        last = records[-1] if records else None
        opening = _following(writer, last, opens=opens, header_digest=header_digest)
        try:
            create(place.store, opening.key, opening.to_bytes())
        except KeyTakenError:
            records.append(_behind(place, name, len(records), opens))
        else:
            return [*records, opening]
    raise _lost(place, name, f"{MAX_LOST_SLOTS} commits of the one that has it")


def _following(writer: str, last: Commit | None, **fields: Any) -> Commit:
    """The record behind `last`: of its epoch, or opening the next one."""
    before = (last.epoch or 0) if last else 0
    return Commit(
        writer=writer,
        seq=last.seq + 1 if last else 0,
        prev_commit=last.digest if last else None,
        nonce=uuid.uuid4().hex,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        epoch=before + 1 if "opens" in fields else before,
        **{"files": [], "prompt_ids": [], **fields},
    ).sealed()


def _length(place: Place, writer: str) -> int:
    """Records of a writer, surely: a listing may be behind, so the slots behind it are asked."""
    listed = list_records(place, writer).get(writer)
    seq = listed[-1] + 1 if listed else 0
    while read_slot(place, record_key(writer, seq)) is not None:
        seq += 1
    return seq


def _behind(place: Place, name: str, seq: int, opens: str) -> Commit:
    """What took a slot; refuses an opening, which is another process like us.

    Two that retire a writer want the same.
    """
    *_, record = read_chain(place, writer_id(name), range(seq + 1))
    if record.opens is not None and not record.opens == opens == RETIRED:
        raise _lost(place, name, f"epoch {record.epoch}, opened {record.created}")
    return record


def _lost(place: Place, name: str, found: str) -> OutputError:
    return OutputError(
        f"trace set {place.name}, writer {name!r}",
        expected="to be the only process that takes it over",
        found=found,
        fix="let the other one go on, or start this one again to take over from it",
    )
