"""`verify_tree`, `walk_tree`: from the target's answers to the tokens that are emitted."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.kernels.checks import require_tensor
from specctl.kernels.dispatch import runs_fused
from specctl.kernels.verify_tree import reference
from specctl.kernels.verify_tree.acceptance import (
    Acceptance,
    Judged,
    NearLaw,
    RunnerUp,
    Walk,
    tensors_of,
)

__all__ = ["Acceptance", "Judged", "NearLaw", "RunnerUp", "Walk", "verify_tree", "walk_tree"]


def verify_tree(parent: Tensor, admitted: Tensor, max_depth: int) -> Tensor:
    """The accepted path of each tree.

    For each tree, in words a reader can execute:

        path = [root]
        while some child c of path[-1] has admitted[c]:   # at most one does
            path.append(c)

    The fused kernel takes trees of up to 1,024 slots and 64 levels.

    Args:
        parent: `[B, N]` int64, -1 at the root, -2 in empty slots, parents before children.
        admitted: `[B, N]` bool, at most one child per node; the root's entry is ignored.
        max_depth: deepest level present; more is harmless.

    Returns:
        `[B, max_depth + 1]` int64 node indices from the root on, -1 padded.
    """
    if not runs_fused("verify_tree", parent, admitted):
        return reference.verify_tree(parent, admitted, max_depth)
    from specctl.kernels.verify_tree import fused

    return fused.verify_tree(parent, admitted, max_depth)


def walk_tree(
    parent: Tensor,
    token_ids: Tensor,
    target_ids: Tensor,
    max_depth: int,
    acceptance: Acceptance | None = None,
) -> Walk:
    """Which draft tokens are accepted and what is emitted, in one walk from the root.

    For each tree, in words a reader can execute, with `children(n)` in ascending order:

        path, tokens = [root], []
        while (child := follow(path[-1])) is not None:
            path.append(child)
            tokens.append(token_ids[child])
        bonus_id = target_ids[path[-1]]                 # the target's token ends the round
        tokens.append(bonus_id)
        num_accepted = len(path) - 1
        first_rejected = children(path[-1])[0]          # -1 if there is none

        def follow(n):                                  # y is the target's own token
            y = target_ids[n]
            for c in children(n):
                if token_ids[c] == y: return c
            return None                                 # or what `acceptance` says

    Each acceptance states its own `follow`; all but `Judged` put the child that holds y first,
    so that losslessness is a matter of `acceptance=None` alone. The target's tokens are arguments:
    argmax in greedy rows, drawn beforehand in sampled ones, so the walk holds no randomness and
    equal arguments give equal walks. A row without a root (an unused row of a captured batch)
    yields -1 everywhere and accepts 0. The fused kernel takes trees of up to 1,024 slots and 64
    levels.

    Args:
        parent: `[B, N]` int64, -1 at the root in slot 0, -2 in empty slots, parents before
            children.
        token_ids: `[B, N]` int64; those of siblings differ.
        target_ids: `[B, N]` int64, the target's own token after each node.
        max_depth: D, deepest level present; more is harmless.
        acceptance: what may follow besides; None is strict.

    Raises:
        UsageError: other dtypes or shapes, several devices, a tree above the kernel's capacity.
    """
    shape = tuple(parent.shape)
    require_tensor("walk_tree", "parent", parent, (None, None), torch.int64)
    require_tensor("walk_tree", "token_ids", token_ids, shape, torch.int64)
    require_tensor("walk_tree", "target_ids", target_ids, shape, torch.int64)
    if acceptance is not None:
        acceptance.check(*shape)
    if not runs_fused("walk_tree", parent, token_ids, target_ids, *tensors_of(acceptance)):
        return reference.walk_tree(parent, token_ids, target_ids, max_depth, acceptance)
    from specctl.kernels.verify_tree import fused

    return fused.walk_tree(parent, token_ids, target_ids, max_depth, acceptance)
