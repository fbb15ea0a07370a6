"""Draft trees as tensors, batch first: `DraftPool` holds drafted nodes, `TokenTree` verified ones.

    index     0      1      2      3      4
    token    the    cat    dog    sat    ran        the ─┬─ cat ─┬─ sat
    parent   -1      0      0      1      1              │       └─ ran
    depth     0      1      1      2      2              └─ dog

Node 0 is the root, parents precede their children, `depth` counts edges from the root, and padded
slots have parent `PAD`. Since `draft_logp <= 0`, a parent's joint log-probability is never below
its child's. Index tensors are int64, as torch's gather requires.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from specctl.lazy import Tensor, torch

ROOT = -1
"""`parent` of the root."""
PAD = -2
"""`parent` of a slot that holds no node."""


class TokenTree(NamedTuple):
    """A batch of draft trees.

    Attributes:
        token_ids: `[B, N]` int64, target vocabulary.
        parent: `[B, N]` int64, index of the parent; `ROOT` at the root, `PAD` in empty slots.
        depth: `[B, N]` int64, edges from the root (root 0).
        draft_logp: `[B, N]` float32, natural log of the drafter's probability of the token
            given its parent's path; 0 at the root.
    """

    token_ids: Tensor
    parent: Tensor
    depth: Tensor
    draft_logp: Tensor

    @property
    def num_slots(self) -> int:
        """N: nodes and padding together."""
        return self.parent.shape[1]

    @property
    def valid(self) -> Tensor:
        """`[B, N]` bool: the slot holds a node."""
        return self.parent > PAD

    @property
    def num_nodes(self) -> Tensor:
        """`[B]` int64: nodes per row, root included."""
        return self.valid.sum(1)


class DraftPool(NamedTuple):
    """Every node that a round drafted, with the drafter's numbers.

    Columns `[B, P]`, level by level, root first, which a growth writes in place.
    """

    token_ids: Tensor
    """int64, target vocabulary; 0 in replay unless the policy reads text."""
    parent: Tensor
    """int64, index into the pool; `ROOT` at the root, `PAD` in empty slots."""
    depth: Tensor
    """int64, edges from the root."""
    draft_logp: Tensor
    """float32, nats, given the parent."""
    joint_logp: Tensor
    """float32, nats, along the path; -inf in empty slots."""
    entropy: Tensor
    """float32, nats: full-vocabulary entropy of the *parent's* distribution, the one that the node
    was drawn from; 0 at the root."""
    topk_entropy: Tensor
    """float32, nats: the same over the `features.ENTROPY_TOP_K` likeliest tokens, renormalised."""
    sibling_rank: Tensor
    """int64, 0 for the likeliest child of its parent."""
    expanded: Tensor
    """bool, its children were drafted."""
    path_entropy: Tensor | None = None
    """float32, nats: `topk_entropy` summed from the root to the node, root first (HeteroSpec's Φ at
    the end of the meta path); `topk_entropy` itself in empty slots. Of kernels alone."""
    copied: Tensor | None = None
    """int64, see `features.Copy`; None unless the shape needs the text."""

    @property
    def num_slots(self) -> int:
        """P: nodes and empty slots together."""
        return self.parent.shape[1]

    @property
    def valid(self) -> Tensor:
        """`[B, P]` bool: the slot holds a node."""
        return self.parent > PAD

    @property
    def num_nodes(self) -> Tensor:
        """`[B]` int64: nodes per row, root included."""
        return self.valid.sum(1)

    def each(self, change: Callable[[Tensor], Tensor]) -> DraftPool:
        """Applies a function to every column."""
        return DraftPool(*(None if one is None else change(one) for one in self))  # type: ignore[arg-type]

    def first(self, size: int) -> DraftPool:
        """The first slots of each row."""
        return self.each(lambda column: column[:, :size])

    def rows(self, rows: slice | Tensor) -> DraftPool:
        """Selects rows."""
        return self.each(lambda column: column[rows])


POOL_COLUMNS = DraftPool._fields[:9]
"""Columns of every pool."""


class Children(NamedTuple):
    """A source's candidates below W frontier nodes of B rows."""

    token_ids: Tensor
    """`[B, W, K]` int64, likeliest first, target vocabulary."""
    logp: Tensor
    """`[B, W, K]` float32, nats, given the parent, at most 0."""
    entropy: Tensor
    """`[B, W]` float32, nats, of the distribution they come from."""
    topk_entropy: Tensor
    known: Tensor | None = None
    """`[B, W, K]` bool, false for children that the source lacks; None if it has all."""


def gather(values: Tensor, index: Tensor, fill: float) -> Tensor:
    """`values[b, index[b, n]]`, and `fill` where the index is negative.

    Args:
        values: `[B, N]`.
        index: `[B, M]` int64.
    """
    return values.gather(1, index.clamp(min=0)).masked_fill(index < 0, fill)


def path_sum(values: Tensor, parent: Tensor, max_depth: int) -> Tensor:
    """Sum of `values` from the root to each node, added root first.

    Values are added in the order in which a tree grows (parent's sum + own value), so the result
    equals the score of drafting bit for bit.

    Args:
        values: `[B, N]` float.
        parent: `[B, N]` int64.
        max_depth: deepest level present; more is harmless.
    """
    total = values
    for _ in range(max_depth):
        total = values + gather(total, parent, 0.0)
    return total


def take(tree: TokenTree | DraftPool, index: Tensor) -> TokenTree:
    """The sub-tree of the nodes at `index`, re-numbered.

    Args:
        index: `[B, M]` int64, ascending in each row, root first, ancestor-closed, -1 padded at
            the end.
    """
    slots = torch.arange(index.shape[1], device=index.device).expand_as(index)
    spare = tree.num_slots  # one more column, where padding may write
    renumber = index.new_full((len(index), spare + 1), ROOT)
    renumber.scatter_(1, index.masked_fill(index < 0, spare), slots)
    parent = gather(renumber, gather(tree.parent, index, ROOT), ROOT)
    return TokenTree(
        gather(tree.token_ids, index, 0),
        parent.masked_fill(index < 0, PAD),
        gather(tree.depth, index, 0),
        gather(tree.draft_logp, index, 0.0),
    )
