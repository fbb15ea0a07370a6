"""The tree's rules and derived shapes, on trees drawn by hand and at random."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.tree import PAD, ROOT, TokenTree, take
from tests.trees import ancestor_mask, check_tree, joint_logp, pack_bits


@st.composite
def random_trees(draw_from: st.DrawFn) -> TokenTree:
    size = draw_from(st.integers(1, 12))
    padding = draw_from(st.integers(0, 3))
    parent = [ROOT] + [draw_from(st.integers(0, i - 1)) for i in range(1, size)] + [PAD] * padding
    depth = [0] * len(parent)
    for node in range(1, size):
        depth[node] = depth[parent[node]] + 1
    tokens = torch.arange(len(parent))[None]
    return TokenTree(tokens, torch.tensor([parent]), torch.tensor([depth]), -tokens * 0.125)


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


def test_joint_logp_adds_along_the_path() -> None:
    expected = [0.0, -0.5, -1.0, -0.75, -2.5, -0.875, float("-inf")]
    assert joint_logp(drawn_tree())[0].tolist() == expected


def test_take_renumbers_a_subtree() -> None:
    taken = take(drawn_tree(), torch.tensor([[0, 1, 4, -1]]))
    check_tree(taken)
    assert taken.token_ids[0, :3].tolist() == [0, 1, 4]
    assert taken.parent[0].tolist() == [ROOT, 0, 1, PAD]
    assert taken.num_nodes.tolist() == [3]


@settings(max_examples=60, deadline=None)
@given(random_trees())
def test_references_of_derived_shapes_equal_walks(tree: TokenTree) -> None:
    check_tree(tree)
    parent = tree.parent[0].tolist()
    mask = ancestor_mask(tree.parent, int(tree.depth.max()))[0]
    for node in range(len(parent)):
        above, at = {node}, node
        while parent[at] >= 0:
            at = parent[at]
            above.add(at)
        assert set(mask[node].nonzero().flatten().tolist()) == above


@given(st.lists(st.booleans(), min_size=1, max_size=150))
def test_pack_bits_holds_every_bit(bits: list[bool]) -> None:
    words = pack_bits(torch.tensor(bits)).tolist()
    assert len(words) == -(-len(bits) // 64)
    assert [(words[j // 64] >> (j % 64)) & 1 for j in range(len(bits))] == [int(b) for b in bits]


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
