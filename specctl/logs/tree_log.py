"""Dense and live logs as flat trees, some whole requests at a time.

A log is read front to back, in chunks of whole requests, so memory does not grow with it. Nodes
stay flat, one tree after another: trees need no padding, and a child is found by adding its rank
to the place of its parent's first child.

A *dense* log holds a tree at every output position, so any policy can be replayed over it. A
*live* log holds the rounds that one policy ran: it cannot be replayed, but what was drafted and
what the target said of it are labels all the same. There every round stands for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from specctl.errors import TraceCorruptError, TraceEmptyError, TraceError, TraceMismatchError
from specctl.logs.positions import Bools, Ints, Longs, Positions
from specctl.logs.trace_columns import (
    UNKNOWN,
    NodeColumns,
    SegmentFiles,
    coded,
    round_columns,
    segment_files,
)
from specctl.logs.trace_set import TraceSet
from specctl.trace import token_mode

T = TypeVar("T")
CHUNK_NODES = 1 << 19
"""Node rows that a chunk holds at least, unless the file ends."""
ROUND_COLUMNS = (
    "request_id",
    "prompt_id",
    "category",
    "kind",
    "num_drafted",
    "num_accepted",
    "position",
    "context_tokens",
    "num_emitted",
)
ENTROPIES = ("parent_entropy", "parent_topk_entropy")
TEXT_COLUMNS = ("token_id",)
"""`LogChunk.token_ids` needs them, given as `extra`."""


@dataclass(frozen=True)
class Support:
    """What a log contains at every position.

    Attributes:
        top_k: children of each expanded node. width: nodes expanded per level, by joint
            probability. depth: levels.
        nested: for every j <= top_k, the nodes that the static tree of (top_k j, width j) expands
            are expanded too, whatever their place among the `width` best.
    """

    top_k: int
    width: int
    depth: int
    nested: bool


@dataclass(frozen=True)
class LogChunk:
    """Some whole requests of a log: R positions, T nodes.

    Attributes:
        positions: of these requests alone.
        matched: `[R]` int32 numpy, draft tokens on the path, as far as the log goes.
        root: `[R]` int64, flat index of each tree's root.
        first_child: `[T]` int64, flat index of the first child; -1 where not expanded.
        on_path: `[T]` bool, the path to the node is a prefix of the text.
        known: `[T]` bool, the log tells whether it is. Unknown nodes are not `on_path`.
        draft_logp, entropy, topk_entropy: `[T]` float32, nats; entropies of the distribution that
            the node comes from, NaN where they were not read.
        extra: further columns of the nodes table, `[T]` numpy, NaN for null.
    """

    support: Support
    positions: Positions
    matched: Any
    root: Tensor
    first_child: Tensor
    on_path: Tensor
    known: Tensor
    draft_logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """T."""
        return len(self.on_path)

    @property
    def token_ids(self) -> Tensor | None:
        """`[T]` int32, where `TEXT_COLUMNS` were read."""
        tokens = self.extra.get("token_id")
        return None if tokens is None else torch.from_numpy(tokens)

    def take(self, requests: Bools) -> LogChunk:
        """Some requests, `[Q]`. Trees of the others stay; no root leads to them any more."""
        rows = self.positions.rows_of(requests)
        return replace(
            self,
            positions=self.positions.take(requests),
            matched=self.matched[rows],
            root=self.root[torch.from_numpy(rows)],
        )


def open_log(traces: TraceSet) -> DenseLog | LiveLog:
    """The log of a trace set, whichever kind it is.

    Raises:
        TraceMismatchError, TraceEmptyError: see `DenseLog.open` and `LiveLog.open`.
    """
    is_dense = "dense" in traces.header.collect
    return DenseLog.open(traces) if is_dense else LiveLog.open(traces)


@dataclass(frozen=True)
class DenseLog:
    """A dense trace set, opened for replay.

    Attributes:
        digest: of the trace set.
        tokens: what became of token ids, see `specctl.trace.token_mode`.
        num_positions: of the whole set.
        prompts: only their requests are read; None for all.
        held: chunks in memory, read in the place of the files; see `chain_log`.
    """

    support: Support
    digest: str
    files: tuple[SegmentFiles, ...]
    tokens: str = field(default="keep", kw_only=True)
    num_positions: int = field(default=0, kw_only=True)
    prompts: frozenset[str] | None = field(default=None, kw_only=True)
    held: tuple[LogChunk, ...] | None = field(default=None, kw_only=True)

    @classmethod
    def open(cls, traces: TraceSet) -> DenseLog:
        """Checks that every position carries a tree.

        Raises:
            TraceError: live traces, which only hold the positions that one policy visited.
            TraceMismatchError: folders of different support.
            TraceEmptyError: no positions.
        """
        supports = [support_of(header) for header in traces.headers]
        if len(set(supports)) > 1:
            raise TraceMismatchError(
                "dense traces",
                expected=f"one support, {supports[0]}",
                found=f"also {next(s for s in supports if s != supports[0])}",
                fix="replay these folders one at a time",
            )
        return cls(
            supports[0],
            traces.digest,
            segment_files(traces),
            tokens=token_mode(traces.headers[0].collect),
            num_positions=traces.num_rows("rounds"),
        )

    def only(self, prompts: Iterable[str]) -> DenseLog:
        """The requests of some prompts: whoever holds this cannot look at the rest."""
        return replace(self, prompts=frozenset(prompts))

    def chunks(
        self, *, with_entropy: bool = True, extra: tuple[str, ...] = ()
    ) -> Iterator[LogChunk]:
        """The log from front to back; chunks without any of the wanted prompts are left out.

        Args:
            extra: columns of numbers of the nodes table to read as well.

        Raises:
            TraceError: token ids are wanted, and the traces were collected without.
        """
        if "token_id" in extra:
            self.check_tokens("features of the text", "keep", "hash")
        if self.held is not None:
            assert all(name in chunk.extra for name in extra for chunk in self.held)
            chunks: Iterable[LogChunk] = self.held
        else:
            chunks = _read_chunks(self.files, self.support, with_entropy, extra)
        for chunk in chunks:
            if self.prompts is None:
                yield chunk
                continue
            names = chunk.positions.prompt_ids
            wanted = np.array([name in self.prompts for name in names])[chunk.positions.prompt]
            if wanted.any():
                yield chunk.take(wanted)

    def each(
        self,
        work: Callable[[LogChunk], T],
        *,
        with_entropy: bool = True,
        extra: tuple[str, ...] = (),
        num_threads: int = 1,
        on_positions: Callable[[int], None] | None = None,
    ) -> Iterator[T]:
        """The result of `work` for every chunk, in order.

        Args:
            num_threads: chunks in work at a time; results do not depend on it.
            on_positions: called with the positions of each finished chunk.
        """

        def done(chunk: LogChunk) -> tuple[int, T]:
            return chunk.positions.num_rows, work(chunk)

        chunks = self.chunks(with_entropy=with_entropy, extra=extra)
        for num_rows, found in map_ordered(done, chunks, num_threads):
            yield found
            if on_positions is not None:
                on_positions(num_rows)

    def check_tokens(self, what: str, *modes: str) -> None:
        """Refuses traces whose token ids do not serve.

        Args:
            what: needs them. modes: that would do.

        Raises:
            TraceError: they were hashed or left out.
        """
        if self.tokens not in modes:
            raise TraceError(
                what,
                expected=f"traces collected with --tokens {' or '.join(modes)}",
                found=f"--tokens {self.tokens}",
                fix="collect again, or leave out what needs token ids (a fit: with --features)",
            )


@dataclass(frozen=True)
class LiveLog:
    """A live trace set, opened for fits and reports."""

    files: tuple[SegmentFiles, ...]

    @classmethod
    def open(cls, traces: TraceSet) -> LiveLog:
        """Opens a trace set of live rounds.

        Raises:
            TraceEmptyError: no rounds.
        """
        return cls(segment_files(traces))

    @cached_property
    def support(self) -> Support:
        """The most that was drafted.

        Raises:
            TraceEmptyError: no round drafted. TraceMismatchError: the number of children varies.
        """
        tables = [round_columns(part, OFFERED) for part in self.files]
        offered = [np.stack([table[name].to_numpy() for name in OFFERED]) for table in tables]
        drafted = [values for values in offered if values[2].max(initial=0) > 0]
        if not drafted:
            raise TraceEmptyError(
                "live traces", expected="drafted rounds", found="none", fix="collect with a drafter"
            )
        whole = np.concatenate(drafted, 1)
        if len(top_ks := np.unique(whole[0])) > 1:
            raise TraceMismatchError(
                "live traces",
                expected="one number of children per node",
                found=f"top_k {top_ks.tolist()}",
                fix="fit to these folders one at a time",
            )
        top_k, width, depth = whole.max(1).tolist()
        return Support(top_k, width, depth, nested=False)

    def chunks(
        self, *, with_entropy: bool = True, extra: tuple[str, ...] = ()
    ) -> Iterator[LogChunk]:
        """As of `DenseLog`. Token ids are left out: rounds do not hold the text between them."""
        extra = tuple(name for name in extra if name not in TEXT_COLUMNS)
        return _read_chunks(self.files, None, with_entropy, extra)


OFFERED = ("top_k", "offered_width", "offered_depth")


def support_of(header: Any) -> Support:
    """The support that a trace header states.

    Raises:
        TraceError: the traces are live.
    """
    stated = header.collect.get("dense")
    if stated is None:
        raise TraceError(
            "traces",
            expected="dense traces, which hold a tree at every position",
            found="live ones, which hold the positions that one policy visited",
            fix="collect with --dense",
        )
    return Support(**stated)


def map_ordered(work: Callable[[Any], T], items: Iterable[Any], num_threads: int) -> Iterator[T]:
    """`map` over threads, in order, holding no more than `num_threads + 1` items at a time.

    Tensor operations release the interpreter lock, so threads do share the work.
    """
    if num_threads == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        running: list[Any] = []
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) > num_threads:
                yield running.pop(0).result()
        for future in running:
            yield future.result()


# ----------------------------------------------------------------- reading


class _Labels(NamedTuple):
    """`[T]` each: parents as places within their own trees, the path, and what is known."""

    parent: Any
    on_path: Bools
    known: Bools


def _dense_labels(flat: dict[str, Any]) -> _Labels:
    """`path_accepted` is null where the text followed the path and ended before the node."""
    accepted = flat["path_accepted"]
    return _Labels(flat["parent_idx"], accepted == 1, accepted != UNKNOWN)


def _live_labels(flat: dict[str, Any], root: Longs) -> _Labels:
    """The target's choices followed down the tree, a level at a time.

    `path_accepted` will not do: it is null at nodes that were not submitted and false beyond the
    end of the text, both of which the target's choices may still tell. Below a rejected token
    everything is rejected, below one that nobody verified everything is unknown.
    """
    depth, match = flat["depth"], flat["node_match"]
    tree = np.repeat(np.arange(len(root)), np.diff(root, append=len(depth)))
    parent = _flat_parents(flat["node_idx"], flat["parent_idx"], tree)
    on_path, known = depth == 0, np.ones(len(depth), np.bool_)
    for level in range(1, int(depth.max(initial=0)) + 1):
        rows = np.flatnonzero(depth == level)
        above = parent[rows]
        on_path[rows] = on_path[above] & (match[rows] == 1)
        known[rows] = known[above] & ~(on_path[above] & (match[rows] == UNKNOWN))
    return _Labels(np.where(parent < 0, -1, parent - root[tree]), on_path, known)


def _flat_parents(node_idx: Any, parent_idx: Any, tree: Longs) -> Longs:
    """`[T]` row of each node's parent, -1 at roots; slots ascend within a tree, with gaps."""
    slots = int(node_idx.max(initial=0)) + 1
    found = np.searchsorted(tree * slots + node_idx, tree * slots + parent_idx)
    return np.where(parent_idx < 0, -1, found)


def _read_chunks(
    files: Sequence[SegmentFiles],
    support: Support | None,
    with_entropy: bool,  # noqa: FBT001
    extra: tuple[str, ...],
) -> Iterator[LogChunk]:
    """Chunks of every file in turn.

    Args:
        support: of dense logs; None for live ones, where each chunk states its own.
    """
    labels = ("path_accepted",) if support else ("node_idx", "depth", "node_match")
    columns = ("parent_idx", "draft_logp", *labels, *(ENTROPIES if with_entropy else ()), *extra)
    for part in files:
        rounds = round_columns(part, ROUND_COLUMNS if support else (*ROUND_COLUMNS, *OFFERED))
        _check_kind(part, rounds, "dense" if support else "live")
        starts = _request_starts(rounds) if support else np.arange(rounds.num_rows + 1)
        sizes = rounds["num_drafted"].to_numpy().astype(np.int64) + 1
        nodes = NodeColumns(part, tuple(dict.fromkeys(columns)), CHUNK_NODES)
        for first, last in _groups(starts, sizes):
            some = rounds.slice(first, last - first)
            inner = starts[(starts >= first) & (starts <= last)] - first
            yield _chunk(some, inner, nodes, sizes[first:last], support, extra)
        nodes.check_end()


def _check_kind(files: SegmentFiles, rounds: Any, kind: str) -> None:
    kinds = rounds["kind"].unique().to_pylist()
    if kinds != [kind]:
        raise TraceCorruptError(
            str(files.rounds),
            expected=f"rows of kind {kind}",
            found=repr(kinds),
            fix="collect them again",
        )


def _request_starts(rounds: Any) -> Longs:
    """`[Q + 1]` first row of every request; rows of one request stand together, ascending."""
    position = rounds["position"].to_numpy()
    codes = rounds["request_id"].combine_chunks().indices.to_numpy()
    changes = np.flatnonzero(np.diff(codes)) + 1
    within = np.setdiff1d(np.arange(1, len(codes)), changes)
    if (np.diff(position)[within - 1] != 1).any() or len(changes) + 1 != len(np.unique(codes)):
        raise TraceCorruptError(
            "dense traces",
            expected="the positions of each request together and ascending",
            found="another order",
            fix="collect them again",
        )
    return np.concatenate([[0], changes, [len(codes)]]).astype(np.int64)


def _groups(starts: Longs, sizes: Longs) -> Iterator[tuple[int, int]]:
    """Row ranges of whole requests with about `CHUNK_NODES` nodes."""
    ends = np.concatenate([[0], np.cumsum(sizes)])
    first = 0
    for stop in starts[1:].tolist():
        if ends[stop] - ends[first] >= CHUNK_NODES or stop == starts[-1]:
            yield first, stop
            first = stop


def _chunk(
    rounds: Any,
    starts: Longs,
    nodes: NodeColumns,
    sizes: Longs,
    support: Support | None,
    extra: tuple[str, ...],
) -> LogChunk:
    flat = nodes.take(int(sizes.sum()))
    root = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    if not np.array_equal(np.flatnonzero(flat["parent_idx"] < 0), root):
        raise nodes.corrupt("trees of the sizes that the rounds table states", "others")
    if support is None:
        found = _live_labels(flat, root)
        matched = (np.add.reduceat(found.on_path, root, dtype=np.int32) - 1).astype(np.int32)
        top_k, width, depth = (int(rounds[name].to_numpy().max(initial=0)) for name in OFFERED)
        support, remaining = Support(top_k, width, depth, nested=False), matched + 1
    else:
        found = _dense_labels(flat)
        matched, remaining = rounds["num_accepted"].to_numpy(), _remaining(rounds, starts)
    absent = np.full(1, np.nan, np.float32)
    logp, entropy, topk_entropy = (
        torch.from_numpy(flat.get(name, absent)).expand(len(found.parent))
        for name in ("draft_logp", *ENTROPIES)
    )
    return LogChunk(
        support,
        _positions(rounds, starts, remaining),
        matched,
        torch.from_numpy(root),
        torch.from_numpy(_first_child(found.parent, root)),
        torch.from_numpy(found.on_path),
        torch.from_numpy(found.known),
        logp,
        entropy,
        topk_entropy,
        extra={name: flat[name] for name in extra},
    )


def _first_child(parent: Any, root: Longs) -> Longs:
    """`[T]` flat index of each node's first child, -1 for none, from parents within the trees.

    Children of one node stand together, so a first child is a row whose parent is not the one
    of the row before; at a new tree the root stands between.
    """
    firsts = np.flatnonzero(parent[1:] != parent[:-1]) + 1
    firsts = firsts[parent[firsts] >= 0]
    tree = root[np.searchsorted(root, firsts, side="right") - 1]
    found = np.full(len(parent), -1, np.int64)
    found[tree + parent[firsts]] = firsts
    return found


def _remaining(rounds: Any, starts: Longs) -> Ints:
    """`[R]` tokens from each position to the end of its request."""
    position, last = rounds["position"].to_numpy(), starts[1:] - 1
    total = position[last] + rounds["num_emitted"].to_numpy()[last]
    left: Ints = (np.repeat(total, np.diff(starts)) - position).astype(np.int32)
    return left


def _positions(rounds: Any, starts: Longs, remaining: Ints) -> Positions:
    first = starts[:-1]
    prompt, prompt_ids = coded(rounds["prompt_id"].combine_chunks().take(first))
    category, categories = coded(rounds["category"].combine_chunks().take(first))
    return Positions(
        start=starts,
        prompt=prompt,
        prompt_ids=prompt_ids,
        category=category,
        categories=categories,
        remaining=remaining,
        context_tokens=rounds["context_tokens"].to_numpy(),
    )
