"""What a dense log refuses, and how it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.errors import TraceCorruptError, TraceEmptyError, TraceMismatchError
from specctl.logs import tree_log
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from tests.replay.logs import plain_trees, random_traces


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    return random_traces(folder, num_prompts=3, depth=3, top_k=2)


@pytest.mark.parametrize("chunk_nodes", [100, 3000, 1 << 20])
def test_chunks_hold_whole_requests_in_order(
    traces: TraceSet, monkeypatch: pytest.MonkeyPatch, chunk_nodes: int
) -> None:
    monkeypatch.setattr(tree_log, "CHUNK_NODES", chunk_nodes)
    requests = plain_trees(traces)
    trees = [tree for request in requests for tree in request]
    row = 0
    for chunk in DenseLog.open(traces).chunks():
        assert set(np.diff(chunk.positions.start)) == {128}
        ends = [*chunk.root.tolist()[1:], chunk.num_nodes]
        for index, (start, end) in enumerate(zip(chunk.root.tolist(), ends, strict=True)):
            tree = trees[row + index]
            assert chunk.draft_logp[start:end].tolist() == tree.logp
            assert chunk.on_path[start:end].tolist() == tree.on_path
            firsts = [start + below[0] if below else -1 for below in tree.children]
            assert chunk.first_child[start:end].tolist() == firsts
            assert chunk.positions.remaining[index] == tree.remaining
        row += chunk.positions.num_rows
    assert row == len(trees)


def test_entropies_that_are_not_read_are_nan(traces: TraceSet) -> None:
    with_entropy = next(DenseLog.open(traces).chunks())
    without = next(DenseLog.open(traces).chunks(with_entropy=False))
    assert with_entropy.entropy.isfinite().all()
    assert without.entropy.isnan().all()
    assert without.topk_entropy.isnan().all()


def test_folders_of_different_support_are_refused(tmp_path: Path) -> None:
    folders = [tmp_path / "deep", tmp_path / "shallow"]
    for folder, depth in zip(folders, (3, 2), strict=True):
        random_traces(folder, depth=depth, top_k=2)
    both = TraceSet(tuple(part for folder in folders for part in TraceSet.open(folder).parts))
    with pytest.raises(TraceMismatchError, match="differ in their trees"):
        DenseLog.open(both)


def test_an_empty_set_is_refused(traces: TraceSet) -> None:
    with pytest.raises(TraceEmptyError, match="no rounds"):
        DenseLog.open(TraceSet((replace(traces.parts[0], segments=()),)))


Edit = Callable[[pa.Table], pa.Table]


def _set(name: str, change: Callable[[Any], Any]) -> Edit:
    def edit(table: pa.Table) -> pa.Table:
        values = change(table[name].to_numpy().copy())
        return table.set_column(table.column_names.index(name), name, [pa.array(values)])

    return edit


def _first_bigger(values: Any) -> Any:
    values[:2] += np.array([1, -1], values.dtype)
    return values


def _one_root_more(values: Any) -> Any:
    values[5] = -1
    return values


DAMAGES: dict[str, tuple[str, Edit, str]] = {
    "a node row is lost": ("nodes", lambda t: t.slice(0, t.num_rows - 1), "fewer"),
    "a node row too many": ("nodes", lambda t: pa.concat_tables([t, t.slice(0, 1)]), "more"),
    "a tree of another size": (
        "rounds",
        _set("num_drafted", _first_bigger),
        "of other sizes",
    ),
    "a root inside a tree": ("nodes", _set("parent_idx", _one_root_more), "of other sizes"),
    "positions out of order": ("rounds", _set("position", lambda p: p[::-1].copy()), "ascending"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_tables_that_do_not_fit_together(
    traces: TraceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(tree_log, "CHUNK_NODES", 1 << 20)
    log = DenseLog.open(traces)
    table, edit, message = DAMAGES[damage]
    path = log.files[0][table]
    damaged = edit(pq.read_table(path))
    pq.write_table(damaged, tmp_path / f"{table}.parquet")
    files = log.files[0] | {table: tmp_path / f"{table}.parquet"}
    with pytest.raises(TraceCorruptError, match=message):
        list(replace(log, files=(files,)).chunks())
