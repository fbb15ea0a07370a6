"""`verify_tree`, `walk_tree`: from the target's tokens to the emitted tokens.

An acceptance names the child that `walk_tree` may follow besides the one that holds the target's
token. All its values are tensors, thresholds included, so that a captured graph reads values that
are overwritten in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specctl.kernels.checks import FLOATS, refuse, require_tensor
from specctl.kernels.dispatch import implementation


class Walk(NamedTuple):
    """The accepted paths of B trees of up to D levels."""

    path: Tensor  # `[B, D + 1]` int64, root and accepted nodes, -1 padded
    token_ids: Tensor
    """`[B, D + 1]` int64, emitted tokens: the accepted ones, then the target's own; -1 padded."""


@dataclass(frozen=True)
class Judged:
    """A rule's decisions: `follow(n)` is the child with `admitted`, if there is one."""

    admitted: Tensor  # `[B, N]` bool, at most one child per node

    def check(self, num_rows: int, num_slots: int) -> None:
        """Rejects tensors that do not fit a batch of trees."""
        require_tensor("walk_tree", "admitted", self.admitted, (num_rows, num_slots), torch.bool)


@dataclass(frozen=True)
class RunnerUp:
    """The target's second choice, where it is near the first (MARS, arXiv:2601.15498, Algorithm 1;
    `specctl.policy.mars`, modes `sound` and `alg1`).

    With v1, v2 and z1 >= z2 the ids and logits of `top`, in a greedy row v1 being y and v2 the
    other of them if y is one (of logits that tie, two kernels may order others):

        def follow(n):
            if some child holds y: return it
            if some child holds v1: return None
            if denied[y] or denied[v2] or filtered[node_at[n], v2] == -inf: return None
            closeness = z2 / z1 if z1 > 0 and z2 > 0 else -inf      # form "ratio"
            closeness = z2 - z1                                     # form "difference"
            if closeness > bound: return the child that holds v2, if there is one

    `difference` serves two of the record's forms: a margin below theta is a bound of -theta, a
    probability ratio above theta one of log(theta). Ratio and difference are those of IEEE
    float32; closeness that is NaN is not near.
    """

    top_ids: Tensor  # `[B, N, 2]` int64
    top_logits: Tensor  # `[B, N, 2]` float32, raw
    greedy: Tensor  # `[B]` bool
    bound: Tensor  # `[B]` float32, lower bound of closeness, exclusive
    form: Literal["ratio", "difference"] = "ratio"
    denied: Tensor | None = None  # `[V]` bool, tokens relaxed neither to nor from
    filtered: Tensor | None = None
    """`[T, V]` logits after top-k and top-p, -inf for tokens never emitted; None excludes none."""
    node_at: Tensor | None = None  # `[B, N]` int64, the row of each node in `filtered`

    def check(self, num_rows: int, num_slots: int) -> None:
        """Rejects tensors that do not fit a batch of trees."""
        pairs = (num_rows, num_slots, 2)
        require_tensor("walk_tree", "top_ids", self.top_ids, pairs, torch.int64)
        require_tensor("walk_tree", "top_logits", self.top_logits, pairs, torch.float32)
        require_tensor("walk_tree", "greedy", self.greedy, (num_rows,), torch.bool)
        require_tensor("walk_tree", "bound", self.bound, (num_rows,), torch.float32)
        if self.denied is not None:
            require_tensor("walk_tree", "denied", self.denied, (None,), torch.bool)
        if self.filtered is not None:
            require_tensor("walk_tree", "filtered", self.filtered, (None, None), *FLOATS)
            if self.node_at is None:
                refuse("walk_tree", "node_at is missing, which indexes the rows of filtered")
            else:
                shape = (num_rows, num_slots)
                require_tensor("walk_tree", "node_at", self.node_at, shape, torch.int64)
        if self.form not in ("ratio", "difference"):
            refuse("walk_tree", f"form must be ratio or difference, not {self.form!r}")


Acceptance = Judged | RunnerUp


def verify_tree(parent: Tensor, admitted: Tensor, max_depth: int) -> Tensor:
    """The accepted path of each tree.

    For each tree, as a loop:

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
    require_tensor("verify_tree", "parent", parent, (None, None), torch.int64)
    require_tensor("verify_tree", "admitted", admitted, tuple(parent.shape), torch.bool)
    module = implementation(__name__, "verify_tree", parent, admitted)
    path: Tensor = module.verify_tree(parent, admitted, max_depth)
    return path


def walk_tree(
    parent: Tensor,
    token_ids: Tensor,
    target_ids: Tensor,
    max_depth: int,
    acceptance: Acceptance | None = None,
) -> Walk:
    """The accepted draft tokens and the emitted text, in one walk from the root.

    For each tree, as a loop, with `children(n)` in ascending order:

        path, tokens = [root], []
        while (child := follow(path[-1])) is not None:
            path.append(child)
            tokens.append(token_ids[child])
        tokens.append(target_ids[path[-1]])             # the target's token ends the round

        def follow(n):                                  # y is the target's own token
            y = target_ids[n]
            for c in children(n):
                if token_ids[c] == y: return c
            return None                                 # or as `acceptance` says

    Each acceptance states its own `follow`; all but `Judged` put the child that holds y first,
    so that losslessness is a matter of `acceptance=None` alone. The target's tokens are arguments:
    argmax in greedy rows, drawn beforehand in sampled ones, so the walk holds no randomness and
    equal arguments give equal walks. A row without a root (an unused row of a captured batch)
    yields -1 everywhere. The fused kernel takes trees of up to 1,024 slots and 64 levels.

    Args:
        parent: `[B, N]` int64, -1 at the root in slot 0, -2 in empty slots, parents before
            children.
        token_ids: `[B, N]` int64; those of siblings differ.
        target_ids: `[B, N]` int64, the target's own token after each node.
        max_depth: D, deepest level present; more is harmless.
        acceptance: the children to follow besides; None is strict.

    Raises:
        UsageError: other dtypes or shapes, several devices, a tree above the kernel's capacity.
    """
    shape = tuple(parent.shape)
    require_tensor("walk_tree", "parent", parent, (None, None), torch.int64)
    require_tensor("walk_tree", "token_ids", token_ids, shape, torch.int64)
    require_tensor("walk_tree", "target_ids", target_ids, shape, torch.int64)
    given: list[object] = []
    if acceptance is not None:
        acceptance.check(*shape)
        given = list(vars(acceptance).values())
    tensors = (value for value in given if isinstance(value, Tensor))
    module = implementation(__name__, "walk_tree", parent, token_ids, target_ids, *tensors)
    walk: Walk = module.walk_tree(parent, token_ids, target_ids, max_depth, acceptance)
    return walk
