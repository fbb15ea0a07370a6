"""Logged nodes as fits meet them: which, with what features, and what is known of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specctl.features import node_features
from specctl.logs.node_sample import logged_nodes
from specctl.logs.tree_log import UNKNOWN, DenseLog, _first_child, _live_labels
from specctl.policy import JointThreshold, build_shape
from specctl.policy.rules import BaseShape
from tests.replay.logs import PlainTree, plain_trees, random_traces


def frontier(tree: PlainTree, depth: int, top_k: int, width: int) -> list[int]:
    """Nodes that are drafted when the best `width` of a level are expanded, in plain Python."""
    pool, expanded = [0], [0]
    for level in range(1, depth + 1):
        candidates = [c for node in expanded for c in tree.children[node][:top_k]]
        pool += candidates
        if level < depth:
            expanded = sorted(candidates, key=lambda n: -tree.joint[n])[:width]
    return pool


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


def test_prompts_are_chosen_and_told(tmp_path: Path) -> None:
    traces = random_traces(tmp_path / "log", num_prompts=3, depth=2, top_k=2)
    source = logged_nodes(traces)
    wanted = traces.prompt_ids[1:]
    rule = build_shape(JointThreshold(depth=2, top_k=2, min_prob=0.0))
    batches = list(source.batches(rule, wanted))
    assert {name for batch in batches for name in batch.prompt_id} == set(wanted)
    assert all(batch.scores is not None for batch in batches)


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
