"""`commit_kv`: moves the accepted nodes' keys and values to the dense prefix."""

from __future__ import annotations

from torch import Tensor

from specctl.kernels.commit_kv import reference


def commit_kv(storage: Tensor, offset: Tensor, path: Tensor) -> None:
    """Compacts the entries of the accepted path, for all layers and requests, in place.

    For each request b and step i with path[b, i] >= 0:

        storage[:, b, :, offset[b] + i] = storage[:, b, :, offset[b] + path[b, i]]

    reading everything before writing anything. Entries past the path are left as they are;
    whoever tracks lengths treats them as free.

    Args:
        storage: `[2 L, B, H, S, D]` keys and values of L layers.
        offset: `[B]` int64, slot of each root.
        path: `[B, D]` int64 node indices, ascending, -1 padded.
    """
    reference.commit_kv(storage, offset, path)
