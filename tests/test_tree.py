"""The tree's rules and derived shapes, on trees drawn by hand and at random."""

from __future__ import annotations

import pytest
import torch

from specctl.tree import PAD, ROOT, TokenTree, take
from tests.trees import check_tree


def drawn_tree() -> TokenTree:
    """One padded slot; token ids are the node numbers.

    0 ─┬─ 1 ─┬─ 3 ── 5
       │     └─ 4
       └─ 2
    """
    parent = torch.tensor([[ROOT, 0, 0, 1, 1, 3, PAD]])
    depth = torch.tensor([[0, 1, 1, 2, 2, 3, 0]])
    logp = -torch.tensor([[0.0, 0.5, 1.0, 0.25, 2.0, 0.125, 0.0]])
    return TokenTree(torch.arange(7)[None], parent, depth, logp)


def test_take_renumbers_a_subtree() -> None:
    taken = take(drawn_tree(), torch.tensor([[0, 1, 4, -1]]))
    check_tree(taken)
    assert taken.token_ids[0, :3].tolist() == [0, 1, 4]
    assert taken.parent[0].tolist() == [ROOT, 0, 1, PAD]
    assert taken.num_nodes.tolist() == [3]


@pytest.mark.parametrize(
    ("rule", "parent", "depth", "logp"),
    [
        ("node 0 is the root", [0, ROOT], [0, 1], 0.0),
        ("there is one root", [ROOT, ROOT], [0, 1], 0.0),
        ("parents stand before children", [ROOT, 2, 0], [0, 2, 1], 0.0),
        ("depth is the parent's plus one", [ROOT, 0, 1], [0, 1, 1], 0.0),
        ("padding stands at the end", [ROOT, PAD, 0], [0, 0, 1], 0.0),
        ("log-probabilities are at most 0", [ROOT, 0], [0, 1], 0.1),
    ],
)
def test_a_broken_tree_is_noticed(
    rule: str, parent: list[int], depth: list[int], logp: float
) -> None:
    tokens, size = torch.zeros(1, len(parent)).long(), (1, len(parent))
    tree = TokenTree(tokens, torch.tensor([parent]), torch.tensor([depth]), torch.full(size, logp))
    with pytest.raises(AssertionError, match=rule):
        check_tree(tree)
