"""The decision of HeteroSpec's bins as an ONNX graph, equal to the rule on every float32.

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

from specctl.errors import UsageError
from specctl.policy.records import EntropyBins, Policy

OPSET, IR_VERSION = 17, 8
"""Old enough for every runtime of the last years; onnxruntime 1.31 takes far newer ones."""
OUTPUTS = ("bin", "depth", "num_tokens")
Int64 = NDArray[np.int64]


def twin_bytes(policy: Policy) -> bytes | None:
    """The ONNX file of a policy; None for shapes that have no twin in artifact version 1."""
    if not isinstance(policy.shape, EntropyBins):
        return None
    return bytes(entropy_bins_model(policy.shape).SerializeToString(deterministic=True))


def entropy_bins_model(shape: EntropyBins) -> Any:
    """The twin as an `onnx.ModelProto`; a function of the record alone."""
    from onnx import TensorProto, helper

    phi = helper.make_tensor_value_info("phi", TensorProto.FLOAT, ["n"])
    outputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["n"]) for name in OUTPUTS]
    graph = helper.make_graph(
        _nodes(), "specctl_entropy_bins", [phi], outputs, initializer=_tables(shape)
    )
    return helper.make_model(
        graph,
        producer_name="specctl",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
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


def _session(model: Path | bytes) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    source = model if isinstance(model, bytes) else str(model)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
