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
