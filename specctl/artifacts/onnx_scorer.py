"""A scorer as an ONNX graph: what it says of nodes, for runtimes without torch.

    features [n, F] ─ Gemm ─ Relu ─ Gemm ─────── Reshape ─ log_odds [n] ─ Sigmoid ─ prob [n]
    features [n, F] ─ TreeEnsembleRegressor ──── Reshape ─ log_odds [n] ─ Sigmoid ─ prob [n]

The network is the rule's, standardisation folded into its first layer. Trees compare in float32
and go left on the threshold, as the rule does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.artifacts.onnx.build import BATCH, graph, node, value
from specctl.artifacts.onnx.schema import FLOAT, Message
from specctl.policy.scorers import FfnScorer, Scorer, TreesScorer
from specctl.policy.scoring import folded_layer

OPERATORS = ("Gemm", "Relu", "Reshape", "Sigmoid", "TreeEnsembleRegressor")
OUTPUTS = ("log_odds", "prob")
ML_DOMAIN, ML_OPSET = "ai.onnx.ml", 3
Tables = dict[str, NDArray[Any]]


def scorer_graph(scorer: Scorer) -> Message:
    """The graph of a scorer; a function of the record alone."""
    nodes, tables = _network(scorer) if isinstance(scorer, FfnScorer) else _trees(scorer)
    tables["flat"] = np.array([-1], np.int64)
    nodes.append(node("Reshape", ["column", "flat"], ["log_odds"]))
    nodes.append(node("Sigmoid", ["log_odds"], ["prob"]))
    features = value("features", FLOAT, BATCH, len(scorer.features))
    outputs = [value(name, FLOAT, BATCH) for name in OUTPUTS]
    return graph(f"specctl_{scorer.kind}_scorer", nodes, [features], outputs, tables)


def _network(scorer: FfnScorer) -> tuple[list[Message], Tables]:
    w1, b1 = folded_layer(scorer)
    w2 = np.array(scorer.w2, np.float32)[:, None]
    nodes = [
        node("Gemm", ["features", "w1", "b1"], ["hidden"]),
        node("Relu", ["hidden"], ["active"]),
        node("Gemm", ["active", "w2", "b2"], ["column"]),
    ]
    return nodes, {"w1": w1, "b1": b1, "w2": w2, "b2": np.array(scorer.b2, np.float32)}


def _trees(scorer: TreesScorer) -> tuple[list[Message], Tables]:
    columns = tree_attributes(scorer)
    ensemble = node(
        "TreeEnsembleRegressor",
        ["features"],
        ["column"],
        domain=ML_DOMAIN,
        n_targets=1,
        **columns,
    )
    return [ensemble], {}


def tree_attributes(scorer: TreesScorer) -> dict[str, Any]:
    """The ensemble's columns: one entry a node of each tree, and one a leaf."""
    placed = [
        node for tree, root in enumerate(scorer.roots) for node in _places(scorer, tree, root)
    ]
    leaf = [scorer.feature[i] < 0 for _, _, i, _, _ in placed]
    leaves = [place for place, is_leaf in zip(placed, leaf, strict=True) if is_leaf]
    return {
        "nodes_treeids": [tree for tree, *_ in placed],
        "nodes_nodeids": [place for _, place, *_ in placed],
        "nodes_featureids": [max(scorer.feature[i], 0) for _, _, i, _, _ in placed],
        "nodes_values": [scorer.threshold[i] for _, _, i, _, _ in placed],
        "nodes_modes": ["LEAF" if is_leaf else "BRANCH_LEQ" for is_leaf in leaf],
        "nodes_truenodeids": [left for *_, left, _ in placed],
        "nodes_falsenodeids": [right for *_, right in placed],
        "target_treeids": [tree for tree, *_ in leaves],
        "target_nodeids": [place for _, place, *_ in leaves],
        "target_ids": [0] * len(leaves),
        "target_weights": [scorer.value[i] for _, _, i, _, _ in leaves],
    }


def _places(scorer: TreesScorer, tree: int, root: int) -> list[tuple[int, int, int, int, int]]:
    """Tree, place in it, index in the arrays, places of the children (0 at a leaf); root first."""
    order = [root]
    for i in order:  # grows as it goes: parents before children
        if scorer.feature[i] >= 0:
            order += [scorer.left[i], scorer.right[i]]
    place = {i: number for number, i in enumerate(order)}
    children = [(place.get(scorer.left[i], 0), place.get(scorer.right[i], 0)) for i in order]
    return [
        (tree, number, i, *pair)
        for number, (i, pair) in enumerate(zip(order, children, strict=True))
    ]
