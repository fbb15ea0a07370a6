"""What a graph of strangers may hold, one rule a function; the first one broken is named.

A twin must be byte for byte the graph of its policy, so nothing that passes here is run for that
reason alone. The rules say what is wrong with a file that is another, and they are what a reader
of ONNX would need before it may look at one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from specctl.artifacts.onnx.build import BATCH
from specctl.artifacts.onnx.schema import FLOAT, INT64, Message
from specctl.errors import ArtifactError

WIDTHS = {FLOAT: 4, INT64: 8}
MAX_ELEMENTS = 1 << 22
"""Of one tensor: 16 MiB of float32, the cap of the whole file."""
MAX_NODES = 64
"""Of a graph. The longest twin has 7: trees are one node with columns."""
FILE = "policy.onnx"


def check_rules(model: Message, operators: Mapping[str, str], opsets: Mapping[str, int]) -> None:
    """Refuses a model by the first rule that it breaks.

    Args:
        operators: allowed operators and the domain of each.
        opsets: the highest version of each domain.

    Raises:
        ArtifactError: E_ONNX_EXTERNAL, E_ONNX_OP, E_ONNX_SHAPE or E_ONNX_GRAPH.
    """
    check_no_external_data(model)
    check_operators(model, operators, opsets)
    check_shapes(model)
    check_graph(model.one("graph", Message("Graph", {})))


def every(model: Message, kind: str) -> Iterator[Message]:
    """All messages of a kind, wherever they hide: subgraphs, functions, attributes."""
    pending = [model]
    while pending:
        message = pending.pop()
        if message.kind == kind:
            yield message
        values = (value for found in message.fields.values() for value in found)
        pending += [value for value in values if isinstance(value, Message)]


def check_no_external_data(model: Message) -> None:
    """No tensor anywhere may name a place outside of the file, in memory or on disk."""
    for tensor in every(model, "Tensor"):
        places = {
            pair.one("key", ""): pair.one("value", "") for pair in tensor.all("external_data")
        }
        if places or tensor.one("data_location", 0) != 0:
            name = tensor.one("name", "")
            raise _refused(
                "E_ONNX_EXTERNAL", f"tensor {name!r}", "its values inside the file", str(places)
            )


def check_operators(
    model: Message, operators: Mapping[str, str], opsets: Mapping[str, int]
) -> None:
    """Only operators of the list, each of its own domain; no functions, subgraphs or training."""
    for field in ("functions", "training_info"):
        if model.all(field):
            raise _refused("E_ONNX_OP", field, "none", f"{len(model.all(field))}")
    for node in every(model, "Node"):
        name, domain = node.one("op_type", ""), node.one("domain", "")
        if operators.get(name) != domain or node.all("overload"):
            wanted = f"operators among {sorted(operators)} of their own domain"
            raise _refused("E_ONNX_OP", "operator", wanted, f"{name!r} of domain {domain!r}")
    for attribute in every(model, "Attribute"):
        held = {"g", "graphs", "tp", "type_protos", "ref_attr_name"} & attribute.fields.keys()
        if held:
            raise _refused("E_ONNX_OP", "attribute", "numbers and texts", str(sorted(held)))
    _check_opsets(model, opsets)


def _check_opsets(model: Message, opsets: Mapping[str, int]) -> None:
    found = [(o.one("domain", ""), o.one("version", 0)) for o in model.all("opset_import")]
    known = all(1 <= version <= opsets.get(domain, 0) for domain, version in found)
    if not known or len(dict(found)) != len(found):
        wanted = f"each domain once, at most {dict(opsets)}"
        raise _refused("E_ONNX_OP", "opset", wanted, str(found))


def check_shapes(model: Message) -> None:
    """Constants hold what their shape says; inputs and outputs know all but the batch."""
    if any(every(model, "SparseTensor")):
        raise _refused("E_ONNX_SHAPE", "tensor", "dense tensors", "a sparse one")
    for tensor in every(model, "Tensor"):
        _check_tensor(tensor)
    for value in every(model, "Value"):
        _check_value(value)


def _check_tensor(tensor: Message) -> None:
    name = f"tensor {tensor.one('name', '')!r}"
    dims, width = tensor.all("dims"), WIDTHS.get(tensor.one("data_type", 0))
    if width is None:
        found = f"data type {tensor.one('data_type', 0)}"
        raise _refused("E_ONNX_SHAPE", name, "float32 or int64", found)
    size = _num_elements(name, dims) * width
    raw = tensor.one("raw_data", b"")
    others = tensor.fields.keys() - {"dims", "data_type", "name", "raw_data"}
    if others or len(raw) != size:
        found = f"{len(raw)} bytes" + (f" and {sorted(others)}" if others else "")
        raise _refused("E_ONNX_SHAPE", name, f"{size} bytes of {dims}, raw", found)


def _num_elements(name: str, dims: list[int]) -> int:
    """The product of dimensions; Python's whole numbers do not overflow, C's do."""
    total = 1
    for dim in dims:
        total *= dim
        if dim < 0 or total > MAX_ELEMENTS:
            wanted = f"dimensions of at most {MAX_ELEMENTS} elements"
            raise _refused("E_ONNX_SHAPE", name, wanted, str(dims))
    return total


def _check_value(value: Message) -> None:
    name = f"value {value.one('name', '')!r}"
    [of] = value.one("type", Message("Type", {})).all("tensor_type") or [Message("TensorType", {})]
    if of.one("elem_type", 0) not in WIDTHS or not of.all("shape"):
        raise _refused("E_ONNX_SHAPE", name, "a float32 or int64 tensor with a shape", "another")
    for place, dim in enumerate(of.one("shape", None).all("dim")):
        _check_dim(name, place, dim)


def _check_dim(name: str, place: int, dim: Message) -> None:
    symbol, size = dim.one("dim_param", None), dim.one("dim_value", None)
    if symbol == BATCH and place == 0 and size is None:
        return
    if symbol is not None or size is None or not 1 <= size <= MAX_ELEMENTS:
        wanted = f"a size, symbolic only the batch {BATCH!r} in front"
        raise _refused("E_ONNX_SHAPE", name, wanted, f"dimension {place} of {symbol or size!r}")


def check_graph(graph: Message) -> None:
    """Names are made once and before they are used, so there is no cycle and nothing dangles."""
    nodes = graph.all("node")
    if not 1 <= len(nodes) <= MAX_NODES:
        raise _refused("E_ONNX_GRAPH", "graph", f"1 to {MAX_NODES} nodes", str(len(nodes)))
    made: set[str] = set()
    for field in ("input", "initializer"):
        for one in graph.all(field):
            _make(made, one.one("name", ""))
    for node in nodes:
        for name in node.all("input"):
            _need(made, name)
        for name in node.all("output"):
            _make(made, name)
    for output in graph.all("output"):
        _need(made, output.one("name", ""))


def _make(made: set[str], name: str) -> None:
    if not name or name in made:
        raise _refused("E_ONNX_GRAPH", "graph", "each name made once", f"{name!r} again")
    made.add(name)


def _need(made: set[str], name: str) -> None:
    if name not in made:
        wanted = "inputs that an earlier node makes"
        raise _refused("E_ONNX_GRAPH", "graph", wanted, f"{name!r}, which none does")


def difference(found: Any, wanted: Any, path: str = "model") -> tuple[str, str, str] | None:
    """Where two models part: the path, what is wanted there and what was found; None if nowhere."""
    if isinstance(found, Message) and isinstance(wanted, Message):
        for name in sorted(found.fields.keys() | wanted.fields.keys()):
            parted = _list_difference(found.all(name), wanted.all(name), f"{path}.{name}")
            if parted:
                return parted
        return None
    same = (
        np.float32(found).tobytes() == np.float32(wanted).tobytes()
        if _floats(found, wanted)
        else found == wanted
    )
    return None if same else (path, _brief(wanted), _brief(found))


def _list_difference(found: list[Any], wanted: list[Any], path: str) -> tuple[str, str, str] | None:
    if len(found) != len(wanted):
        return path, f"{len(wanted)} of them", f"{len(found)}"
    pairs = enumerate(zip(found, wanted, strict=True))
    parted = (difference(one, other, f"{path}[{i}]") for i, (one, other) in pairs)
    return next((where for where in parted if where), None)


def _floats(*values: Any) -> bool:
    return all(isinstance(value, float) for value in values)


def _brief(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) and len(value) > 64 else repr(value)


def _refused(code: str, what: str, expected: str, found: str) -> ArtifactError:
    return ArtifactError(code, f"{FILE}, {what}", expected=expected, found=found)
