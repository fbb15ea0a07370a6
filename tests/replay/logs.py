"""Small logs with a telling of every policy in plain Python, one node at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from scripts.synthetic_trace import write
from specctl.logs.node_table import TABLE_COLUMNS, node_table
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy import FullTree


def random_traces(
    folder: Path,
    *,
    num_prompts: int = 2,
    depth: int = 5,
    top_k: int = 4,
    nested: bool = True,
    seed: int = 0,
) -> TraceSet:
    """A dense trace set of random trees, 128 positions a prompt."""
    shape = FullTree(depth=depth, top_k=top_k, nested=nested)
    write(folder, shape, num_nodes=1, prompts_per_commit=num_prompts, seed=seed)
    return TraceSet.open(folder)


def random_log(folder: Path, **options: Any) -> DenseLog:
    """The same, opened for replay."""
    return DenseLog.open(random_traces(folder, **options))


def log_fixtures(**options: Any) -> tuple[Any, Any]:
    """Fixtures of a module: the trace set of `random_traces`, and its log."""

    @pytest.fixture(scope="module")
    def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
        return random_traces(tmp_path_factory.mktemp("dense") / "traces", **options)

    @pytest.fixture(scope="module")
    def log(traces: TraceSet) -> DenseLog:
        return DenseLog.open(traces)

    return traces, log


@dataclass(frozen=True)
class PlainTree:
    """One logged tree as Python lists."""

    parent: list[int]
    logp: list[float]
    on_path: list[bool]
    remaining: int

    @cached_property
    def children(self) -> list[list[int]]:
        """Of every node, likeliest first."""
        below: list[list[int]] = [[] for _ in self.parent]
        for node, up in enumerate(self.parent):
            if up >= 0:
                below[up].append(node)
        return below

    @cached_property
    def joint(self) -> list[float]:
        """Sums from the root down, in single precision as the drafter adds them."""
        import numpy as np

        total = [np.float32(0)]
        for node in range(1, len(self.parent)):
            total.append(total[self.parent[node]] + np.float32(self.logp[node]))
        return total

    @cached_property
    def depth(self) -> list[int]:
        found = [0]
        for up in self.parent[1:]:
            found.append(found[up] + 1)
        return found


def plain_trees(traces: TraceSet) -> list[list[PlainTree]]:
    """Every request's trees, position by position, straight from the tables."""
    rounds = traces.scan("rounds").collect()
    nodes = traces.scan("nodes").collect().partition_by("request_id", "round_idx", as_dict=True)
    requests: dict[str, list[PlainTree]] = {}
    totals = dict(
        rounds.group_by(pl.col("request_id").cast(pl.String))
        .agg((pl.col("position") + pl.col("num_emitted")).max())
        .iter_rows()
    )
    for request, index, position in rounds.select(
        pl.col("request_id").cast(pl.String), "round_idx", "position"
    ).iter_rows():
        table = nodes[(request, index)]
        tree = PlainTree(
            table["parent_idx"].to_list(),
            table["draft_logp"].to_list(),
            [bool(flag) for flag in table["path_accepted"]],
            totals[request] - position,
        )
        requests.setdefault(request, []).append(tree)
    return list(requests.values())


def frontier(tree: PlainTree, depth: int, top_k: int, width: int) -> list[int]:
    """Nodes that are drafted when the best `width` of a level are expanded, in plain Python."""
    pool, expanded = [0], [0]
    for level in range(1, depth + 1):
        candidates = [c for node in expanded for c in tree.children[node][:top_k]]
        pool += candidates
        if level < depth:
            expanded = sorted(candidates, key=lambda n: -tree.joint[n])[:width]
    return pool


def static_tree(tree: PlainTree, depth: int, top_k: int, num_tokens: int) -> list[int]:
    """What EAGLE-2 submits (arXiv:2406.16858): expand the best of a level, keep the best of all."""
    pool = frontier(tree, depth, top_k, top_k)
    best = sorted(range(len(pool)), key=lambda i: (-tree.joint[pool[i]], i))
    return [pool[i] for i in best[:num_tokens]]


@dataclass(frozen=True)
class HeldLog(DenseLog):
    """A log whose chunks stand in memory."""

    held: tuple[LogChunk, ...] = ()

    def _chunks(self, extra: tuple[str, ...]) -> Iterator[LogChunk]:
        return iter(self.held)


def target_log(
    log: DenseLog, *, forgotten: bool = False, without_path: frozenset[str] = frozenset()
) -> DenseLog:
    """The log with a known target: the drafter itself, but for depth 1 if `forgotten`; prompts
    `without_path` leave every tree at once."""

    def known(chunk: LogChunk) -> LogChunk:
        gone = np.isin(chunk.positions.row_prompts.astype(str), sorted(without_path))
        sizes = np.diff(chunk.root.numpy(), append=chunk.num_nodes)
        on_path = chunk.on_path.clone()
        on_path[np.repeat(gone, sizes)] = False
        on_path[chunk.root] = True
        cut = replace(chunk, on_path=on_path, matched=np.where(gone, 0, chunk.matched))
        nodes = node_table(cut)
        seen = (nodes.parent >= 0) & nodes.on_path[nodes.parent] & (not forgotten)
        logp = np.where(seen, nodes.draft_logp, np.nan).astype(np.float32)
        return replace(cut, extra=chunk.extra | {"target_logp": logp})

    held = tuple(map(known, log.chunks(extra=TABLE_COLUMNS)))
    return HeldLog(**vars(log), held=held)
