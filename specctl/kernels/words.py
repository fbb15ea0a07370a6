"""Tensors as integers of their size: moving bits needs no arithmetic, so that one compiled kernel
serves all dtypes of a size."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.errors import UsageError

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes."""


def as_words(op: str, name: str, tensor: Tensor) -> Tensor:
    """A view of the same memory, same shape and strides.

    Raises:
        UsageError: a dtype of another size.
    """
    if tensor.itemsize in WORDS:
        return tensor.view(WORDS[tensor.itemsize])
    raise UsageError(
        f"kernel {op}, {name}",
        expected="a dtype of 1, 2, 4 or 8 bytes",
        found=str(tensor.dtype),
        fix="move its real and imaginary parts apart",
    )
