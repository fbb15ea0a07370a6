"""Dense logs as flat arrays, a few requests at a time.

A log is read once, front to back, in chunks of whole requests, so memory does not grow with it.
Nodes stay flat, one tree after another: trees need no padding, and a child is found by adding its
rank to the place of its parent's first child.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specctl.artifacts.manifest import PairFingerprint
from specctl.errors import TraceCorruptError, TraceEmptyError, TraceError, TraceMismatchError
from specctl.parquet import read_columns
from specctl.replay.node_reader import NodeReader
from specctl.replay.positions import Longs, Positions, positions_of
from specctl.trace import token_mode

CHUNK_NODES = 1 << 19
"""Node rows that a chunk holds at least, unless the log ends."""
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
STRUCTURE = ("parent_idx", "path_accepted", "draft_logp")
ENTROPIES = ("parent_entropy", "parent_topk_entropy")
TEXT_COLUMNS = ("token_id",)
"""What `LogChunk.token_ids` needs, to be given as `extra`."""


@dataclass(frozen=True)
class Support:
    """What the log contains at every position.

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


class Traces(Protocol):
    """A trace set as replay needs it; `collect.reader.TraceSet` is one."""

    @property
    def header(self) -> Any: ...

    @property
    def headers(self) -> Sequence[Any]: ...

    @property
    def digest(self) -> str: ...

    @property
    def fingerprint(self) -> PairFingerprint: ...

    def commit_files(self) -> list[dict[str, Path]]:
        """Per commit that has rows, the file of each table."""
        ...


@dataclass(frozen=True)
class LogChunk:
    """Some whole requests of a log: R positions, T nodes.

    Attributes:
        positions: of these requests alone.
        matched: `[R]` int32 numpy, draft tokens on the path, as far as the log goes.
        root: `[R]` int64, flat index of each tree's root.
        first_child: `[T]` int64, flat index of the first child; -1 where not expanded.
        on_path: `[T]` bool, the node's path is a prefix of the continuation.
        draft_logp, entropy, topk_entropy: `[T]` float32; entropies of the distribution that the
            node comes from, NaN where they were not read.
        extra: further columns of the nodes table, `[T]` numpy, NaN for null.
    """

    positions: Positions
    matched: Any
    root: Tensor
    first_child: Tensor
    on_path: Tensor
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


@dataclass(frozen=True)
class DenseLog:
    """A dense trace set, opened for replay.

    Attributes:
        tokens: what became of token ids, see `specctl.trace.token_mode`.
    """

    support: Support
    digest: str
    files: tuple[dict[str, Path], ...]
    tokens: str = field(default="keep", kw_only=True)

    @classmethod
    def open(cls, traces: Traces) -> DenseLog:
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
        files = tuple(traces.commit_files())
        if not files:
            raise TraceEmptyError(
                "dense traces", expected="positions", found="none", fix="collect some prompts"
            )
        return cls(supports[0], traces.digest, files, tokens=token_mode(traces.headers[0].collect))

    def chunks(
        self, *, with_entropy: bool = True, extra: tuple[str, ...] = ()
    ) -> Iterator[LogChunk]:
        """The log from front to back, whole requests at a time, about `CHUNK_NODES` nodes each.

        Args:
            extra: columns of numbers of the nodes table to read as well.

        Raises:
            TraceError: token ids were asked for, and the traces were collected without.
        """
        if "token_id" in extra:
            self.check_tokens("features of the text", "keep", "hash")
        columns = (*STRUCTURE, *(ENTROPIES if with_entropy else ()), *extra)
        for files in self.files:
            yield from _chunks_of(files, columns)

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


def _chunks_of(files: dict[str, Path], columns: tuple[str, ...]) -> Iterator[LogChunk]:
    """Chunks of one commit."""
    rounds = read_columns(files["rounds"], ROUND_COLUMNS)
    _check_kind(files["rounds"], rounds)
    sizes = rounds["num_drafted"].to_numpy().astype(np.int64) + 1
    starts = _request_starts(rounds)
    nodes = NodeReader(files["nodes"], columns, CHUNK_NODES)
    for first, last in _groups(starts, sizes):
        part = rounds.slice(first, last - first)
        inner = starts[(starts >= first) & (starts <= last)] - first
        yield _chunk(part, inner, nodes, sizes[first:last])
    nodes.check_end()


def _check_kind(path: Path, rounds: Any) -> None:
    kinds = rounds["kind"].unique().to_pylist()
    if kinds != ["dense"]:
        raise TraceCorruptError(
            str(path), expected="rows of kind dense", found=repr(kinds), fix="collect them again"
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


def _chunk(rounds: Any, starts: Longs, nodes: NodeReader, sizes: Longs) -> LogChunk:
    flat = nodes.take(int(sizes.sum()))
    parent = flat["parent_idx"]
    root = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    _check_trees(nodes.path, parent, root)
    nothing = np.full(1, np.nan, np.float32)
    columns = [flat.get(name, nothing) for name in ("draft_logp", *ENTROPIES)]
    tensors = [torch.from_numpy(c).expand(len(parent)) for c in columns]
    return LogChunk(
        positions_of(rounds, starts),
        rounds["num_accepted"].to_numpy(),
        torch.from_numpy(root),
        torch.from_numpy(_first_child(parent, root)),
        torch.from_numpy(flat["path_accepted"]),
        *tensors,
        extra={n: v for n, v in flat.items() if n not in (*STRUCTURE, *ENTROPIES)},
    )


def _check_trees(path: Path, parent: Any, root: Longs) -> None:
    """Trees must start where the `rounds` rows say; anything else would shift every tree."""
    if int((parent < 0).sum()) != len(root) or not bool((parent[root] == -1).all()):
        raise TraceCorruptError(
            str(path),
            expected="trees of the sizes that the rounds table states",
            found="others",
            fix="collect them again",
        )


def _first_child(parent: Any, root: Longs) -> Longs:
    """`[T]` flat index of each node's first child, -1 for none.

    Children of one node stand together, so a first child is a row whose parent is not the one
    of the row before; at a new tree the root stands between.
    """
    firsts = np.flatnonzero(parent[1:] != parent[:-1]) + 1
    firsts = firsts[parent[firsts] >= 0]
    tree = root[np.searchsorted(root, firsts, side="right") - 1]
    found = np.full(len(parent), -1, np.int64)
    found[tree + parent[firsts]] = firsts
    return found
