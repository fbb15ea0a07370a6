"""`commit_kv`: moves the accepted nodes' keys and values to the dense prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.kernels.checks import refuse, require_tensor
from specctl.kernels.dispatch import implementation


def commit_kv(storage: Tensor, offset: Tensor, path: Tensor) -> None:
    """Compacts the entries of the accepted path, for all layers and requests, in place.

    For each request b and step i with path[b, i] >= 0:

        storage[:, b, :, offset[b] + i] = storage[:, b, :, offset[b] + path[b, i]]

    reading everything before writing anything. Entries past the path stay unchanged; the cache
    treats them as free. One launch on CUDA. The caller ensures that offset + path lies below S:
    checking it would wait for the device.

    Args:
        storage: `[2 L, B, H, S, D]` keys and values of L layers, any dtype of 1, 2, 4 or 8 bytes;
            any strides but the last, which is 1.
        offset: `[B]` int64, slot of each root.
        path: `[B, D]` int64 node indices, strictly ascending (hence path[b, i] >= i), -1 padded.

    Raises:
        UsageError: other dtypes or shapes, several devices, entries that are not contiguous.
    """
    num_rows = storage.shape[1] if storage.ndim == 5 else 0
    require_tensor("commit_kv", "storage", storage, (None,) * 5)
    require_tensor("commit_kv", "offset", offset, (num_rows,), torch.int64)
    require_tensor("commit_kv", "path", path, (num_rows, None), torch.int64)
    if storage.stride(4) != 1 and storage.shape[4] > 1:
        refuse(
            "commit_kv",
            f"storage must have a last stride of 1, not strides {storage.stride()}",
            "allocate [2 L, B, H, S, D] contiguous and slice its rows only",
        )
    implementation(__name__, "commit_kv", storage, offset, path).commit_kv(storage, offset, path)
