"""What a public op refuses before anything is launched."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.errors import UsageError


def require_tensor(
    op: str, name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype
) -> None:
    """Refuses a tensor of another shape or dtype.

    Args:
        shape: None stands for any size. dtypes: those that are taken; none means any.
    """
    fits = tensor.ndim == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if fits and (not dtypes or tensor.dtype in dtypes):
        return
    wanted = " x ".join("any" if size is None else str(size) for size in shape)
    raise UsageError(
        f"kernel {op}, {name}",
        expected=" or ".join(map(_word, dtypes or ("any dtype",))) + f" of {wanted}",
        found=f"{_word(tensor.dtype)} of {' x '.join(map(str, tensor.shape))}",
        fix="see the op's docstring",
    )


def require_dense(op: str, name: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Refuses a buffer whose rows are not dense, or do not lie like another's.

    A kernel writes to such buffers where they are, all of them by one stride.
    """
    is_dense = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    if is_dense and (like is None or tensor.stride() == like.stride()):
        return
    raise UsageError(
        f"kernel {op}, {name}",
        expected="dense rows" + ("" if like is None else f", strides {like.stride()}"),
        found=f"strides {tensor.stride()}",
        fix="cut buffers that belong together alike",
    )


def require_at_least(op: str, name: str, found: int, least: int) -> None:
    """Refuses what has nothing to work on."""
    if found < least:
        raise UsageError(
            f"kernel {op}, {name}",
            expected=f"at least {least}",
            found=str(found),
            fix="see the op's docstring",
        )


def require_at_most(op: str, name: str, found: int, limit: int) -> None:
    """Refuses what a kernel has no room for."""
    if found > limit:
        raise UsageError(
            f"kernel {op}, {name}",
            expected=f"at most {limit}",
            found=str(found),
            fix="send less, or run the torch reference (SPECCTL_KERNELS=reference)",
        )


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")
