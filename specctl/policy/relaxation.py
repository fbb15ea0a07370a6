"""What lossy acceptances share: where a token that is not the target's own may be accepted."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from specctl.policy.verification import Verification
from specctl.tree import TokenTree, gather


def denied_ids(listed: Iterable[int], eos_ids: Collection[int], device: torch.device) -> Tensor:
    """`[K]` int64: ids that no relaxation may accept or skip; those that end a text always."""
    ids = sorted({*listed, *eos_ids})
    return torch.tensor(ids, dtype=torch.int64, device=device)


def relaxable(given: Verification, matched: Tensor, denied: Tensor) -> Tensor:
    """Nodes that a rule may accept although they are not the target's own token.

    Of a node's children only the likeliest one, only where none of them matches, and only if
    neither it nor the token that it would replace is denied.

    Args:
        matched: `[B, N]` bool, nodes that strict acceptance admits. denied: see `denied_ids`.

    Returns:
        `[B, N]` bool.
    """
    wanted = gather(given.target_ids, given.tree.parent, -1)
    forbidden = torch.isin(given.tree.token_ids, denied) | torch.isin(wanted, denied)
    return first_of_unmatched(given.tree, matched) & ~forbidden


def first_of_unmatched(tree: TokenTree, matched: Tensor) -> Tensor:
    """`[B, N]` bool: the likeliest submitted child of a node none of whose children matches.

    Args:
        matched: `[B, N]` bool.
    """
    parent = tree.parent.clamp(min=0)
    is_child, slots = tree.parent >= 0, torch.arange(tree.num_slots, device=parent.device)
    has_match = torch.zeros_like(parent).scatter_reduce(1, parent, matched.long(), "amax")
    # Slots ascend with the sibling rank, so the earliest child is the likeliest.
    own = slots.expand_as(parent).masked_fill(~is_child, tree.num_slots)
    first = torch.full_like(parent, tree.num_slots).scatter_reduce(1, parent, own, "amin")
    return is_child & (first.gather(1, parent) == slots) & (has_match.gather(1, parent) == 0)
