"""Torch implementation of `verify_tree`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specctl.kernels.verify_tree import Acceptance, Judged, RunnerUp, Walk


def verify_tree(parent: Tensor, admitted: Tensor, max_depth: int) -> Tensor:
    rows, end = parent.shape
    steps = [torch.where(parent[:, :1] == -1, 0, end)]
    if max_depth:
        # The admitted child of each node; behind the last column stands the end of every path.
        child = parent.new_full((rows, end + 1), end)
        slots = torch.arange(end, device=parent.device).expand_as(parent)
        entered = parent.where(admitted & (parent >= 0), end)
        child.scatter_(1, entered, slots)[:, end] = end
        for _ in range(max_depth):
            steps.append(child.gather(1, steps[-1]))
    path = torch.cat(steps, 1)
    return path.masked_fill_(path == end, -1)


def walk_tree(
    parent: Tensor,
    token_ids: Tensor,
    target_ids: Tensor,
    max_depth: int,
    acceptance: Acceptance | None,
) -> Walk:
    path = verify_tree(parent, _admitted(parent, token_ids, target_ids, acceptance), max_depth)
    own = _gather(target_ids, path)
    if acceptance is None:  # an accepted child holds the target's own token
        return Walk(path, own)
    following = F.pad(path[:, 1:], (0, 1), value=-1)
    return Walk(path, torch.where(following >= 0, _gather(token_ids, following), own))


def _admitted(
    parent: Tensor, token_ids: Tensor, target_ids: Tensor, acceptance: Acceptance | None
) -> Tensor:
    """`[B, N]` bool."""
    if isinstance(acceptance, Judged):
        return acceptance.admitted
    strict = token_ids == _of_parent(target_ids, parent)
    if isinstance(acceptance, RunnerUp):
        return strict | _runner_up(parent, token_ids, target_ids, acceptance)
    return strict


def _runner_up(parent: Tensor, token_ids: Tensor, target_ids: Tensor, given: RunnerUp) -> Tensor:
    ids = given.top_ids
    first = torch.where(given.greedy[:, None], target_ids, ids[..., 0])
    second = torch.where(ids[..., 0] == first, ids[..., 1], ids[..., 0])
    own, best = _of_parent(target_ids, parent), _of_parent(first, parent)
    opens = _closeness(given) > given.bound[:, None]
    opens &= ~_has_child(parent, (token_ids == own) | (token_ids == best))
    opens &= ~(_is_denied(target_ids, given.denied) | _is_denied(second, given.denied))
    if given.filtered is not None:
        opens &= given.filtered[given.node_at, second] > float("-inf")
    return (token_ids == _of_parent(second, parent)) & _of_parent(opens, parent)


def _closeness(given: RunnerUp) -> Tensor:
    first, second = given.top_logits.unbind(-1)
    if given.form == "difference":
        return second - first
    return (second / first).masked_fill((second <= 0) | (first <= 0), float("-inf"))


def _is_denied(token_ids: Tensor, denied: Tensor | None) -> Tensor:
    if denied is None or not len(denied):
        return torch.zeros_like(token_ids, dtype=torch.bool)
    known = (token_ids >= 0) & (token_ids < len(denied))
    return denied[token_ids.clamp(0, len(denied) - 1)] & known


def _has_child(parent: Tensor, marked: Tensor) -> Tensor:
    """`[B, N]` bool: some child of the node is marked."""
    counts = torch.zeros_like(parent)
    counts.scatter_add_(1, parent.clamp(min=0), (marked & (parent >= 0)).long())
    return counts > 0


def _of_parent(values: Tensor, parent: Tensor) -> Tensor:
    """`[B, N]`: each node's parent's value; that of slot 0 where there is none."""
    return values.gather(1, parent.clamp(min=0))


def _gather(values: Tensor, index: Tensor) -> Tensor:
    """`values[b, index[b, m]]`, -1 where the index is negative."""
    return values.gather(1, index.clamp(min=0)).masked_fill(index < 0, -1)
