"""Refusals of public ops, before anything is launched, and small helpers of their launchers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specctl.errors import UsageError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of logits."""


def require_tensor(
    op: str, name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype
) -> None:
    """Refuses a tensor of another shape or dtype.

    Args:
        shape: None stands for any size. dtypes: the accepted ones; none means any.
    """
    fits = tensor.shape == shape or (
        None in shape
        and tensor.ndim == len(shape)
        and all(wanted in (None, size) for size, wanted in zip(tensor.shape, shape, strict=True))
    )
    if fits and (not dtypes or tensor.dtype in dtypes):
        return
    wanted = " x ".join("any" if size is None else str(size) for size in shape)
    refuse(
        op,
        name,
        " or ".join(map(_word, dtypes or ("any dtype",))) + f" of {wanted}",
        f"{_word(tensor.dtype)} of {' x '.join(map(str, tensor.shape))}",
    )


def require_dense(op: str, name: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Refuses a buffer whose rows are not dense, or whose strides differ from another's.

    A kernel writes to such buffers in place, all of them by one stride.
    """
    is_dense = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    if not is_dense or (like is not None and tensor.stride() != like.stride()):
        expected = "dense rows" + ("" if like is None else f", strides {like.stride()}")
        refuse(op, name, expected, f"strides {tensor.stride()}", "cut related buffers alike")


def require_at_least(op: str, name: str, found: int, least: int) -> None:
    """Refuses an empty axis."""
    if found < least:
        refuse(op, name, f"at least {least}", str(found))


def require_at_most(op: str, name: str, found: int, limit: int) -> None:
    """Refuses a size beyond a kernel's capacity."""
    if found > limit:
        fix = "send less, or run the torch reference (SPECCTL_KERNELS=reference)"
        refuse(op, name, f"at most {limit}", str(found), fix)


def refuse(
    op: str, name: str, expected: str, found: str, fix: str = "see the op's docstring"
) -> None:
    """Raises the one error of all ops."""
    subject = f"kernel {op}, {name}" if name else f"kernel {op}"
    raise UsageError(f"{subject}: expected {expected}, found {found}", hint=fix)


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")


# --------------------------------------------------------------------------- launchers


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself where its last axis is dense (rows may lie apart), else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def block_of(sizes: Iterable[int], size: int) -> int:
    """The first of ascending block sizes that holds `size`."""
    return next(block for block in sizes if block >= size)


def ceil_div(number: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-number // by)
