"""Recording of decoded rounds: the runtime's observer, and the rows of its rounds.

    decoding thread          recording thread
    on_round(record)  ──►    statistics on the round's device ──► to the host, logits dropped
    finish_prompt(id) ──►    rows held until their prompt has ended

The decoding thread marks its place in the device's work and appends to a queue; it never waits for
the device. Rounds take about 70 bytes per drafted node until their prompt ends.

Statistics are computed on the rounds' device, so that logits need not leave it: for rounds that
arrived together, in few tensor calls, without a loop over nodes and without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.collect.recorder import Publication, Recorder, RecorderConfig
from specctl.collect.rows import (
    LOGIT_TENSORS,
    ROW_TENSORS,
    Heading,
    HeldRows,
    RoundRows,
    join,
    request_columns,
    round_tables,
    slot_of,
)
from specctl.collect.trace_writer import TraceWriter
from specctl.collect.transfer import Event, Lane, Transfer, lane_for
from specctl.kernels.token_ranks import token_ranks
from specctl.logs.trace_files import Segment
from specctl.runtime.requests import RoundRecord
from specctl.tree import POOL_COLUMNS, gather

MAX_STACK_BYTES = 32 << 20
"""Most logits that are read together. Tensor calls of the recording thread compete with decoding
for the interpreter lock, so small rounds are joined; large ones are read without a copy."""


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


# --------------------------------------------------------------------------- statistics


def headings(records: Sequence[RoundRecord]) -> list[Heading]:
    """Headings of the rows of rounds."""
    return [
        {
            **request_columns(request, "live"),
            "offered_width": record.offered_width,
            "top_k": record.top_k,
            "batch_size": len(record.requests),
            "policy_digest": record.policy_digest,
            **vars(record.times),
        }
        for record in records
        for request in record.requests
    ]


def alike(records: Iterable[RoundRecord]) -> Iterator[list[RoundRecord]]:
    """Groups of consecutive rounds of equal shape, up to `MAX_STACK_BYTES`."""

    def signature(record: RoundRecord) -> tuple[object, ...]:
        tensors = (record.pool.joint_logp, record.submitted, record.target_logits)
        return (_is_greedy(record), record.top_k, *(tensor.shape[1:] for tensor in tensors))

    for _, run in groupby(records, signature):
        rounds = list(run)
        size = max(1, MAX_STACK_BYTES // max(1, rounds[0].target_logits.nbytes))
        yield from (rounds[start : start + size] for start in range(0, len(rounds), size))


def _is_greedy(record: RoundRecord) -> bool:
    return record.processed is record.target_logits


def statistics(records: Sequence[RoundRecord]) -> dict[str, Tensor]:
    """The tensors of rounds of equal shape that a trace needs, by name, on their device.

    Beside those of pool and record, `[R, P]` each: `judged`, the parent was verified and the
    target's distribution after it is known; `node_match` and `LOGIT_TENSORS`, valid where `judged`.
    Rows of engines that sample have `match_known` too: they lack the target's draw after a rejected
    token.
    """
    pool = {name: _cat(getattr(one.pool, name) for one in records) for name in POOL_COLUMNS}
    widest = max(record.path.shape[1] for record in records)  # paths are as wide as trees are deep
    rest = {
        name: _cat(getattr(one, name) for one in records)
        for name in (*ROW_TENSORS, "submitted", "target_ids")
    }
    rest["path"] = _cat(pad(one.path, (0, widest - one.path.shape[1]), value=-1) for one in records)
    parent_slot = gather(slot_of(rest["submitted"], pool["parent"].shape[1]), pool["parent"], -1)
    judged, slot = parent_slot >= 0, parent_slot.clamp(min=0)
    match = judged & (gather(rest["target_ids"], slot, -1) == pool["token_ids"])
    read = read_on_device if records[0].target_logits.is_cuda else read_on_host
    logits = read(records, judged, slot, pool["token_ids"], pool["sibling_rank"])
    views = dict(zip(LOGIT_TENSORS, logits, strict=True))
    return rest | pool | views | {"judged": judged, "node_match": match}


def _cat(parts: Iterable[Tensor]) -> Tensor:
    tensors = list(parts)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def read_on_device(
    records: Sequence[RoundRecord], judged: Tensor, slot: Tensor, tokens: Tensor, sibling: Tensor
) -> tuple[Tensor, ...]:
    """`LOGIT_TENSORS` of each node, by operations whose shapes do not depend on values.

    Args:
        judged, slot: `[R, P]`, whether a node's parent was verified, and its place among the N.
        tokens, sibling: `[R, P]`, the node's token and rank among its siblings.

    Returns:
        `[R, P]` each, arbitrary where not `judged`: log-probability under the sampled distribution,
        -inf where top-k or top-p cut; 1 + number of strictly larger raw logits; the two largest raw
        logits at the parent.
    """
    logits = _cat(record.target_logits for record in records)
    num_rows, num_slots = logits.shape[:2]
    width = max(1, records[0].top_k)
    at = torch.arange(num_rows, device=slot.device)[:, None] * num_slots + slot
    # The k-th drafted child's token of every verified node, -1 for none; the last row is scrap.
    table = at.new_full((num_rows * num_slots + 1, width), -1)
    place = at.masked_fill(~judged, num_rows * num_slots) * width + sibling
    table.view(-1).scatter_(0, place.flatten(), tokens.flatten())
    raw = drawn = token_ranks(logits.flatten(0, 1), table[:-1])
    if not _is_greedy(records[0]):
        source = _cat(record.processed for record in records)
        drawn = token_ranks(source.flatten(0, 1), table[:-1])
    logp = drawn.logits[at, sibling] - drawn.log_sum_exp[at]
    return logp, raw.num_larger[at, sibling] + 1, *raw.top_two[at].unbind(-1)


def read_on_host(
    records: Sequence[RoundRecord], judged: Tensor, slot: Tensor, tokens: Tensor, sibling: Tensor
) -> tuple[Tensor, ...]:
    """`read_on_device` for the CPU, in float32 and with little work: decoding needs the cores.

    Copies and reads only the E parents of drafted nodes among the R·N verified ones: about half of
    a tree are leaves, and reading logits is most of the cost of recording.
    """
    num_slots = records[0].submitted.shape[1]
    is_parent = torch.zeros(len(judged), num_slots, dtype=torch.bool)
    row, node = judged.nonzero(as_tuple=True)
    is_parent[row, slot[row, node]] = True
    is_parent[:, 0] = True  # at least one
    at = (is_parent.flatten().cumsum(0) - 1).view_as(is_parent).gather(1, slot)
    parents = is_parent.split([len(record.requests) for record in records])
    pairs = list(zip(records, parents, strict=True))
    logits = _cat(record.target_logits[among] for record, among in pairs).float()
    source = logits
    if not _is_greedy(records[0]):
        source = _cat(record.processed[among] for record, among in pairs).float()
    children = logits.new_full((len(logits), max(1, records[0].top_k)), float("inf"))
    children[at[judged], sibling[judged]] = logits[at[judged], tokens[judged]]
    top1, top2, larger = order_statistics(logits, children)
    return source.log_softmax(-1)[at, tokens], larger[at, sibling] + 1, top1[at], top2[at]


def order_statistics(logits: Tensor, children: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two largest logits, and for each child the number of strictly larger logits.

    numpy reduces comparisons with vector instructions and torch does not: at E = 48, V = 6144,
    K = 8 one core of the build machine takes 0.5 ms, against 1.9 ms for a loop in torch.

    Args:
        logits: `[E, V]` float32.
        children: `[E, K]` float32, +inf for none.

    Returns:
        `[E]` float32, `[E]` float32, `[E, K]` int64.
    """
    rows, bounds = logits.numpy(), children.numpy()
    each, best = np.arange(len(rows)), rows.argmax(-1)
    rest = rows.copy()
    rest[each, best] = -np.inf
    larger = [_count_larger(rows, bounds[:, child, None]) for child in range(bounds.shape[1])]
    return (
        torch.from_numpy(rows[each, best]),
        torch.from_numpy(rest.max(-1)),
        torch.from_numpy(np.stack(larger, -1)),
    )


def _count_larger(rows: npt.NDArray[Any], bound: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Entries of each row above its bound, by adding eight 0/1 bytes at once as one word.

    128 words are summed before their bytes are: no byte exceeds 128, so none carries over.
    """
    length = rows.shape[1]
    flags = np.zeros((len(rows), -(-length // 1024) * 1024), np.bool_)
    np.greater(rows, bound, out=flags[:, :length])
    words = flags.view(np.uint64).reshape(len(rows), -1, 128).sum(-1)
    counts: npt.NDArray[Any] = words.view(np.uint8).sum(-1, dtype=np.int64)
    return counts
