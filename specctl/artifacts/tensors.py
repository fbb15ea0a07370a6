"""Moves fitted numbers between policy records and `policy.safetensors`, bit for bit.

A safetensors file, whose header is checked here before any number is used:

    8 bytes   length of the header, little-endian
    header    JSON: name to dtype, shape and the place of its bytes
    buffer    the bytes of all tensors in turn, without gap or overlap
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from specctl.artifacts.manifest import TENSORS, Count
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, shown
from specctl.policy import Policy
from specctl.records import Record, canonical_json, describe_violation, require

Tensor: TypeAlias = NDArray[Any]
REFERENCE = "$tensor"
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8")}
MAX_HEADER_BYTES, MAX_TENSORS, MAX_DIMS = 1 << 16, 64, 4
MAX_NUMBERS = 10_000
"""Fitted numbers of a policy; the largest valid record, a table of 9 rows of 256 cells, has
2,559."""
MAX_MAGNITUDE = 1e30
"""Above it a product of two values can overflow float32."""
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


class _Entry(Record):
    """A tensor in the header."""

    dtype: Literal["F32", "I64"]
    shape: Annotated[tuple[Count, ...], Field(max_length=MAX_DIMS)]
    data_offsets: tuple[Count, Count]  # of its first byte in the buffer, and of its end

    @model_validator(mode="after")
    def _check(self) -> Self:
        start, end = self.data_offsets
        size = math.prod(self.shape) * DTYPES[self.dtype].itemsize
        require(end - start == size, f"{size} bytes of {self.dtype}{list(self.shape)}")
        whole = math.prod(max(count, 1) for count in self.shape)
        require(whole < 1 << 62, "sizes whose product is below 2^62")  # numpy counts in 64 bit
        return self


_HEADER = TypeAdapter(Annotated[dict[str, _Entry], Field(max_length=MAX_TENSORS)])


# ------------------------------------------------------------------ the file


def write_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of `policy.safetensors`; equal tensors give equal bytes."""
    from safetensors.numpy import save

    # safetensors writes the raw memory of a strided view, hence C order
    return bytes(save({name: np.array(tensor, order="C") for name, tensor in tensors.items()}))


def read_tensors(data: bytes, file: str = TENSORS) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name; E_WEIGHTS unless its header describes every byte,
    and dtypes and values are allowed."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= size <= min(len(data) - 8, MAX_HEADER_BYTES):
        raise _bad(file, f"a header of {size} bytes, in a file of {len(data)}")
    try:
        parse_strict(data[8 : 8 + size])
        header = _HEADER.validate_json(data[8 : 8 + size])
    except ArtifactError as error:
        raise _bad(f"{file}, header", error.problem) from None
    except ValidationError as error:
        form = f"at most {MAX_TENSORS} tensors of {' or '.join(DTYPES)}"
        raise _bad(f"{file}, header", f"not {form}: {describe_violation(error)}") from None
    tensors, buffer, place = dict[str, Tensor](), data[8 + size :], 0
    for name, entry in sorted(header.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        if start != place:
            raise _bad(file, f"{name!r} begins at byte {start}, not {place}")
        if end > len(buffer):
            raise _bad(file, f"{len(buffer)} bytes of tensors, not {end}")
        values = np.frombuffer(buffer[start:end], DTYPES[entry.dtype])
        tensors[name], place = values.reshape(entry.shape), end
    if data[8:9] != b"{" or place != len(buffer):
        raise _bad(file, f"{len(buffer)} bytes of tensors, not {place}")
    check_values(tensors)
    return tensors


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Refuses values that are not finite, too large or denormal (E_WEIGHTS)."""
    for name, tensor in tensors.items():
        if tensor.dtype.kind != "f":
            continue
        size = np.abs(tensor)
        good = (size <= MAX_MAGNITUDE) & ((size == 0) | (size >= SMALLEST_NORMAL))
        if not good.all():
            allowed = f"0 or of magnitude {SMALLEST_NORMAL:.3g} to {MAX_MAGNITUDE:g}"
            raise _bad(name, f"{tensor[~good].flat[0]} is not {allowed}")


# ------------------------------------------------------------------ the record


def policy_tensors(policy: Policy) -> dict[str, Tensor]:
    """The fitted fields of a policy by path, e.g. `shape.scorer.w1`; E_WEIGHTS for bad values."""
    tensors = {path: _to_tensor(value) for path, value in _learned_fields(policy, "")}
    check_values(tensors)
    return tensors


def policy_tree(policy: Policy) -> dict[str, Any]:
    """The record as JSON values, with a reference to a tensor for each fitted field."""
    tree = policy.model_dump(mode="json")
    for path, _ in _learned_fields(policy, ""):
        *parents, name = path.split(".")
        place = tree
        for parent in parents:
            place = place[parent]
        place[name] = {REFERENCE: path}
    return tree


def join_policy(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Policy:
    """The policy of a manifest and its tensors; inverse of `policy_tree` and `policy_tensors`.

    E_WEIGHTS if references and tensors do not match one to one, E_COST for too many numbers,
    E_POLICY for an invalid record.
    """
    count = sum(tensor.size for tensor in tensors.values())
    if count > MAX_NUMBERS:
        raise ArtifactError("E_COST", TENSORS, f"{count} numbers, more than {MAX_NUMBERS}")
    used: set[str] = set()
    whole = _resolved(tree, tensors, "", used)
    if used != tensors.keys():
        raise _bad(TENSORS, f"it has tensors {sorted(tensors)}, but the record uses {sorted(used)}")
    try:
        policy = Policy.model_validate_json(canonical_json(whole))
    except ValidationError as error:
        raise ArtifactError("E_POLICY", "policy record", describe_violation(error)) from None
    rebuilt = policy_tensors(policy)  # only the canonical form is accepted
    if rebuilt.keys() != tensors.keys():
        raise _bad("policy record", f"it refers to {sorted(tensors)}, not {sorted(rebuilt)}")
    for name, tensor in rebuilt.items():
        given = tensors[name]
        same = (tensor.dtype, tensor.shape) == (given.dtype, given.shape)
        if not same or tensor.tobytes() != given.tobytes():
            form = f"{tensor.dtype}{list(tensor.shape)} in canonical form"
            raise _bad(name, f"{given.dtype}{list(given.shape)} is not {form}")
    return policy


def _resolved(
    tree: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str, used: set[str]
) -> Any:
    """The tree with numbers in place of references; adds the paths of these to `used`."""
    found = {}
    for name, value in tree.items():
        path = prefix + name
        if isinstance(value, dict) and REFERENCE in value:
            if value != {REFERENCE: path} or path not in tensors:
                problem = f"{value} is no reference to its tensor; the file has {sorted(tensors)}"
                raise _bad(f"policy, {shown(path, max_chars=200)}", problem)
            used.add(path)
            found[name] = tensors[path].tolist()
        elif isinstance(value, dict):
            found[name] = _resolved(value, tensors, f"{path}.", used)
        else:
            found[name] = value
    return found


def _learned_fields(record: Record, prefix: str) -> Iterator[tuple[str, Any]]:
    """Paths and values of the fitted fields, depth first in the order of declaration."""
    for name in type(record).model_fields:
        value = getattr(record, name)
        if name in record.learned:
            yield prefix + name, value
        elif isinstance(value, Record):
            yield from _learned_fields(value, f"{prefix}{name}.")


def _to_tensor(value: Any) -> Tensor:
    """int64 for whole numbers, float32 for others, which records round to float32."""
    try:
        wide = np.asarray(value)
        if wide.dtype.kind == "i":
            return wide.astype(np.int64)
        with np.errstate(over="ignore"):  # infinity is refused below
            narrow = wide.astype(np.float32)
    except (OverflowError, ValueError, TypeError) as error:
        raise _bad("fitted field", f"not numbers of 64 bits: {error}") from None
    if not np.array_equal(narrow.astype(wide.dtype), wide):
        raise _bad("fitted field", "its numbers are not exact in float32")
    return narrow


def _bad(what: str, problem: str) -> ArtifactError:
    return ArtifactError("E_WEIGHTS", what, problem)
