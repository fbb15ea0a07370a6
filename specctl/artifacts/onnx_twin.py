"""What a policy learned as an ONNX graph: the bins of HeteroSpec here, scorers in `onnx_scorer`,
gates in `onnx_gates`.

The decision of the bins is equal to the rule's on every float32:

    phi [n] ─ Unsqueeze ─┐
    edges [E] ───────── Less ─ Cast ─ ReduceSum ─ bin [n] ─┬─ Gather(depths) ─ depth [n]
                                                           └─ Gather(tokens) ─ num_tokens [n]

bin = number of edges strictly below phi, in float32: what `torch.bucketize(right=False)` does.
onnx and onnxruntime are imported where they are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.artifacts import onnx_gates, onnx_scorer
from specctl.errors import InvariantError, UsageError
from specctl.policy.records import EntropyBins, Policy, ScoredTree, Scorer, SparseGates

OPSET, IR_VERSION = 17, 8
"""Old enough for every runtime of the last years; onnxruntime 1.31 takes far newer ones."""
OUTPUTS = ("bin", "depth", "num_tokens")
BIN_OPERATORS = ("Unsqueeze", "Less", "Cast", "ReduceSum", "Gather")
ALLOWED_OPERATORS = {*BIN_OPERATORS, *onnx_scorer.OPERATORS, *onnx_gates.OPERATORS}
"""All that a twin may consist of: no control flow, no functions, no operators of others."""
Int64 = NDArray[np.int64]


def twin_bytes(policy: Policy) -> bytes | None:
    """The ONNX file of a policy; None for shapes that learned nothing but thresholds."""
    if isinstance(policy.shape, EntropyBins):
        model = entropy_bins_model(policy.shape)
    elif isinstance(policy.shape, ScoredTree):
        model = scorer_model(policy.shape.scorer)
    elif isinstance(policy.shape, SparseGates):
        model = _model(onnx_gates.gates_graph(policy.shape), {"": OPSET})
    else:
        return None
    return bytes(model.SerializeToString(deterministic=True))


def entropy_bins_model(shape: EntropyBins) -> Any:
    """The twin as an `onnx.ModelProto`; a function of the record alone."""
    from onnx import TensorProto, helper

    phi = helper.make_tensor_value_info("phi", TensorProto.FLOAT, ["n"])
    outputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["n"]) for name in OUTPUTS]
    return _model(
        helper.make_graph(
            _nodes(), "specctl_entropy_bins", [phi], outputs, initializer=_tables(shape)
        ),
        {"": OPSET},
    )


def scorer_model(scorer: Scorer) -> Any:
    """The twin of a scorer as an `onnx.ModelProto`; see `onnx_scorer`."""
    trees = {onnx_scorer.ML_DOMAIN: onnx_scorer.ML_OPSET} if scorer.kind == "trees" else {}
    return _model(onnx_scorer.scorer_graph(scorer), {"": OPSET, **trees})


def _model(graph: Any, opsets: dict[str, int]) -> Any:
    """A model of operators that the loader knows, and of no others."""
    from onnx import helper

    foreign = {node.op_type for node in graph.node} - ALLOWED_OPERATORS
    if foreign:
        raise InvariantError(
            f"graph {graph.name}",
            expected=f"operators among {sorted(ALLOWED_OPERATORS)}",
            found=str(foreign),
            fix="report this policy",
        )
    return helper.make_model(
        graph,
        producer_name="specctl",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid(*item) for item in opsets.items()],
    )


def _nodes() -> list[Any]:
    from onnx import TensorProto
    from onnx.helper import make_node

    return [
        make_node("Unsqueeze", ["phi", "last_axis"], ["phi_column"]),
        make_node("Less", ["edges", "phi_column"], ["edge_below"]),
        make_node("Cast", ["edge_below"], ["edge_below_int"], to=TensorProto.INT64),
        make_node("ReduceSum", ["edge_below_int", "last_axis"], ["bin"], keepdims=0),
        make_node("Gather", ["depths", "bin"], ["depth"]),
        make_node("Gather", ["tokens", "bin"], ["num_tokens"]),
    ]


def _tables(shape: EntropyBins) -> list[Any]:
    from onnx import numpy_helper

    arrays: dict[str, NDArray[Any]] = {
        "last_axis": np.array([1], dtype=np.int64),
        "edges": np.array(shape.edges, dtype=np.float32),
        "depths": np.array(shape.plan_depths, dtype=np.int64),
        "tokens": np.array(shape.plan_tokens, dtype=np.int64),
    }
    return [numpy_helper.from_array(array, name) for name, array in arrays.items()]


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
