"""A model from bytes of strangers: bounded in depth, fields and memory, strict in everything.

Unknown fields, fields of another wire type and singular fields given twice are refused: every
parser that the file could reach must read the same.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from specctl.artifacts.onnx.schema import MESSAGES, Message
from specctl.artifacts.onnx.wire import WireError, read_value, read_varint, wire_type

MAX_NESTING = 24
"""Messages within messages. A twin nests 7 deep; each subgraph adds 3."""
MAX_FIELDS = 100_000
"""Of a whole file. Reading one takes about 1 us; every name and number is one."""
MAX_MESSAGES = 4096
"""Of a whole file: nodes, attributes, tensors. The largest twin has about 60."""
MIN_INT64, MAX_UINT64 = -(1 << 63), 1 << 64


class NestingError(WireError):
    """More levels than any graph needs."""


class SizeError(WireError):
    """More fields than any twin has."""


def decode(data: bytes) -> Message:
    """The model that bytes hold.

    Raises:
        WireError: other bytes than those of a model, or more of them than the caps allow.
    """
    return _Reader(data).message("Model", 0, len(data), 0)


@dataclass
class _Reader:
    data: bytes
    num_fields: int = 0
    num_messages: int = 0

    def message(self, kind: str, at: int, end: int, depth: int) -> Message:
        if depth >= MAX_NESTING:
            raise NestingError(f"more than {MAX_NESTING} levels of nesting")
        self.num_messages += 1
        if self.num_messages > MAX_MESSAGES:
            raise SizeError(f"more than {MAX_MESSAGES} nodes, tensors and the like")
        known, found = MESSAGES[kind], Message(kind, {})
        while at < end:
            self._count()
            tag, at = read_varint(self.data, at, end)
            if tag >> 3 not in known:
                raise WireError(f"field {tag >> 3} of {kind}, which ONNX does not know")
            label, of = known[tag >> 3]
            if tag & 7 != wire_type(of):
                raise WireError(f"{kind}.{label.rstrip('*')} of wire type {tag & 7}")
            place, at = read_value(self.data, at, end, tag & 7)
            _add(found, label, self._value(of, place, depth))
        return found

    def _count(self) -> None:
        self.num_fields += 1
        if self.num_fields > MAX_FIELDS:
            raise SizeError(f"more than {MAX_FIELDS} fields")

    def _value(self, of: str, place: Any, depth: int) -> Any:
        if of == "int":
            return place - MAX_UINT64 if place >= -MIN_INT64 else place
        if of in MESSAGES:
            return self.message(of, place[0], place[1], depth + 1)
        raw = self.data[slice(*place)]
        if of == "float":
            return struct.unpack("<f", raw)[0]
        return _text(raw) if of == "text" else raw


def _add(message: Message, label: str, value: Any) -> None:
    values = message.fields.setdefault(label.rstrip("*"), [])
    if values and not label.endswith("*"):
        raise WireError(f"{message.kind}.{label} twice")
    values.append(value)


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise WireError("text that is not UTF-8") from None
