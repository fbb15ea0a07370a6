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

from specctl.artifacts.onnx.build import BATCH, graph, node, value
from specctl.artifacts.onnx.schema import FLOAT, INT64, Message
from specctl.policy.gates import log_threshold
from specctl.policy.records import SparseGates

OPERATORS = ("Less", "Cast", "ArgMax", "ReduceMax", "Gather", "Mul")
OUTPUT = "stopped_at"


def gates_graph(shape: SparseGates) -> Message:
    """The graph of the gates; a function of the record alone."""
    given = value("gate_logp", FLOAT, BATCH, len(shape.gate_levels))
    found = value(OUTPUT, INT64, BATCH)
    tables: dict[str, NDArray[Any]] = {
        "thresholds": np.array([log_threshold(p) for p in shape.thresholds], np.float32),
        "levels": np.array(shape.gate_levels, np.int64),
    }
    return graph("specctl_gates", _nodes(), [given], [found], tables)


def _nodes() -> list[Message]:
    return [
        node("Less", ["gate_logp", "thresholds"], ["closed"]),
        node("Cast", ["closed"], ["closed_float"], to=FLOAT),
        node("ArgMax", ["closed_float"], ["first"], axis=1, keepdims=0),
        node("Gather", ["levels", "first"], ["level"]),
        node("ReduceMax", ["closed_float"], ["any"], axes=[1], keepdims=0),
        node("Cast", ["any"], ["any_int"], to=INT64),
        node("Mul", ["level", "any_int"], [OUTPUT]),
    ]
