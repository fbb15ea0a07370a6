"""The draft tree: one frozen struct of tensors, batch first, and the shapes derived from it.

    index     0      1      2      3      4
    token    the    cat    dog    sat    ran        the ─┬─ cat ─┬─ sat
    parent   -1      0      0      1      1              │       └─ ran
    depth     0      1      1      2      2              └─ dog

Laws (`check_tree` states them as code): node 0 is the root, parents stand before their
children, `depth` counts edges from the root, a padded slot has parent `PAD`, and since
`draft_logp <= 0` a parent's joint log-probability is never below its child's.
Index tensors are int64, because that is what torch gathers with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specctl.errors import InvariantError
from specctl.lazy import Tensor, torch

ROOT = -1
"""`parent` of the root."""
PAD = -2
"""`parent` of a slot that holds no node."""


@dataclass(frozen=True)
class TokenTree:
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


def root_tree(root_ids: Tensor) -> TokenTree:
    """The tree of the root alone. `root_ids`: `[B]` int64."""
    zeros = torch.zeros_like(root_ids[:, None])
    return TokenTree(root_ids[:, None], zeros + ROOT, zeros, zeros.float())


def gather(values: Tensor, index: Tensor, fill: float) -> Tensor:
    """`values[b, index[b, n]]`, and `fill` where the index is negative.

    Args:
        values: `[B, N]`.
        index: `[B, M]` int64.
    """
    return values.gather(1, index.clamp(min=0)).masked_fill(index < 0, fill)


def path_sum(values: Tensor, parent: Tensor, max_depth: int) -> Tensor:
    """Sum of `values` from the root to each node, added root first.

    The order of addition is the one in which a tree grows (parent's sum + own value), so the
    result equals the score that drafting accumulated, bit for bit.

    Args:
        values: `[B, N]` float.
        parent: `[B, N]` int64.
        max_depth: deepest level present; more is harmless.
    """
    total = values
    for _ in range(max_depth):
        total = values + gather(total, parent, 0.0)
    return total


def joint_logp(tree: TokenTree) -> Tensor:
    """`[B, N]` float32: log-probability of the path from the root; -inf in empty slots."""
    total = path_sum(tree.draft_logp, tree.parent, int(tree.depth.max()))
    return total.masked_fill(~tree.valid, float("-inf"))


def ancestor_mask(parent: Tensor, max_depth: int) -> Tensor:
    """`[B, N, N]` bool: `mask[b, i, j]` is true when j is i or an ancestor of i.

    An empty slot sees itself alone, so that attention over it stays finite.
    """
    slots = torch.arange(parent.shape[1], device=parent.device)
    current = slots.expand_as(parent)
    mask = current[..., None] == slots
    for _ in range(max_depth):
        current = gather(parent, current, ROOT)
        mask = mask | (current[..., None] == slots)
    return mask


def pack_bits(mask: Tensor) -> Tensor:
    """Packs the last axis into int64 words, bit j of word w standing for column 64 w + j.

    Args:
        mask: `[..., N]` bool.

    Returns:
        `[..., ceil(N / 64)]` int64.
    """
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 64))
    bits = padded.reshape(*mask.shape[:-1], -1, 64).to(torch.int64)
    words: Tensor = (bits << torch.arange(64, device=mask.device)).sum(-1)
    return words


def child_links(parent: Tensor) -> tuple[Tensor, Tensor]:
    """First-child and next-sibling arrays, the encoding that serving kernels walk.

    Returns:
        `first_child`, `next_sibling`: `[B, N]` int64, -1 for none.
    """
    slots = torch.arange(parent.shape[1], device=parent.device)
    is_child = parent[:, None, :] == slots[None, :, None]
    later = (parent[:, None, :] == parent[:, :, None]) & (slots[None, :] > slots[:, None])
    return _first_true(is_child), _first_true(later & (parent >= 0)[:, :, None])


def _first_true(mask: Tensor) -> Tensor:
    found, index = mask.to(torch.int8).max(-1)
    return index.masked_fill(found == 0, -1)


def take(tree: TokenTree, index: Tensor) -> TokenTree:
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


def check_tree(tree: TokenTree) -> None:
    """Raises `InvariantError` naming the first broken law; a debugging and testing aid."""
    slots = torch.arange(tree.num_slots, device=tree.parent.device)
    inner = tree.parent >= 0
    laws = {
        "node 0 is the root": (tree.parent[:, 0] == ROOT) & (tree.depth[:, 0] == 0),
        "there is one root": ~(tree.parent[:, 1:] == ROOT).any(1),
        "parents stand before children": (~inner | (tree.parent < slots)).all(1),
        "depth is the parent's plus one": (
            ~inner | (tree.depth == gather(tree.depth, tree.parent, 0) + 1)
        ).all(1),
        "a parent holds a node": (~inner | gather(tree.valid, tree.parent, 0).bool()).all(1),
        "padding stands at the end": (tree.valid[:, :-1] | ~tree.valid[:, 1:]).all(1),
        "log-probabilities are at most 0": (~tree.valid | (tree.draft_logp <= 0)).all(1),
    }
    for law, holds in laws.items():
        if not bool(holds.all()):
            row = int((~holds).nonzero()[0, 0])
            raise InvariantError(
                f"draft tree, row {row}",
                expected=law,
                found=f"parent {tree.parent[row].tolist()}, depth {tree.depth[row].tolist()}",
                fix="report this tree",
            )


def draw(tree: TokenTree, row: int = 0, label: Callable[[int], str] = str) -> str:
    """One row as an indented ASCII drawing, children under their parents.

    Args:
        label: text of a token id, e.g. a tokenizer's decode.
    """
    parent, tokens = tree.parent[row].tolist(), tree.token_ids[row].tolist()
    lines: list[str] = []

    def visit(node: int, stem: str, branch: str) -> None:
        lines.append(f"{stem}{branch}{label(tokens[node])}")
        children = [child for child, up in enumerate(parent) if up == node]
        inner = stem + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        for child in children:
            visit(child, inner, "└─ " if child == children[-1] else "├─ ")

    visit(0, "", "")
    return "\n".join(lines)
