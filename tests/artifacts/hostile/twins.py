"""Families 18 to 24: files in the place of the twin. Only its own bytes pass."""

from __future__ import annotations

import onnx

from specctl.artifacts.onnx_twin import twin_bytes
from tests.artifacts.examples import POLICIES
from tests.artifacts.hostile.making import Hostile, given


def twin() -> bytes:
    data = twin_bytes(POLICIES["hetero"])
    assert data is not None
    return data


def external() -> bytes:
    """A table that lies in another file."""
    model = onnx.load_from_string(twin())
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    place = tensor.external_data.add()
    place.key, place.value = "location", "../../etc/passwd"
    tensor.data_location = onnx.TensorProto.EXTERNAL
    return bytes(model.SerializeToString(deterministic=True))


def other_operator() -> bytes:
    model = onnx.load_from_string(twin())
    model.graph.node[0].op_type = "Loop"
    return bytes(model.SerializeToString(deterministic=True))


def other_weight() -> bytes:
    model = onnx.load_from_string(twin())
    raw = model.graph.initializer[1].raw_data
    model.graph.initializer[1].raw_data = raw[:-1] + bytes([raw[-1] ^ 1])
    return bytes(model.SerializeToString(deterministic=True))


def nested(depth: int) -> bytes:
    """Messages in messages, by hand: most parsers recurse."""
    data = b""
    for _ in range(depth):
        data = b"\x0a" + len(data).to_bytes(4, "little") + data
    return data


TWINS = {
    "19 external data": external,
    "20 a table in memory": lambda: external().replace(b"../../etc/passwd", b"*/_ORT_MEM_ADDR_"),
    "21 another operator": other_operator,
    "22 16 MiB of dimensions": lambda: b"\x08\x01" * (8 << 20),
    "23 10^4 deep": lambda: nested(10**4),
    "24 cut short": lambda: twin()[:-1],
    "24 fields in another order": lambda: twin()[2:] + twin()[:2],
    "24 a longer number": lambda: b"\x08\x88\x00" + twin()[2:],
    "24 nothing": lambda: b"",
    "26 another weight": other_weight,
    "18 the twin of another": lambda: twin_bytes(POLICIES["echo"]) or b"",
}
FAMILIES = {name: Hostile(given("policy.onnx", make), "E_TWIN") for name, make in TWINS.items()}
