"""The header of a safetensors file, read by us before any library sees the bytes.

8 bytes   length of the header, little-endian
header    JSON: name to dtype, shape and the place of its bytes
buffer    the bytes of all tensors, one behind the other, without gap or overlap
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from specctl.artifacts.files import check_format
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError

WIDTHS = {"F32": 4, "I64": 8}
"""Bytes of an element of the dtypes that artifacts hold."""
MAX_HEADER_BYTES = 1 << 16
MAX_TENSORS = 64
MAX_DIMS = 4


class Entry(NamedTuple):
    """One tensor of the header: its place in the buffer, bytes."""

    start: int
    end: int
    name: str


def check_header(file: str, data: bytes) -> None:
    """Refuses a file whose header does not describe its bytes exactly.

    Raises:
        ArtifactError: E_WEIGHTS; E_FORMAT for a pickle, an archive and the like.
    """
    check_format(file, data)
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= size <= min(len(data) - 8, MAX_HEADER_BYTES):
        found = f"a file of {len(data)} bytes that names {size}"
        raise _bad(file, f"a header of at most {MAX_HEADER_BYTES} bytes", found)
    header = _parse(file, data[8 : 8 + size])
    entries = sorted(_entry(file, name, fields) for name, fields in header.items())
    place = 0
    for entry in entries:
        if entry.start != place:
            wanted = "tensors without gap or overlap"
            raise _bad(file, wanted, f"{entry.name!r} at byte {entry.start}, not {place}")
        place = entry.end
    if place != len(data) - 8 - size:
        raise _bad(file, f"{place} bytes of tensors", f"{len(data) - 8 - size}")


def _parse(file: str, header: bytes) -> dict[str, Any]:
    try:
        tree = parse_strict(header)
    except ArtifactError as error:
        raise _bad(f"{file}, header", error.expected, error.found) from None
    if header[:1] != b"{" or not isinstance(tree, dict) or len(tree) > MAX_TENSORS:
        raise _bad(file, f"a JSON object of at most {MAX_TENSORS} tensors", "another header")
    return tree


def _entry(file: str, name: str, fields: Any) -> Entry:
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(fields, dict) or fields.keys() != keys:
        found = sorted(fields) if isinstance(fields, dict) else "another value"
        raise _bad(f"{file}, {name!r}", f"{sorted(keys)}", f"{found}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    width = WIDTHS.get(dtype) if isinstance(dtype, str) else None
    if width is None:
        raise _bad(f"{file}, {name!r}", f"dtype {' or '.join(WIDTHS)}", repr(dtype))
    if not _are_sizes(shape, MAX_DIMS) or not _are_sizes(offsets, 2) or len(offsets) != 2:
        found = f"shape {shape}, offsets {offsets}"
        raise _bad(f"{file}, {name!r}", f"at most {MAX_DIMS} sizes and two offsets", found)
    start, end = offsets
    if end - start != math.prod(shape) * width:
        wanted = f"{math.prod(shape) * width} bytes of {dtype}{shape}"
        raise _bad(f"{file}, {name!r}", wanted, f"{end - start}")
    return Entry(start, end, name)


def _are_sizes(values: Any, most: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(type(value) is int and value >= 0 for value in values)
    )


def _bad(what: str, expected: str, found: str) -> ArtifactError:
    return ArtifactError("E_WEIGHTS", what, expected=expected, found=found)
