"""What the target said about each drafted node: the only pass that reads whole logits.

A node is *seen* when its parent was verified, whether or not it was itself. Everything else about
it is censored. After this pass the `[B, N, V]` logits are dropped; what is kept is `[B, P]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specctl.kernels.token_ranks import token_ranks
from specctl.runtime.observe import RoundRecord
from specctl.tree import gather

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class TargetView:
    """Per node of the pool, `[B, P]`; meaningful where `seen`.

    Attributes:
        seen: the target's distribution after the parent is known.
        match: the target chose this token there.
        logp: log-probability under the law that was drawn from; -inf where top-k or top-p cut it.
        rank: 1 + number of strictly larger raw logits.
        top1, top2: the two largest raw logits at the parent.
    """

    seen: Tensor
    match: Tensor
    logp: Tensor
    rank: Tensor
    top1: Tensor
    top2: Tensor


def view_target(record: RoundRecord) -> TargetView:
    """Reads the target's answers for every node of a round, on the round's device.

    On CUDA nothing waits for the device; the CPU's way is the faster one there.
    """
    tree = record.pool.tree
    parent_slot = gather(slot_of(record.submitted, tree.num_slots), tree.parent, -1)
    seen, slot = parent_slot >= 0, parent_slot.clamp(min=0)
    read = read_on_device if record.target_logits.is_cuda else read_on_host
    return TargetView(
        seen=seen,
        match=seen & (gather(record.target_ids, slot, -1) == tree.token_ids),
        **read(record, seen, slot),
    )


def read_on_device(record: RoundRecord, seen: Tensor, slot: Tensor) -> dict[str, Tensor]:
    """What the logits say, without any shape that depends on values.

    Args:
        seen, slot: `[B, P]`, whether a node's parent was verified, and where.

    Returns:
        `logp`, `rank`, `top1` and `top2` of `TargetView`.
    """
    shape, sibling = record.submitted.shape, record.pool.sibling_rank
    rows = torch.arange(shape[0], device=slot.device)[:, None]
    at, width = rows * shape[1] + slot, max(1, record.top_k)
    children = _child_table(record, at.masked_fill(~seen, shape.numel()), width)
    raw = token_ranks(record.target_logits.flatten(0, 1), children)
    greedy = record.target_logp_source is record.target_logits
    law = raw if greedy else token_ranks(record.target_logp_source.flatten(0, 1), children)
    return {
        "logp": law.logits[at, sibling] - law.log_sum_exp[at],
        "rank": raw.num_larger[at, sibling] + 1,
        "top1": raw.top_two[at, 0],
        "top2": raw.top_two[at, 1],
    }


def _child_table(record: RoundRecord, at: Tensor, width: int) -> Tensor:
    """`[B * N, K]`: the k-th drafted child's token of every verified node, -1 for none.

    Args:
        at: `[B, P]`, the node's parent among all B * N, and B * N itself for none.
    """
    table = at.new_full((record.submitted.numel() + 1, width), -1)
    place = at * width + record.pool.sibling_rank
    table.view(-1).scatter_(0, place.flatten(), record.pool.tree.token_ids.flatten())
    return table[:-1]


def read_on_host(record: RoundRecord, seen: Tensor, slot: Tensor) -> dict[str, Tensor]:
    """The same in float32 for the CPU, where it competes with decoding for cores.

    Only parents of drafted nodes are read, E of the B·N verified ones: about half of a tree are
    leaves, and reading logits is most of the cost of recording.
    """
    is_parent = _parents(record.submitted, seen, slot)
    at = (is_parent.flatten().cumsum(0) - 1).view_as(is_parent).gather(1, slot)
    logits = record.target_logits[is_parent].float()
    greedy = record.target_logp_source is record.target_logits
    source = logits if greedy else record.target_logp_source[is_parent].float()
    top1, top2, larger = order_statistics(logits, _children(logits, record, seen, at))
    return {
        "logp": source.log_softmax(-1)[at, record.pool.tree.token_ids],
        "rank": larger[at, record.pool.sibling_rank] + 1,
        "top1": top1[at],
        "top2": top2[at],
    }


def _parents(submitted: Tensor, seen: Tensor, slot: Tensor) -> Tensor:
    """`[B, N]` bool: slots with drafted children; the root always, so that there is one."""
    is_parent = torch.zeros_like(submitted, dtype=torch.bool)
    row, node = seen.nonzero(as_tuple=True)
    is_parent[row, slot[row, node]] = True
    is_parent[:, 0] = True
    return is_parent


def slot_of(submitted: Tensor, num_nodes: int) -> Tensor:
    """`[B, P]` int64: where a pool node stands among the submitted, -1 if it does not.

    Args:
        submitted: `[B, N]` int64 pool indices, -1 padded.
        num_nodes: P.
    """
    shape = (submitted.shape[0], num_nodes + 1)  # padding lands in the extra column
    slots = torch.full(shape, -1, device=submitted.device)
    order = torch.arange(submitted.shape[1], device=submitted.device).expand_as(submitted)
    return slots.scatter_(1, submitted.masked_fill(submitted < 0, num_nodes), order)[:, :-1]


def _children(logits: Tensor, record: RoundRecord, seen: Tensor, at: Tensor) -> Tensor:
    """`[E, K]`: logit of each parent's k-th drafted child, +inf where there is none."""
    tree, sibling = record.pool.tree, record.pool.sibling_rank
    table = logits.new_full((len(logits), max(1, record.top_k)), float("inf"))
    table[at[seen], sibling[seen]] = logits[at[seen], tree.token_ids[seen]]
    return table


def order_statistics(logits: Tensor, children: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two largest logits, and for each child the number of strictly larger ones.

    numpy compares into bytes and reduces them with vector instructions, torch does not: at E = 48,
    V = 6144, K = 8 one core of the build machine takes 0.5 ms, and 1.9 ms for a loop in torch.

    Args:
        logits: `[E, V]` float32.
        children: `[E, K]` float32, +inf for none.

    Returns:
        `[E]` float32, `[E]` float32, `[E, K]` int64.
    """
    rows, bounds = logits.numpy(), children.numpy()
    each, best = np.arange(len(rows)), rows.argmax(-1)
    rest = rows.copy()
    rest[each, best] = -np.inf
    larger = [_count_larger(rows, bounds[:, child, None]) for child in range(bounds.shape[1])]
    return (
        torch.from_numpy(rows[each, best]),
        torch.from_numpy(rest.max(-1)),
        torch.from_numpy(np.stack(larger, -1)),
    )


def _count_larger(rows: Values, bound: Values) -> Values:
    """Entries of each row above its bound: eight 0/1 bytes are added at once, as one word.

    128 words are summed before their bytes are, so no byte exceeds 128 and none carries over.
    """
    length = rows.shape[1]
    flags = np.zeros((len(rows), -(-length // 1024) * 1024), np.bool_)
    np.greater(rows, bound, out=flags[:, :length])
    words = flags.view(np.uint64).reshape(len(rows), -1, 128).sum(-1)
    counts: Values = words.view(np.uint8).sum(-1, dtype=np.int64)
    return counts
