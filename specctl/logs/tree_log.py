"""Dense and live logs as flat trees, some whole requests at a time.

A log is read front to back in chunks of whole requests, so memory stays bounded. Nodes are flat,
one tree after another, without padding; a child's index is the index of its parent's first child
plus its rank.

A *dense* log holds a tree at every output position, so any policy can be replayed over it. A
*live* log holds the rounds of one policy: it gives drafts and labels, and no replay. Each live
round is a request of its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from specctl.errors import TraceCorruptError, TraceEmptyError, TraceError, TraceMismatchError
from specctl.lazy import Tensor, torch
from specctl.logs.parquet import read_columns
from specctl.logs.positions import Bools, Longs, Positions, coded
from specctl.logs.trace_set import TraceSet
from specctl.progress import advance, chunk_threads
from specctl.trace import token_mode

if TYPE_CHECKING:  # slow to import
    import polars as pl


logger = logging.getLogger(__name__)
T = TypeVar("T")
SegmentFiles = dict[str, Path]
"""File of each table; both hold the same rounds in the same order."""
CHUNK_NODES = 1 << 19
"""Fewest node rows of a chunk, unless the file ends."""
UNKNOWN = -1
"""Null in boolean columns."""
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
OFFERED = ("top_k", "offered_width", "offered_depth")
ENTROPIES = ("parent_entropy", "parent_topk_entropy")
TEXT_COLUMNS = ("token_id",)
"""Columns that `LogChunk.token_ids` needs, given as `extra`."""


@dataclass(frozen=True)
class Support:
    """The nodes that a log contains at every position."""

    top_k: int  # children of each expanded node
    width: int  # nodes expanded per level, by joint probability
    depth: int  # levels
    # every narrower static tree, of top_k j and width j for j <= top_k, is contained too
    nested: bool


@dataclass(frozen=True)
class LogChunk:
    """Some whole requests of a log: R positions, T nodes."""

    support: Support
    positions: Positions
    matched: Any  # `[R]` int32 numpy, draft tokens on the path within the logged tree
    root: Tensor  # `[R]` int64, flat index of each tree's root
    first_child: Tensor  # `[T]` int64, flat index of the first child; -1 if not expanded
    on_path: Tensor  # `[T]` bool, the path to the node is a prefix of the text
    known: Tensor  # `[T]` bool, `on_path` is known; unknown nodes are not `on_path`
    # draft_logp, entropy, topk_entropy: `[T]` float32, nats; entropies of the distribution that the
    # node was drawn from, NaN if they were not read
    draft_logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor
    # columns of the nodes table by name, `[T]` numpy, NaN for null
    extra: dict[str, Any] = field(default_factory=dict)
    # `[R, RECENT_TOKENS]` int64 numpy, end of the text at each root; of live logs with text alone
    recent: Any = None

    @property
    def num_nodes(self) -> int:
        """T."""
        return len(self.on_path)

    @property
    def token_ids(self) -> Tensor | None:
        """`[T]` int32; None unless `TEXT_COLUMNS` were read."""
        tokens = self.extra.get("token_id")
        return None if tokens is None else torch.from_numpy(tokens)

    def take(self, requests: Bools) -> LogChunk:
        """Some requests, `[Q]`; trees of the others stay, without a root that leads to them."""
        rows = self.positions.rows_of(requests)
        return replace(
            self,
            positions=self.positions.take(requests),
            matched=self.matched[rows],
            root=self.root[torch.from_numpy(rows)],
            recent=None if self.recent is None else self.recent[rows],
        )


def open_log(traces: TraceSet) -> DenseLog | LiveLog:
    """The dense or live log of a trace set.

    Raises:
        TraceMismatchError, TraceEmptyError: see `DenseLog.open`.
    """
    return DenseLog.open(traces) if "dense" in traces.header.collect else LiveLog.open(traces)


def segment_files(traces: TraceSet) -> tuple[SegmentFiles, ...]:
    """The files of a trace set, in reading order.

    Raises:
        TraceEmptyError: the set has none.
    """
    files = tuple(traces.segment_files)
    if not files:
        raise TraceEmptyError("these traces hold no rounds", hint="collect some prompts")
    return files


@dataclass(frozen=True, kw_only=True)
class TreeLog:
    """A trace set, opened for reading."""

    files: tuple[SegmentFiles, ...]
    num_positions: int  # of the prompts that are read
    prompts: frozenset[str] | None = None  # prompts to read; None for all

    def only(self, prompts: Iterable[str]) -> Self:
        """The log of some of its prompts."""
        chosen = frozenset(prompts)
        return replace(self, prompts=chosen if self.prompts is None else chosen & self.prompts)

    def chunks(self, extra: tuple[str, ...] = ENTROPIES) -> Iterator[LogChunk]:
        """The log from front to back, without chunks that hold none of the prompts.

        Args:
            extra: numeric columns of the nodes table, besides those of labels and `draft_logp`.
        """
        for chunk in self._chunks(extra):
            if self.prompts is None:
                yield chunk
                continue
            names = chunk.positions.prompt_ids
            wanted = np.array([name in self.prompts for name in names])[chunk.positions.prompt]
            if wanted.any():
                yield chunk.take(wanted)

    def _chunks(self, extra: tuple[str, ...]) -> Iterator[LogChunk]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DenseLog(TreeLog):
    """A dense trace set, opened for replay."""

    support: Support
    digest: str  # of the trace set
    tokens: str  # see `specctl.trace.token_mode`

    @classmethod
    def open(cls, traces: TraceSet) -> DenseLog:
        """Opens traces that hold a tree at every position.

        Raises:
            TraceError: live traces.
            TraceMismatchError: sets of different support.
            TraceEmptyError: no positions.
        """
        supports = [support_of(header) for header in traces.headers]
        if len(set(supports)) > 1:
            other = next(s for s in supports if s != supports[0])
            raise TraceMismatchError(
                f"these dense traces differ in their trees: {supports[0]} and {other}",
                hint="replay these folders one at a time",
            )
        return cls(
            support=supports[0],
            digest=traces.digest,
            files=segment_files(traces),
            tokens=token_mode(traces.headers[0].collect),
            num_positions=traces.num_rows("rounds"),
        )

    def _chunks(self, extra: tuple[str, ...]) -> Iterator[LogChunk]:
        if "token_id" in extra:
            self.check_tokens("features of the text")
        return _read_chunks(self.files, self.support, extra)

    def check_tokens(self, what: str) -> None:
        """Refuses traces without token ids (TraceError), naming what needs them."""
        if self.tokens == "drop":
            raise TraceError(
                f"{what} need token ids, and these traces were collected with --tokens drop",
                hint="collect again, or leave out what needs token ids (a fit: with --features)",
            )


@dataclass(frozen=True, kw_only=True)
class LiveLog(TreeLog):
    """A live trace set, opened for fits and reports."""

    # assembles the texts from roots and accepted tokens, if token ids are read
    reads_text: bool = False

    @classmethod
    def open(cls, traces: TraceSet) -> LiveLog:
        """Raises `TraceEmptyError` without rounds."""
        return cls(files=segment_files(traces), num_positions=traces.num_rows("rounds"))

    @cached_property
    def support(self) -> Support:
        """The largest drafts.

        Raises:
            TraceEmptyError: no round drafted. TraceMismatchError: the number of children varies.
        """
        tables = [read_columns(part["rounds"], OFFERED) for part in self.files]
        offered = [np.stack([table[name].to_numpy() for name in OFFERED]) for table in tables]
        drafted = [values for values in offered if values[2].max(initial=0) > 0]
        if not drafted:
            raise TraceEmptyError(
                "no round of these live traces drafted", hint="collect with a drafter"
            )
        whole = np.concatenate(drafted, 1)
        if len(top_ks := np.unique(whole[0])) > 1:
            raise TraceMismatchError(
                f"these live traces differ in children per node: top_k {top_ks.tolist()}",
                hint="fit to these folders one at a time",
            )
        top_k, width, depth = whole.max(1).tolist()
        return Support(top_k, width, depth, nested=False)

    def _chunks(self, extra: tuple[str, ...]) -> Iterator[LogChunk]:
        if not self.reads_text:  # rounds stand alone
            extra = tuple(name for name in extra if name not in TEXT_COLUMNS)
        return _read_chunks(self.files, None, extra)


def support_of(header: Any) -> Support:
    """The support that a trace header states.

    Raises:
        TraceError: the traces are live.
    """
    stated = header.collect.get("dense")
    if stated is None:
        raise TraceError(
            "these are live traces, which hold the positions that one policy visited; dense ones "
            "hold a tree at every position",
            hint="collect with --dense",
        )
    return Support(**stated)


def map_chunks(log: TreeLog, work: Callable[[LogChunk], T], extra: tuple[str, ...]) -> Iterator[T]:
    """The result of `work` for every chunk of a log, in order; `positions` progress.

    `chunk_threads` threads work, as tensor operations release the interpreter lock; one chunk more
    than these is in memory.
    """

    def done(chunk: LogChunk) -> tuple[int, T]:
        return chunk.positions.num_rows, work(chunk)

    for num_rows, found in _map_ordered(done, log.chunks(extra), chunk_threads()):
        yield found
        advance("positions", num_rows)


def _map_ordered(work: Callable[[Any], T], items: Iterable[Any], num_threads: int) -> Iterator[T]:
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


def _read_chunks(
    files: Sequence[SegmentFiles],
    support: Support | None,
    extra: tuple[str, ...],
) -> Iterator[LogChunk]:
    """Chunks of every file in turn, with the columns of one file in memory.

    Args:
        support: of dense logs; None for live ones, whose chunks have their own.
    """
    import polars as pl

    labels = ("path_accepted",) if support else ("node_idx", "depth", "node_match")
    columns = {"parent_idx", "draft_logp", *labels, *extra}
    kind = "dense" if support else "live"
    reads_text = "token_id" in extra and not support
    if reads_text:
        columns.add("path_accepted")
    for part in files:
        names = (*ROUND_COLUMNS, *(() if support else OFFERED))
        rounds = pl.DataFrame(read_columns(part["rounds"], names))
        kinds = rounds["kind"].unique().to_list()
        if kinds != [kind]:
            raise _corrupt(part["rounds"], f"rows of kind {kinds!r} in a {kind} set")
        starts = _request_starts(part, rounds) if support else np.arange(len(rounds) + 1)
        root = np.concatenate([[0], np.cumsum(rounds["num_drafted"].to_numpy() + np.int64(1))])
        nodes = _node_arrays(part["nodes"], columns)
        excess = len(nodes["parent_idx"]) - int(root[-1])
        if excess:
            found = f"{excess} more" if excess > 0 else f"{-excess} fewer"
            raise _corrupt(part["nodes"], f"{found} rows than the rounds table accounts for")
        if not np.array_equal(np.flatnonzero(nodes["parent_idx"] < 0), root[:-1]):
            raise _corrupt(part["nodes"], "trees of other sizes than the rounds table states")
        recent = _recent_texts(rounds, root, nodes) if reads_text else None
        first = 0
        for stop in starts[1:].tolist():  # whole requests with about CHUNK_NODES nodes
            if root[stop] - root[first] >= CHUNK_NODES or stop == starts[-1]:
                inner = starts[(starts >= first) & (starts <= stop)] - first
                flat = {name: values[root[first] : root[stop]] for name, values in nodes.items()}
                here = root[first:stop] - root[first]
                chunk = _chunk(rounds[first:stop], inner, flat, here, support, extra)
                yield chunk if recent is None else replace(chunk, recent=recent[first:stop])
                first = stop


def _recent_texts(rounds: pl.DataFrame, root: Longs, nodes: dict[str, Any]) -> Longs:
    """`[R, RECENT_TOKENS]`: the end of the text at each root, assembled from the roots and accepted
    tokens of the request's rounds; `NO_TEXT` before the first."""
    from specctl.features import NO_TEXT, RECENT_TOKENS

    request, _ = coded(rounds["request_id"])
    order = np.lexsort((rounds["position"].to_numpy(), request))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    kept = np.flatnonzero(nodes["path_accepted"] == 1)  # true at roots
    step = place[np.searchsorted(root, kept, "right") - 1]
    kept, step = kept[np.argsort(step, kind="stable")], np.sort(step)
    at = np.searchsorted(step, np.arange(len(order)))  # of each root, in order
    begins = np.diff(request[order], prepend=-1) != 0
    first = at[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    back = at[:, None] - np.arange(RECENT_TOKENS - 1, -1, -1)
    text = nodes["token_id"][kept][back.clip(0)].astype(np.int64)
    return np.where(back < first[:, None], NO_TEXT, text)[place]


def _corrupt(path: Path, problem: str) -> TraceCorruptError:
    return TraceCorruptError(f"{path}: {problem}", hint="collect them again")


def _node_arrays(path: Path, columns: Iterable[str]) -> dict[str, Any]:
    """Columns of a nodes file; booleans become int8: 1, 0 and `UNKNOWN` for null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    arrays = {}
    table = read_columns(path, sorted(columns))
    for name in table.column_names:
        column = table[name]
        if pa.types.is_boolean(column.type):
            column = pc.fill_null(column.cast("int8"), UNKNOWN)
        # Copied: Arrow's buffers are read-only, and torch shares writable memory alone.
        arrays[name] = np.array(column.to_numpy())
    return arrays


def _request_starts(files: SegmentFiles, rounds: pl.DataFrame) -> Longs:
    """`[Q + 1]` first row of every request, whose rows must be contiguous and ascending."""
    position, run = rounds["position"].to_numpy(), rounds["request_id"].rle_id().to_numpy()
    begins = np.diff(run, prepend=-1) != 0
    num_requests = rounds["request_id"].n_unique()
    if (np.diff(position)[~begins[1:]] != 1).any() or begins.sum() != num_requests:
        raise _corrupt(files["rounds"], "positions of a request are not together and ascending")
    return np.append(np.flatnonzero(begins), len(run))


def _chunk(
    rounds: pl.DataFrame,
    starts: Longs,
    flat: dict[str, Any],
    root: Longs,
    support: Support | None,
    extra: tuple[str, ...],
) -> LogChunk:
    if support is None:
        parent, on_path, known = _live_labels(flat, root)
        matched = (np.add.reduceat(on_path, root, dtype=np.int32) - 1).astype(np.int32)
        top_k, width, depth = (int(rounds[name].max()) for name in OFFERED)  # type: ignore[arg-type]
        support, remaining = Support(top_k, width, depth, nested=False), matched + 1
    else:  # `path_accepted` is null where the text followed the path and ended before the node
        parent, accepted = flat["parent_idx"], flat["path_accepted"]
        on_path, known = accepted == 1, accepted != UNKNOWN
        matched, position = (rounds[n].to_numpy() for n in ("num_accepted", "position"))
        total = (position + rounds["num_emitted"].to_numpy())[starts[1:] - 1]
        remaining = (np.repeat(total, np.diff(starts)) - position).astype(np.int32)
    absent = np.full(1, np.nan, np.float32)
    logp, entropy, topk_entropy = (
        torch.from_numpy(flat.get(name, absent)).expand(len(parent))
        for name in ("draft_logp", *ENTROPIES)
    )
    prompt, prompt_ids = coded(rounds["prompt_id"][starts[:-1]])
    category, categories = coded(rounds["category"][starts[:-1]])
    context_tokens = rounds["context_tokens"].to_numpy()
    return LogChunk(
        support,
        Positions(starts, prompt, prompt_ids, category, categories, remaining, context_tokens),
        matched,
        torch.from_numpy(root),
        torch.from_numpy(_first_child(parent, root)),
        torch.from_numpy(on_path),
        torch.from_numpy(known),
        logp,
        entropy,
        topk_entropy,
        extra={name: flat[name] for name in extra},
    )


def _live_labels(flat: dict[str, Any], root: Longs) -> tuple[Any, Bools, Bools]:
    """Labels from the target's choices, followed down the tree a level at a time.

    `path_accepted` would lose labels: it is null at nodes that were not submitted and false beyond
    the end of the text. Below a rejected token all nodes are rejected, below an unverified one all
    are unknown.

    Returns:
        `[T]` each: index of the parent within its tree, `on_path` and `known`.
    """
    depth, match = flat["depth"], flat["node_match"]
    node_idx, parent_idx = flat["node_idx"], flat["parent_idx"]
    tree = np.repeat(np.arange(len(root)), np.diff(root, append=len(depth)))
    slots = int(node_idx.max(initial=0)) + 1  # they ascend within a tree, with gaps
    parent = np.searchsorted(tree * slots + node_idx, tree * slots + parent_idx)
    parent = np.where(parent_idx < 0, -1, parent)
    on_path, known = depth == 0, np.ones(len(depth), np.bool_)
    for level in range(1, int(depth.max(initial=0)) + 1):
        rows = np.flatnonzero(depth == level)
        above = parent[rows]
        on_path[rows] = on_path[above] & (match[rows] == 1)
        known[rows] = known[above] & ~(on_path[above] & (match[rows] == UNKNOWN))
    return np.where(parent < 0, -1, parent - root[tree]), on_path, known


def _first_child(parent: Any, root: Longs) -> Longs:
    """`[T]` flat index of each node's first child, -1 for none, from parents within the trees.

    Siblings are contiguous, so a first child is a row whose parent differs from that of the row
    before; between two trees stands a root.
    """
    firsts = np.flatnonzero(parent[1:] != parent[:-1]) + 1
    firsts = firsts[parent[firsts] >= 0]
    tree = root[np.searchsorted(root, firsts, side="right") - 1]
    found = np.full(len(parent), -1, np.int64)
    found[tree + parent[firsts]] = firsts
    return found


# ----------------------------------------------------------------- the door

LogT = TypeVar("LogT", bound=TreeLog)


def sampled(log: LogT, max_positions: int, seed: int, *, warn: bool = True) -> LogT:
    """The log, or a seeded sample of its prompts with at most `max_positions` positions.

    Prompts are taken in the order of a hash of seed and id, at least two of them.

    Args:
        warn: state the size of the sample in a warning.
    """
    if log.num_positions <= max_positions:
        return log
    sizes = Counter[str]()
    for files in log.files:
        sizes.update(read_columns(files["rounds"], ("prompt_id",))["prompt_id"].to_pylist())
    if log.prompts is not None:
        sizes = Counter({name: sizes[name] for name in log.prompts})
    chosen, num_positions = list[str](), 0
    # Not the hash of `split_prompts`, which would put the whole sample on one side.
    for name in sorted(sizes, key=lambda n: sha256(f"sample {seed}:{n}".encode()).digest()):
        if num_positions + sizes[name] > max_positions and len(chosen) >= 2:
            break
        chosen.append(name)
        num_positions += sizes[name]
    if warn:
        logger.warning(
            "a seeded sample of whole prompts is read, %s of %s, with %s of %s positions; see "
            "--max-positions",
            *(f"{n:,}" for n in (len(chosen), len(sizes), num_positions, log.num_positions)),
        )
    return replace(log.only(chosen), num_positions=num_positions)
