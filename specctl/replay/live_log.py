"""Live logs as flat arrays, for fits alone: they hold the rounds that one policy ran.

A live log cannot be replayed, but what it drafted and what the target said of it are labels all
the same. `node_match` tells, where the parent was verified; below a rejected token everything is
rejected, below a token that nobody verified everything is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.errors import TraceCorruptError, TraceEmptyError, TraceMismatchError
from specctl.parquet import read_columns
from specctl.replay.log import LogChunk, Support, Traces
from specctl.replay.outcomes import LoggedDraft
from specctl.replay.positions import Bools, Ints, Longs, Positions

ROUND_COLUMNS = (
    "prompt_id",
    "category",
    "num_drafted",
    "top_k",
    "offered_depth",
    "offered_width",
    "context_tokens",
)
NODE_COLUMNS = (
    "node_idx",
    "parent_idx",
    "depth",
    "node_match",
    "draft_logp",
    "parent_entropy",
    "parent_topk_entropy",
)
UNSEEN = -1


@dataclass(frozen=True)
class LiveLog:
    """A live trace set, opened for fits."""

    support: Support
    files: tuple[dict[str, Path], ...]

    @classmethod
    def open(cls, traces: Traces) -> LiveLog:
        """Looks at the rounds table for what was drafted.

        Raises:
            TraceEmptyError: no drafted round.
            TraceMismatchError: rounds of different numbers of children.
        """
        files = tuple(traces.commit_files())
        offered = [
            _read(part["rounds"], ("top_k", "offered_depth", "offered_width")) for part in files
        ]
        drafted = [part for part in offered if part["offered_depth"].max() > 0]
        if not drafted:
            raise TraceEmptyError(
                "live traces", expected="drafted rounds", found="none", fix="collect with a drafter"
            )
        top_ks = np.unique(np.concatenate([part["top_k"] for part in drafted]))
        if len(top_ks) > 1:
            raise TraceMismatchError(
                "live traces",
                expected="one number of children per node",
                found=f"top_k {top_ks.tolist()}",
                fix="fit to these folders one at a time",
            )
        depth, width = (
            max(int(part[name].max()) for part in drafted)
            for name in ("offered_depth", "offered_width")
        )
        return cls(Support(int(top_ks[0]), width, depth, nested=False), files)

    def chunks(self, extra: tuple[str, ...] = ()) -> Iterator[LogChunk]:
        """One a commit; without `extra`: rounds do not hold the text between them."""
        del extra
        return map(_chunk, self.files)

    def known(self, chunk: LogChunk, rows: Tensor, draft: LoggedDraft) -> Tensor:
        """`[B, P]` bool: whether the log tells of each drafted node."""
        del rows
        unknown = torch.from_numpy(chunk.extra["unknown"])
        return ~unknown[draft.node.clamp(min=0)]


def _read(path: Path, columns: tuple[str, ...]) -> dict[str, Any]:
    """Columns as numpy arrays; texts as objects, and `UNSEEN` for an unknown match."""
    import pyarrow.compute as pc

    table = read_columns(path, columns)
    found = {}
    for name in columns:
        column = table[name]
        if name == "node_match":
            column = pc.fill_null(column.cast("int8"), UNSEEN)
        found[name] = column.to_numpy()
    return found


def _chunk(files: dict[str, Path]) -> LogChunk:
    rounds, nodes = _read(files["rounds"], ROUND_COLUMNS), _read(files["nodes"], NODE_COLUMNS)
    sizes = rounds["num_drafted"].astype(np.int64) + 1
    root = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    _check_trees(files["nodes"], nodes, root, int(sizes.sum()))
    parent = _flat_parents(nodes, np.repeat(np.arange(len(root)), sizes))
    on_path, unknown = _labels(parent, nodes["depth"], nodes["node_match"])
    matched = (np.add.reduceat(on_path, root, dtype=np.int32) - 1).astype(np.int32)
    floats = ("draft_logp", "parent_entropy", "parent_topk_entropy")
    return LogChunk(
        _positions(rounds, matched),
        matched,
        torch.from_numpy(root),
        torch.from_numpy(_first_child(parent)),
        torch.from_numpy(on_path),
        *(torch.from_numpy(nodes[name].copy()) for name in floats),
        extra={"unknown": unknown},
    )


def _check_trees(path: Path, nodes: dict[str, Any], root: Longs, num_nodes: int) -> None:
    parent = nodes["parent_idx"]
    roots = np.flatnonzero(parent < 0)
    if len(parent) != num_nodes or not np.array_equal(roots, root):
        raise TraceCorruptError(
            str(path),
            expected="trees of the sizes that the rounds table states, in its order",
            found="others",
            fix="collect them again",
        )


def _flat_parents(nodes: dict[str, Any], tree: Longs) -> Longs:
    """`[T]` flat row of each node's parent, -1 at roots; `parent_idx` counts slots, with gaps."""
    slots = int(nodes["node_idx"].max()) + 1
    key = tree * slots + nodes["node_idx"]  # rising: trees one after another, slots within
    wanted = tree * slots + nodes["parent_idx"]
    return np.where(nodes["parent_idx"] < 0, -1, np.searchsorted(key, wanted))


def _first_child(parent: Longs) -> Longs:
    """`[T]` flat row of each node's first child, -1 for none; siblings stand together."""
    firsts = np.flatnonzero(np.diff(parent, prepend=-1) != 0)
    firsts = firsts[parent[firsts] >= 0]
    found = np.full(len(parent), -1, np.int64)
    found[parent[firsts]] = firsts
    return found


def _labels(parent: Longs, depth: Ints, match: Ints) -> tuple[Bools, Bools]:
    """Which paths the target took, and of which nothing is known; a level at a time."""
    on_path = depth == 0
    unknown = np.zeros(len(depth), np.bool_)
    for level in range(1, int(depth.max()) + 1):
        rows = np.flatnonzero(depth == level)
        above = parent[rows]
        on_path[rows] = on_path[above] & (match[rows] == 1)
        unknown[rows] = unknown[above] | (on_path[above] & (match[rows] == UNSEEN))
    return on_path, unknown


def _positions(rounds: dict[str, Any], matched: Ints) -> Positions:
    """Every round by itself: of a live log no other start is known."""
    prompt_ids, prompt = np.unique(rounds["prompt_id"].astype(str), return_inverse=True)
    categories, category = np.unique(rounds["category"].astype(str), return_inverse=True)
    return Positions(
        start=np.arange(len(matched) + 1),
        prompt=prompt.astype(np.int32),
        prompt_ids=tuple(prompt_ids.tolist()),
        category=category.astype(np.int32),
        categories=tuple(categories.tolist()),
        remaining=matched + 1,
        context_tokens=rounds["context_tokens"],
    )
