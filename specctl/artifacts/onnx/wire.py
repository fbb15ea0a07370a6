"""Protobuf's wire format: varints, tags, length-delimited bytes. Writing is canonical.

Canonical: fields in the order of their numbers, shortest varints, nothing twice. Google's own
deterministic serialisation writes the same bytes (tests/artifacts/test_onnx_wire.py).
"""

from __future__ import annotations

import struct
from typing import Any

from specctl.artifacts.onnx.schema import MESSAGES, Message

VARINT, LENGTH, FIXED32 = 0, 2, 5
WIRE_TYPES = {"int": VARINT, "float": FIXED32}
"""Of the plain kinds; all others are length-delimited."""


def wire_type(kind: str) -> int:
    """How a kind of the schema lies on the wire."""
    return WIRE_TYPES.get(kind, LENGTH)


def encode(message: Message) -> bytes:
    """The canonical bytes of a message."""
    parts: list[bytes] = []
    for number, (label, kind) in sorted(MESSAGES[message.kind].items()):
        tag = encode_varint(number << 3 | wire_type(kind))
        for value in message.all(label.rstrip("*")):
            parts += (tag, _encode_value(kind, value))
    return b"".join(parts)


def _encode_value(kind: str, value: Any) -> bytes:
    if kind == "int":
        return encode_varint(value & 0xFFFF_FFFF_FFFF_FFFF)  # negatives: two's complement
    if kind == "float":
        return struct.pack("<f", value)
    data = value.encode() if kind == "text" else value if kind == "bytes" else encode(value)
    return encode_varint(len(data)) + bytes(data)


def encode_varint(value: int) -> bytes:
    """Seven bits a byte, lowest first."""
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
