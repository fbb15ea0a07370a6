"""A log: how it is read, what it refuses, and which nodes a fit meets in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from specctl.errors import TraceCorruptError, TraceEmptyError, TraceError, TraceMismatchError
from specctl.features import NO_TEXT, node_features
from specctl.logs import tree_log
from specctl.logs.logged_draft import recent_text
from specctl.logs.node_sample import logged_nodes
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import TEXT_COLUMNS, UNKNOWN, DenseLog, _first_child, _live_labels
from specctl.policy.rules import BaseShape
from tests.replay.logs import PlainTree, frontier, plain_trees, random_traces
from tests.replay.reports import live_traces


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
    without = next(DenseLog.open(traces).chunks(extra=()))
    assert with_entropy.entropy.isfinite().all()
    assert without.entropy.isnan().all()
    assert without.topk_entropy.isnan().all()


def test_some_prompts_of_a_log_keep_their_text(traces: TraceSet) -> None:
    log = DenseLog.open(traces)
    [chunk] = log.chunks(extra=TEXT_COLUMNS)
    first, last = (int(edge) for edge in chunk.positions.start[-2:])
    [part] = log.only(chunk.positions.prompt_ids[-1:]).chunks(extra=TEXT_COLUMNS)
    text = recent_text(part, slice(None))
    assert torch.equal(text, recent_text(chunk, slice(first, last)))
    assert (text != NO_TEXT).sum(1).tolist()[:3] == [1, 2, 3]


def test_a_log_read_without_tokens_and_live_traces_have_no_text(
    traces: TraceSet, tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match=r"dense traces, which hold every token"):
        recent_text(next(DenseLog.open(traces).chunks()), slice(0, 1))
    asking = BaseShape(2, 2, 2, max_tokens=1, needs_text=True)
    live = logged_nodes(live_traces(tmp_path / "live", offered_depth=1))
    with pytest.raises(TraceError, match=r"these are live.*collect with --dense"):
        next(live.batches(asking))


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


# --------------------------------------------------------------------------- nodes and labels


def test_nodes_are_those_of_the_frontier_with_the_logged_columns(tmp_path: Path) -> None:
    traces = random_traces(tmp_path / "log", num_prompts=2, depth=4, top_k=4)
    trees = [tree for request in plain_trees(traces) for tree in request]
    shape = BaseShape(3, 3, 2, max_tokens=1)
    batches = list(logged_nodes(traces).batches(shape))
    assert sum(len(batch.prompt_id) for batch in batches) == len(trees) == 256
    rows = ((batch, row) for batch in batches for row in range(len(batch.prompt_id)))
    for tree, (batch, row) in zip(trees, rows, strict=True):
        wanted = frontier(tree, 3, 3, 2)
        valid = batch.pool.valid[row]
        names = ("joint_logp", "draft_logp", "depth")
        found = node_features(batch.pool, names)[row][valid].numpy()
        plain = [[tree.joint[n], tree.logp[n], tree.depth[n]] for n in wanted]
        # Both in the order of levels; a level by joint probability, hence sorted to compare.
        np.testing.assert_allclose(
            found[np.lexsort(found.T)], np.array(plain)[np.lexsort(np.array(plain).T)], rtol=1e-6
        )
        known = [n for n in wanted if not any_beyond(tree, n)]
        assert int(batch.known[row].sum()) == len(known)
        assert int(batch.accepted[row].sum()) == sum(tree.on_path[n] for n in known)


def any_beyond(tree: PlainTree, node: int) -> bool:
    """The text followed the path to the node and ended before it."""
    path = []
    while node > 0:
        path.append(node)
        node = tree.parent[node]
    return any(tree.on_path[tree.parent[n]] and tree.depth[n] == tree.remaining + 1 for n in path)


def test_what_the_text_ended_before_is_unknown_and_what_left_it_is_not(tmp_path: Path) -> None:
    """The file's null of `path_accepted`, against the rule that it stands for."""
    traces = random_traces(tmp_path / "log", num_prompts=2, depth=4, top_k=3)
    trees = [tree for request in plain_trees(traces) for tree in request]
    [chunk] = DenseLog.open(traces).chunks()
    known = [not any_beyond(tree, n) for tree in trees for n in range(len(tree.parent))]
    assert chunk.known.tolist() == known
    assert 0 < known.count(False) < len(known) / 10
    assert not (chunk.on_path & ~chunk.known).any()


def test_live_labels_follow_the_target_and_stop_where_nobody_looked() -> None:
    #  0 ┬ 1 ok ┬ 3 ok ─ 5 unseen      1, 3 accepted; 5 unknown
    #    │      └ 4 no ─ 6 unseen      below a rejected token all is rejected
    #    └ 2 no ─ 7 ok                 a match off the path is no acceptance
    parent = np.array([-1, 0, 0, 1, 1, 3, 4, 2])
    depth = np.array([0, 1, 1, 2, 2, 3, 3, 2], np.int16)
    match = np.array([UNKNOWN, 1, 0, 1, 0, UNKNOWN, UNKNOWN, 1], np.int8)
    flat = {"node_idx": np.arange(8), "parent_idx": parent, "depth": depth, "node_match": match}
    _, on_path, known = _live_labels(flat, np.array([0]))
    assert on_path.tolist() == [True, True, False, True, False, False, False, False]
    assert known.tolist() == [True, True, True, True, True, False, True, True]


def test_live_slots_have_gaps() -> None:
    flat = {
        "node_idx": np.array([0, 1, 2, 9, 10, 0, 4]),
        "parent_idx": np.array([-1, 0, 0, 2, 2, -1, 0]),
        "depth": np.array([0, 1, 1, 2, 2, 0, 1]),
        "node_match": np.full(7, UNKNOWN),
    }
    root = np.array([0, 5])
    parent, _, _ = _live_labels(flat, root)
    assert parent.tolist() == [-1, 0, 0, 2, 2, -1, 0]
    assert _first_child(parent, root).tolist() == [1, -1, 3, -1, -1, 6, -1]
