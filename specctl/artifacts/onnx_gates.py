"""ECHO's gates as an ONNX graph, equal to the rule on every float32.

    gate_logp [n, G] ─ Less(thresholds) ─ Cast ─┬─ ArgMax ─ Gather(levels) ─┐
                                                └─ ReduceMax ─────────────── Mul ─ stopped_at [n]

`gate_logp` is the log-probability (nats) of the likeliest path to each gate's level; `stopped_at`
is the level of the first gate that closes, 0 where none does. What stands behind a closed gate is
not looked at, so a runtime may ask at every gate with the later columns at 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.policy.gates import log_threshold
from specctl.policy.records import SparseGates

OPERATORS = ("Less", "Cast", "ArgMax", "ReduceMax", "Gather", "Mul")
OUTPUT = "stopped_at"


def gates_graph(shape: SparseGates) -> Any:
    """The `onnx.GraphProto` of the gates; a function of the record alone."""
    from onnx import TensorProto, helper, numpy_helper

    width = len(shape.gate_levels)
    given = helper.make_tensor_value_info("gate_logp", TensorProto.FLOAT, ["n", width])
    found = helper.make_tensor_value_info(OUTPUT, TensorProto.INT64, ["n"])
    tables: dict[str, NDArray[Any]] = {
        "thresholds": np.array([log_threshold(p) for p in shape.thresholds], np.float32),
        "levels": np.array(shape.gate_levels, np.int64),
    }
    initializer = [numpy_helper.from_array(array, name) for name, array in tables.items()]
    return helper.make_graph(_nodes(), "specctl_gates", [given], [found], initializer=initializer)


def _nodes() -> list[Any]:
    from onnx import TensorProto
    from onnx.helper import make_node

    return [
        make_node("Less", ["gate_logp", "thresholds"], ["closed"]),
        make_node("Cast", ["closed"], ["closed_float"], to=TensorProto.FLOAT),
        make_node("ArgMax", ["closed_float"], ["first"], axis=1, keepdims=0),
        make_node("Gather", ["levels", "first"], ["level"]),
        make_node("ReduceMax", ["closed_float"], ["any"], axes=[1], keepdims=0),
        make_node("Cast", ["any"], ["any_int"], to=TensorProto.INT64),
        make_node("Mul", ["level", "any_int"], [OUTPUT]),
    ]
