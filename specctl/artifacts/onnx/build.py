"""The nouns of a graph: what a twin is described with, by the writer and by the check alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.artifacts.onnx.schema import ATTRIBUTE_TYPES, FLOAT, INT64, Message

IR_VERSION = 8
PRODUCER = "specctl"
BATCH = "n"
"""The one symbolic dimension: rows that are decided together."""
_DTYPES = {np.dtype(np.float32): FLOAT, np.dtype(np.int64): INT64}


def model(graph: Message, opsets: Mapping[str, int]) -> Message:
    """A model of one graph. `opsets`: version by domain, the first one's being `""`."""
    imports = [
        Message("OperatorSet", {"domain": [domain], "version": [version]})
        for domain, version in opsets.items()
    ]
    return Message(
        "Model",
        {
            "ir_version": [IR_VERSION],
            "producer_name": [PRODUCER],
            "graph": [graph],
            "opset_import": imports,
        },
    )


def graph(
    name: str,
    nodes: Sequence[Message],
    inputs: Sequence[Message],
    outputs: Sequence[Message],
    tables: Mapping[str, NDArray[Any]],
) -> Message:
    """Nodes in the order in which they run; `tables` are the constants by name."""
    return _present(
        "Graph",
        {
            "node": list(nodes),
            "name": [name],
            "initializer": [tensor(key, array) for key, array in tables.items()],
            "input": list(inputs),
            "output": list(outputs),
        },
    )


def _present(kind: str, fields: dict[str, list[Any]]) -> Message:
    """A message without the fields that have no value, as a reader finds it."""
    return Message(kind, {name: values for name, values in fields.items() if values})


def node(
    op_type: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    domain: str | None = None,
    **attributes: Any,
) -> Message:
    """One operation; attributes in the order of their names, as ONNX's own helper has them."""
    fields: dict[str, list[Any]] = {
        "input": list(inputs),
        "output": list(outputs),
        "op_type": [op_type],
        "attribute": [_attribute(name, attributes[name]) for name in sorted(attributes)],
    }
    return _present("Node", fields if domain is None else {**fields, "domain": [domain]})


def _attribute(name: str, value: Any) -> Message:
    """Whole numbers, floats and texts, alone or in lists."""
    values = value if isinstance(value, list) else [value]
    field = "i" if isinstance(values[0], int) else "f" if isinstance(values[0], float) else "s"
    if field == "s":
        values = [text.encode() for text in values]
    if isinstance(value, list):
        field = {"i": "ints", "f": "floats", "s": "strings"}[field]
    return _present("Attribute", {"name": [name], field: values, "type": [ATTRIBUTE_TYPES[field]]})


def tensor(name: str, array: NDArray[Any]) -> Message:
    """A constant of float32 or int64, little-endian, in C order."""
    return _present(
        "Tensor",
        {
            "dims": list(array.shape),
            "data_type": [_DTYPES[array.dtype]],
            "name": [name],
            "raw_data": [array.astype(array.dtype.newbyteorder("<")).tobytes()],
        },
    )


def value(name: str, elem_type: int, *dims: int | str) -> Message:
    """An input or output; a text stands for a symbolic dimension."""
    shape = [
        Message("Dimension", {"dim_param" if isinstance(dim, str) else "dim_value": [dim]})
        for dim in dims
    ]
    of = Message(
        "TensorType", {"elem_type": [elem_type], "shape": [Message("Shape", {"dim": shape})]}
    )
    return Message("Value", {"name": [name], "type": [Message("Type", {"tensor_type": [of]})]})
