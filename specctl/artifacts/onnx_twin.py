"""A learned policy as an ONNX graph, for runtimes without torch.

HeteroSpec's bins, equal to the rule on every float32 (bin = number of edges strictly below phi):

    phi [n] ─ Unsqueeze ─┐
    edges [E] ───────── Less ─ Cast ─ ReduceSum ─ bin [n] ─┬─ Gather(depths) ─ depth [n]
                                                           └─ Gather(tokens) ─ num_tokens [n]

ECHO's gates, equal likewise: `gate_logp` is the log-probability (nats) of the likeliest path to
each gate's level, `stopped_at` the level of the first gate that closes, 0 if none does. Columns
after a closed gate are ignored, so a runtime may decide gate by gate, with later columns at 0:

    gate_logp [n, G] ─ Less(thresholds) ─ Cast ─┬─ ArgMax ─ Gather(levels) ─┐
                                                └─ ReduceMax ─────────────── Mul ─ stopped_at [n]

C2T's network, with standardisation folded into its first layer:

    features [n, F] ─ Gemm ─ Relu ─ Gemm ─ Reshape ─ log_odds [n] ─ Sigmoid ─ prob [n]

A table of acceptance, whose cell is found by counting edges, as for bins:

    features [n, 2] ─┬─ draft_logp ─ Less(edges) ─ ReduceSum ─┐
                     └─ copy_length ─ · columns ─────────── Add ─ Gather ─ log_odds ─ Sigmoid ─ prob

The graph is a function of the record alone. A fit writes it into the artifact, whose manifest lists
it by digest; specctl itself never reads that file. onnx is imported only to build a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.features import SUFFIX_TOKENS
from specctl.policy import (
    EntropyBins,
    FfnScorer,
    Policy,
    ScoredTree,
    Scorer,
    SparseGates,
)
from specctl.policy.echo import log_threshold
from specctl.policy.scorers import folded_layer

OPSET, IR_VERSION = 17, 8
"""Supported by every runtime of recent years."""
BATCH = "n"
"""The one symbolic dimension: rows."""
FLOAT, INT64 = 1, 7
"""`TensorProto.DataType` of the two types that twins hold."""
Tables = dict[str, NDArray[Any]]


def twin_bytes(policy: Policy) -> bytes | None:
    """The ONNX file of a policy; None for shapes without a learned part."""
    shape = policy.shape
    if isinstance(shape, EntropyBins):
        graph = _bins_graph(shape)
    elif isinstance(shape, SparseGates):
        graph = _gates_graph(shape)
    elif isinstance(shape, ScoredTree):
        graph = _scorer_graph(shape.scorer)
    else:
        return None
    import onnx
    from onnx import helper

    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(
        graph, ir_version=IR_VERSION, producer_name="specctl", opset_imports=opsets
    )
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


# ------------------------------------------------------------------ the graphs


def _bins_graph(shape: EntropyBins) -> Any:
    tables: Tables = {
        "last_axis": np.array([1], np.int64),
        "edges": np.array(shape.edges, np.float32),
        "depths": np.array(shape.plan_depths, np.int64),
        "tokens": np.array(shape.plan_tokens, np.int64),
    }
    nodes = [
        _node("Unsqueeze", ["phi", "last_axis"], ["phi_column"]),
        _node("Less", ["edges", "phi_column"], ["edge_below"]),
        _node("Cast", ["edge_below"], ["edge_below_int"], to=INT64),
        _node("ReduceSum", ["edge_below_int", "last_axis"], ["bin"], keepdims=0),
        _node("Gather", ["depths", "bin"], ["depth"]),
        _node("Gather", ["tokens", "bin"], ["num_tokens"]),
    ]
    outputs = [_value(name, INT64, BATCH) for name in ("bin", "depth", "num_tokens")]
    return _graph("specctl_entropy_bins", nodes, _value("phi", FLOAT, BATCH), outputs, tables)


def _gates_graph(shape: SparseGates) -> Any:
    tables: Tables = {
        "thresholds": np.array([log_threshold(p) for p in shape.thresholds], np.float32),
        "levels": np.array(shape.gate_levels, np.int64),
    }
    nodes = [
        _node("Less", ["gate_logp", "thresholds"], ["closed"]),
        _node("Cast", ["closed"], ["closed_float"], to=FLOAT),
        _node("ArgMax", ["closed_float"], ["first"], axis=1, keepdims=0),
        _node("Gather", ["levels", "first"], ["level"]),
        _node("ReduceMax", ["closed_float"], ["any"], axes=[1], keepdims=0),
        _node("Cast", ["any"], ["any_int"], to=INT64),
        _node("Mul", ["level", "any_int"], ["stopped_at"]),
    ]
    given = _value("gate_logp", FLOAT, BATCH, len(shape.gate_levels))
    return _graph("specctl_gates", nodes, given, [_value("stopped_at", INT64, BATCH)], tables)


def _scorer_graph(scorer: Scorer) -> Any:
    tables: Tables = {}
    if isinstance(scorer, FfnScorer):
        w1, b1 = folded_layer(scorer)
        w2, b2 = np.array(scorer.w2, np.float32)[:, None], np.array(scorer.b2, np.float32)
        tables = {"w1": w1, "b1": b1, "w2": w2, "b2": b2}
        nodes = [
            _node("Gemm", ["features", "w1", "b1"], ["hidden"]),
            _node("Relu", ["hidden"], ["active"]),
            _node("Gemm", ["active", "w2", "b2"], ["column"]),
        ]
    else:
        columns = len(scorer.edges) + 1
        tables = {
            "edges": np.array(scorer.edges, np.float32),
            "first": np.array([0], np.int64),
            "second": np.array([1], np.int64),
            "columns": np.array([columns], np.int64),
            "middle": np.array([SUFFIX_TOKENS * columns], np.int64),
            "table": np.array(scorer.log_odds, np.float32).flatten(),
        }
        nodes = [
            _node("Gather", ["features", "first"], ["draft_logp"], axis=1),
            _node("Less", ["edges", "draft_logp"], ["edge_below"]),
            _node("Cast", ["edge_below"], ["edge_below_int"], to=INT64),
            _node("ReduceSum", ["edge_below_int", "second"], ["bin"], keepdims=1),
            _node("Gather", ["features", "second"], ["copy_length"], axis=1),
            _node("Cast", ["copy_length"], ["copied"], to=INT64),
            _node("Mul", ["copied", "columns"], ["row"]),
            _node("Add", ["row", "middle"], ["row_start"]),
            _node("Add", ["row_start", "bin"], ["cell"]),
            _node("Gather", ["table", "cell"], ["column"]),
        ]
    tables["flat"] = np.array([-1], np.int64)
    nodes.append(_node("Reshape", ["column", "flat"], ["log_odds"]))
    nodes.append(_node("Sigmoid", ["log_odds"], ["prob"]))
    features = _value("features", FLOAT, BATCH, len(scorer.features))
    outputs = [_value(name, FLOAT, BATCH) for name in ("log_odds", "prob")]
    return _graph(f"specctl_{scorer.kind}_scorer", nodes, features, outputs, tables)


def _graph(
    name: str, nodes: Sequence[Any], given: Any, outputs: Sequence[Any], tables: Tables
) -> Any:
    """A graph of nodes in their order, and of constants by name."""
    from onnx import helper, numpy_helper

    constants = [numpy_helper.from_array(array, key) for key, array in tables.items()]
    return helper.make_graph(nodes, name, [given], outputs, constants)


def _node(op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    from onnx import helper

    return helper.make_node(op_type, inputs, outputs, **attributes)


def _value(name: str, elem_type: int, *dims: int | str) -> Any:
    """An input or output; text names a symbolic dimension."""
    from onnx import helper

    return helper.make_tensor_value_info(name, elem_type, dims)
