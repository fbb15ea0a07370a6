"""What a policy learned as an ONNX graph: the bins of HeteroSpec here, scorers in `onnx_scorer`,
gates in `onnx_gates`.

The decision of the bins is equal to the rule's on every float32:

    phi [n] ─ Unsqueeze ─┐
    edges [E] ───────── Less ─ Cast ─ ReduceSum ─ bin [n] ─┬─ Gather(depths) ─ depth [n]
                                                           └─ Gather(tokens) ─ num_tokens [n]

bin = number of edges strictly below phi, in float32: what `torch.bucketize(right=False)` does.
The graphs are built without onnx; onnxruntime is imported where one is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.artifacts import onnx_gates, onnx_scorer
from specctl.artifacts.onnx.build import BATCH, graph, model, node, value
from specctl.artifacts.onnx.schema import FLOAT, INT64, Message
from specctl.artifacts.onnx.wire import encode
from specctl.errors import UsageError
from specctl.policy.records import EntropyBins, Policy, ScoredTree, SparseGates

OPSET = 17
"""Old enough for every runtime of the last years; onnxruntime 1.31 takes far newer ones."""
OUTPUTS = ("bin", "depth", "num_tokens")
BIN_OPERATORS = ("Unsqueeze", "Less", "Cast", "ReduceSum", "Gather")
ALLOWED_OPERATORS = {*BIN_OPERATORS, *onnx_scorer.OPERATORS, *onnx_gates.OPERATORS}
"""All that a twin may consist of: no control flow, no functions, no operators of others."""
Int64 = NDArray[np.int64]


def twin_bytes(policy: Policy) -> bytes | None:
    """The ONNX file of a policy; None for shapes that learned nothing but thresholds."""
    twin = twin_model(policy)
    return None if twin is None else encode(twin)


def twin_model(policy: Policy) -> Message | None:
    """The same before it is written: a function of the record alone."""
    shape = policy.shape
    if isinstance(shape, EntropyBins):
        return model(bins_graph(shape), {"": OPSET})
    if isinstance(shape, SparseGates):
        return model(onnx_gates.gates_graph(shape), {"": OPSET})
    if not isinstance(shape, ScoredTree):
        return None
    trees = {onnx_scorer.ML_DOMAIN: onnx_scorer.ML_OPSET} if shape.scorer.kind == "trees" else {}
    return model(onnx_scorer.scorer_graph(shape.scorer), {"": OPSET, **trees})


def bins_graph(shape: EntropyBins) -> Message:
    """The graph of the bins; a function of the record alone."""
    outputs = [value(name, INT64, BATCH) for name in OUTPUTS]
    tables: dict[str, NDArray[Any]] = {
        "last_axis": np.array([1], dtype=np.int64),
        "edges": np.array(shape.edges, dtype=np.float32),
        "depths": np.array(shape.plan_depths, dtype=np.int64),
        "tokens": np.array(shape.plan_tokens, dtype=np.int64),
    }
    phi = value("phi", FLOAT, BATCH)
    return graph("specctl_entropy_bins", _nodes(), [phi], outputs, tables)


def _nodes() -> list[Message]:
    return [
        node("Unsqueeze", ["phi", "last_axis"], ["phi_column"]),
        node("Less", ["edges", "phi_column"], ["edge_below"]),
        node("Cast", ["edge_below"], ["edge_below_int"], to=INT64),
        node("ReduceSum", ["edge_below_int", "last_axis"], ["bin"], keepdims=0),
        node("Gather", ["depths", "bin"], ["depth"]),
        node("Gather", ["tokens", "bin"], ["num_tokens"]),
    ]


def twin_decisions(model: Path | bytes, phi: NDArray[np.float32]) -> tuple[Int64, Int64, Int64]:
    """Bin, depth (levels) and num_tokens (root counted) of each Φ, by onnxruntime on one thread.

    Args:
        model: a file that the loader has accepted, or its bytes.
        phi: `[n]` float32, nats.

    Raises:
        UsageError: another dtype or shape, or a NaN: it has no bin.
    """
    if phi.dtype != np.float32 or phi.ndim != 1 or np.isnan(phi).any():
        raise UsageError(
            "phi given to the ONNX twin",
            expected="float32 [n] without NaN",
            found=f"{phi.dtype} {list(phi.shape)}, {int(np.isnan(phi).sum())} NaN",
            fix="leave out rounds without phi",
        )
    bins, depths, tokens = _session(model).run(list(OUTPUTS), {"phi": phi})
    return bins, depths, tokens


def twin_stops(model: Path | bytes, gate_logp: NDArray[np.float32]) -> Int64:
    """`[n]` level of the gate that closes, 0 for none, by onnxruntime on one thread.

    Args:
        model: a file that the loader has accepted, or its bytes.
        gate_logp: `[n, G]` float32, nats, of the likeliest path to each gate.

    Raises:
        UsageError: another dtype or shape, or a NaN.
    """
    if gate_logp.dtype != np.float32 or gate_logp.ndim != 2 or np.isnan(gate_logp).any():
        raise UsageError(
            "gate_logp given to the ONNX twin",
            expected="float32 [n, G] without NaN",
            found=f"{gate_logp.dtype} {list(gate_logp.shape)}",
            fix="leave out what was not drafted",
        )
    found: Int64
    [found] = _session(model).run([onnx_gates.OUTPUT], {"gate_logp": gate_logp})
    return found


def twin_log_odds(model: Path | bytes, features: NDArray[np.float32]) -> NDArray[np.float32]:
    """`[n]` log-odds that a scorer's twin gives nodes, by onnxruntime on one thread.

    Args:
        model: a file that the loader has accepted, or its bytes.
        features: `[n, F]` float32, in the order of the scorer.

    Raises:
        UsageError: another dtype or shape, or a NaN.
    """
    if features.dtype != np.float32 or features.ndim != 2 or np.isnan(features).any():
        raise UsageError(
            "features given to the ONNX twin",
            expected="float32 [n, F] without NaN",
            found=f"{features.dtype} {list(features.shape)}, {int(np.isnan(features).sum())} NaN",
            fix="leave out empty slots",
        )
    found: NDArray[np.float32]
    [found] = _session(model).run(["log_odds"], {"features": features})
    return found


def session_options() -> Any:
    """`SessionOptions` of every twin: one thread, as no decision is large enough for two."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return options


def _session(model: Path | bytes) -> Any:
    import onnxruntime as ort

    source = model if isinstance(model, bytes) else str(model)
    return ort.InferenceSession(source, session_options(), providers=["CPUExecutionProvider"])
