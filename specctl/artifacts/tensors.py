"""Fitted numbers between policy records and tensors, bit for bit in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from specctl.artifacts.layouts import check_layouts
from specctl.artifacts.manifest import TENSORS
from specctl.artifacts.safetensors_header import check_header
from specctl.errors import ArtifactError
from specctl.policy.parse import canonical_json, describe_violation
from specctl.policy.records import Policy, Record

Tensor: TypeAlias = NDArray[Any]
REFERENCE = "$tensor"
MAX_MAGNITUDE = 1e30
"""Above it a product of two values can overflow float32."""
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


def policy_tensors(policy: Policy) -> dict[str, Tensor]:
    """The fitted fields of a policy by path, e.g. `shape.scorer.w1`.

    Raises:
        ArtifactError: E_WEIGHTS for values that no artifact may hold.
    """
    tensors = {path: _to_tensor(value) for path, value in _learned_fields(policy, "")}
    check_values(tensors)
    return tensors


def policy_tree(policy: Policy) -> dict[str, Any]:
    """The record as JSON values, each fitted field replaced by a reference to its tensor."""
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

    Raises:
        ArtifactError: E_WEIGHTS if references and tensors do not match one to one, E_COST if
            there are more numbers than a record may hold, E_POLICY if it breaks its own laws.
    """
    check_layouts(tensors)
    _check_references(tree, tensors)
    values = {path: tensor.tolist() for path, tensor in tensors.items()}
    try:
        policy = Policy.model_validate_json(canonical_json(_resolve(tree, values)))
    except ValidationError as error:
        raise ArtifactError(
            "E_POLICY",
            "policy record",
            expected="the laws of its kind",
            found=describe_violation(error),
        ) from None
    _check_same(policy_tensors(policy), tensors)
    return policy


def write_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of `policy.safetensors`; equal tensors give equal bytes."""
    from safetensors.numpy import save

    # safetensors writes the memory of a strided view as it lies, hence C order
    return bytes(save({name: np.array(tensor, order="C") for name, tensor in tensors.items()}))


def read_tensors(data: bytes, name: str = TENSORS) -> dict[str, Tensor]:
    """The tensors of a safetensors file, after its header passed our own reader.

    Raises:
        ArtifactError: E_WEIGHTS for other formats, dtypes or values; E_FORMAT for files that only
            carry the name.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    check_header(name, data)
    try:
        tensors = dict(sorted(load(data).items()))  # theirs is the order of a hash table
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise _bad_weights(name, "a safetensors file of numpy dtypes", str(error)) from None
    check_values(tensors)
    return tensors


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Refuses dtypes and values that no artifact may have (E_WEIGHTS)."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (np.float32, np.int64):
            raise _bad_weights(name, "float32 or int64", str(tensor.dtype))
        if tensor.dtype.kind == "f":
            _check_finite(name, tensor)


def _check_finite(name: str, tensor: Tensor) -> None:
    size = np.abs(tensor)
    good = (size <= MAX_MAGNITUDE) & ((size == 0) | (size >= SMALLEST_NORMAL))
    if not good.all():
        expected = f"finite values, 0 or between {SMALLEST_NORMAL:.3g} and {MAX_MAGNITUDE:g}"
        raise _bad_weights(name, expected, str(tensor[~good].flat[0]))


def _learned_fields(record: Record, prefix: str) -> Iterator[tuple[str, Any]]:
    """Paths and values of the fitted fields, depth first in the order of declaration."""
    for name in type(record).model_fields:
        value = getattr(record, name)
        if name in record.learned:
            yield prefix + name, value
        elif isinstance(value, Record):
            yield from _learned_fields(value, f"{prefix}{name}.")


def _to_tensor(value: Any) -> Tensor:
    """int64 for whole numbers, float32 for all others, which the records have rounded to it."""
    try:
        wide = np.asarray(value)
        if wide.dtype.kind == "i":
            return wide.astype(np.int64)
        with np.errstate(over="ignore"):  # to infinity, hence not equal, hence refused
            narrow = wide.astype(np.float32)
    except (OverflowError, ValueError, TypeError) as error:
        raise _bad_weights("fitted field", "numbers of 64 bit", str(error)) from None
    if not np.array_equal(narrow.astype(wide.dtype), wide):
        raise _bad_weights("fitted field", "numbers that float32 holds exactly", "others")
    return narrow


def _references(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            if REFERENCE in value:
                yield prefix + name, value
            else:
                yield from _references(value, f"{prefix}{name}.")


def _check_references(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    wanted = set()
    for path, reference in _references(tree, ""):
        if reference != {REFERENCE: path} or path not in tensors:  # at once: there may be thousands
            found = f"{reference}, of tensors {sorted(tensors)}"
            raise _bad_weights(f"policy, {path}", f"a reference to its own tensor, {path!r}", found)
        wanted.add(path)
    if wanted != tensors.keys():
        raise _bad_weights(TENSORS, f"tensors {sorted(wanted)}", str(sorted(tensors)))


def _resolve(tree: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> Any:
    resolved = {}
    for name, value in tree.items():
        path = prefix + name
        nested = isinstance(value, dict) and path not in values
        resolved[name] = _resolve(value, values, f"{path}.") if nested else values.get(path, value)
    return resolved


def _check_same(rebuilt: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """What was read must be what would be written: same fields, dtypes, shapes and bits."""
    if rebuilt.keys() != given.keys():
        raise _bad_weights("policy record", f"references for {sorted(rebuilt)}", str(sorted(given)))
    for name, tensor in rebuilt.items():
        other = given[name]
        same = tensor.dtype == other.dtype and tensor.tobytes() == other.tobytes()
        if not same or tensor.shape != other.shape:
            kind = f"{tensor.dtype}{list(tensor.shape)}"
            raise _bad_weights(
                name, f"{kind} in canonical form", f"{other.dtype}{list(other.shape)}"
            )


def _bad_weights(what: str, expected: str, found: str) -> ArtifactError:
    return ArtifactError("E_WEIGHTS", what, expected=expected, found=found)
