"""Models that no loader should look at, made with onnx's own library or by hand."""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx import TensorProto, helper

from specctl.artifacts.onnx.wire import encode_varint
from specctl.artifacts.onnx_twin import twin_bytes
from tests.artifacts.examples import POLICIES

Change = Callable[[onnx.ModelProto], None]


def twin(name: str = "hetero") -> onnx.ModelProto:
    """The twin of an example as onnx reads it."""
    data = twin_bytes(POLICIES[name])
    assert data is not None
    return onnx.load_from_string(data)


def changed(change: Change, name: str = "hetero") -> bytes:
    """The bytes of a twin after a change."""
    model = twin(name)
    change(model)
    return bytes(model.SerializeToString(deterministic=True))


def external(tensor: onnx.TensorProto, location: str) -> onnx.TensorProto:
    """Points a tensor at a place outside of the file."""
    tensor.ClearField("raw_data")
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    tensor.data_location = TensorProto.EXTERNAL
    return tensor


def far_tensor(location: str = "../weights") -> onnx.TensorProto:
    return external(helper.make_tensor("far", TensorProto.FLOAT, [1], [0.5]), location)


def subgraph(*nodes: onnx.NodeProto, far: bool = False) -> onnx.GraphProto:
    tensors = [far_tensor()] if far else []
    return helper.make_graph(list(nodes), "inner", [], [], initializer=tensors)


def nested_ifs(depth: int) -> bytes:
    """An `If` in an `If` in an `If`, by hand: the library itself recurses."""
    graph = b""
    for _ in range(depth):
        attribute = _field(6, graph) + _field(1, b"then_branch")
        graph = _field(1, _field(4, b"If") + _field(5, attribute))
    return _field(7, graph)


def many_nodes(count: int) -> bytes:
    return _field(7, _field(1, _field(4, b"Relu")) * count)


def _field(number: int, data: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


def _edges(change: Callable[[onnx.TensorProto], None]) -> Change:
    """A change of the table of edges."""
    return lambda model: change(next(t for t in model.graph.initializer if t.name == "edges"))


def _dims(*dims: int) -> Change:
    def change(tensor: onnx.TensorProto) -> None:
        del tensor.dims[:]
        tensor.dims.extend(dims)

    return _edges(change)


def _node(op_type: str, **attributes: object) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node.append(helper.make_node(op_type, [], ["more"], **attributes))

    return change


def _both_locations(tensor: onnx.TensorProto) -> None:
    external(tensor, "a")
    external(tensor, "/b")


def _function(model: onnx.ModelProto) -> None:
    body = [helper.make_node("Constant", [], ["y"], value=far_tensor())]
    model.functions.append(
        helper.make_function("specctl", "f", [], ["y"], body, [helper.make_opsetid("", 17)])
    )


def _plain_function(model: onnx.ModelProto) -> None:
    body = [helper.make_node("Relu", ["x"], ["y"])]
    model.functions.append(
        helper.make_function("specctl", "f", ["x"], ["y"], body, [helper.make_opsetid("", 17)])
    )


def _sparse(model: onnx.ModelProto) -> None:
    sparse = onnx.SparseTensorProto(values=far_tensor(), dims=[4])
    model.graph.sparse_initializer.append(sparse)


def _rename_output(model: onnx.ModelProto) -> None:
    model.graph.node[0].output[0] = "elsewhere"


def _cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = model.graph.node[-1].output[0]


def _twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(model.graph.initializer[0])


def _opset(version: int, domain: str = "") -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import.append(helper.make_opsetid(domain, version))
        if not domain:
            del model.opset_import[0]

    return change


def _domain(model: onnx.ModelProto) -> None:
    model.graph.node[0].domain = "com.microsoft"


def _symbolic(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "m"


def _weight(tensor: onnx.TensorProto) -> None:
    tensor.raw_data = tensor.raw_data[:-1] + bytes([tensor.raw_data[-1] ^ 1])


def _raw(data: bytes) -> Change:
    return _edges(lambda tensor: setattr(tensor, "raw_data", data))


def _metadata(model: onnx.ModelProto) -> None:
    helper.set_model_props(model, {"custom_ops_library": "/tmp/evil.so"})


FAMILIES: dict[str, tuple[Callable[[], bytes], str]] = {
    **{
        f"19 external: {name}": (
            lambda at=at: changed(_edges(lambda t: external(t, at))),
            "E_ONNX_EXTERNAL",
        )  # type: ignore[misc]
        for name, at in {
            "relative": "weights.bin",
            "parent": "../../etc/passwd",
            "absolute": "/etc/passwd",
            "own file": "policy.onnx",
            "20 memory": "*/_ORT_MEM_ADDR_/*",
        }.items()
    },
    "19 location twice": (lambda: changed(_edges(_both_locations)), "E_ONNX_EXTERNAL"),
    "20 sparse tensor": (lambda: changed(_sparse), "E_ONNX_EXTERNAL"),
    "20 attribute": (lambda: changed(_node("Constant", value=far_tensor())), "E_ONNX_EXTERNAL"),
    "20 function body": (lambda: changed(_function), "E_ONNX_EXTERNAL"),
    "20 subgraph": (
        lambda: changed(_node("If", then_branch=subgraph(far=True))),
        "E_ONNX_EXTERNAL",
    ),
    "21 other domain": (lambda: changed(_domain), "E_ONNX_OP"),
    "21 unlisted operator": (lambda: changed(_node("Conv")), "E_ONNX_OP"),
    "21 random operator": (lambda: changed(_node("RandomNormal", shape=[1])), "E_ONNX_OP"),
    "21 function": (lambda: changed(_plain_function), "E_ONNX_OP"),
    "21 opset too new": (lambda: changed(_opset(24)), "E_ONNX_OP"),
    "21 unknown opset": (lambda: changed(_opset(1, "com.microsoft")), "E_ONNX_OP"),
    "21 custom library": (lambda: changed(_metadata), "E_ONNX_GRAPH"),
    "21 loop": (lambda: changed(_node("Loop", body=subgraph())), "E_ONNX_OP"),
    "22 overflow": (lambda: changed(_dims(2**31, 2**31)), "E_ONNX_SHAPE"),
    "22 2^63": (lambda: changed(_dims(2**62, 2)), "E_ONNX_SHAPE"),
    "22 overflow to 0": (lambda: changed(_dims(2**32, 2**32)), "E_ONNX_SHAPE"),
    "22 negative": (lambda: changed(_dims(-7)), "E_ONNX_SHAPE"),
    "22 short data": (lambda: changed(_raw(b"\0" * 4)), "E_ONNX_SHAPE"),
    "22 symbolic": (lambda: changed(_symbolic), "E_ONNX_SHAPE"),
    "23 cycle": (lambda: changed(_cycle), "E_ONNX_GRAPH"),
    "23 dangling": (lambda: changed(_rename_output), "E_ONNX_GRAPH"),
    "23 name twice": (lambda: changed(_twice), "E_ONNX_GRAPH"),
    "23 10^6 nodes": (lambda: many_nodes(10**6), "E_ONNX_GRAPH"),
    "23 3000 deep If": (lambda: nested_ifs(3000), "E_ONNX_GRAPH"),
    "23 deep If, walkable": (lambda: nested_ifs(3), "E_ONNX_OP"),
    "24 empty": (lambda: b"", "E_ONNX_GRAPH"),
    "24 noise": (lambda: b"\x08\x08" * 100, "E_ONNX_LOAD"),
    "24 truncated": (lambda: changed(lambda _: None)[:-1], "E_ONNX_LOAD"),
    "24 unknown field": (lambda: changed(lambda _: None) + b"\xfa\x07\x00", "E_ONNX_LOAD"),
    "24 trailing zeros": (lambda: changed(lambda _: None) + b"\0\0", "E_ONNX_LOAD"),
    "18 another twin": (lambda: changed(lambda _: None, "echo"), "E_ONNX_GRAPH"),
    "26 another weight": (lambda: changed(_edges(_weight)), "E_ONNX_GRAPH"),
}
