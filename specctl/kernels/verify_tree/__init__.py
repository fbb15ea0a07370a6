"""`verify_tree`: walks the admitted nodes from the root."""

from __future__ import annotations

from torch import Tensor

from specctl.kernels.verify_tree import reference


def verify_tree(parent: Tensor, admitted: Tensor, max_depth: int) -> Tensor:
    """The accepted path of each tree.

    For each tree, in words a reader can execute:

        path = [root]
        while some child c of path[-1] has admitted[c]:   # at most one does
            path.append(c)

    Args:
        parent: `[B, N]` int64, -1 at the root, -2 in empty slots, parents before children.
        admitted: `[B, N]` bool, at most one child per node; the root's entry is ignored.
        max_depth: deepest level present; more is harmless.

    Returns:
        `[B, max_depth + 1]` int64 node indices from the root on, -1 padded.
    """
    return reference.verify_tree(parent, admitted, max_depth)
