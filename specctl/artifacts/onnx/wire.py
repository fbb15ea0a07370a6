"""Protobuf's wire format: varints, tags, length-delimited bytes. Writing is canonical.

Canonical: fields in the order of their numbers, shortest varints, nothing twice. Google's own
deterministic serialisation writes the same bytes (tests/artifacts/test_onnx_wire.py).
"""

from __future__ import annotations

import struct
from typing import Any

from specctl.artifacts.onnx.schema import MESSAGES, Message

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
WIRE_TYPES = {"int": VARINT, "float": FIXED32}
"""Of the plain kinds; all others are length-delimited."""
MAX_VARINT_BYTES = 10


class WireError(Exception):
    """Bytes that are not protobuf; the text says what was found."""


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


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """An unsigned varint of at most 64 bit and the place behind it.

    Raises:
        WireError: cut off, or longer than any 64-bit number.
    """
    value = shift = 0
    for place in range(at, min(end, at + MAX_VARINT_BYTES)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                raise WireError("a number of more than 64 bit")
            return value, place + 1
        shift += 7
    raise WireError("a number that is cut off or has no end")


def read_value(data: bytes, at: int, end: int, wire: int) -> tuple[Any, int]:
    """The value at a place, and the place behind it.

    Returns:
        An unsigned int of a varint, else the `(start, end)` of its bytes.

    Raises:
        WireError: a wire type of no field of ONNX, or bytes beyond the end.
    """
    if wire == VARINT:
        return read_varint(data, at, end)
    size = {FIXED32: 4, FIXED64: 8}.get(wire)
    if wire == LENGTH:
        size, at = read_varint(data, at, end)
    if size is None:
        raise WireError(f"wire type {wire}")
    if size > end - at:
        raise WireError(f"a field of {size} bytes where {end - at} are left")
    return (at, at + size), at + size
