"""Checks of arguments before a launch, and small helpers of launchers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from specctl.errors import UsageError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of logits."""


def require_tensor(
    op: str, name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype
) -> None:
    """Rejects a tensor of another shape or dtype.

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
    found = f"{_word(tensor.dtype)} of {' x '.join(map(str, tensor.shape))}"
    types = " or ".join(map(_word, dtypes or ("any dtype",)))
    refuse(op, f"{name} must be {types} of {wanted}, not {found}")


def require_dense(op: str, name: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Rejects a buffer that a kernel cannot write in place: its rows must be dense, and its strides
    those of `like`."""
    is_dense = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    if not is_dense or (like is not None and tensor.stride() != like.stride()):
        strides = "" if like is None else f" and strides {like.stride()}"
        problem = f"{name} must have dense rows{strides}, not strides {tensor.stride()}"
        refuse(op, problem, "slice related buffers alike")


def require_at_least(op: str, name: str, found: int, least: int) -> None:
    """Rejects a size below a bound."""
    if found < least:
        refuse(op, f"{name} must be at least {least}, not {found}")


def require_at_most(op: str, name: str, found: int, limit: int) -> None:
    """Rejects a size above a kernel's capacity."""
    if found > limit:
        fix = "send less, or run the torch reference (SPECCTL_KERNELS=reference)"
        refuse(op, f"{name} must be at most {limit}, not {found}", fix)


def refuse(op: str, problem: str, fix: str = "see the op's docstring") -> NoReturn:
    raise UsageError(f"kernel {op}: {problem}", hint=fix)


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")


# --------------------------------------------------------------------------- launchers


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself if its last axis is dense, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def block_of(sizes: Iterable[int], size: int) -> int:
    """The first of ascending block sizes that holds `size`."""
    return next(block for block in sizes if block >= size)


def ceil_div(number: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-number // by)
