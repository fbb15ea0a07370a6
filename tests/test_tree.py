"""The tree's laws and derived shapes, on trees drawn by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.errors import InvariantError
from specctl.tree import (
    PAD,
    ROOT,
    TokenTree,
    ancestor_mask,
    check_tree,
    child_links,
    draw,
    joint_logp,
    pack_bits,
    root_tree,
    take,
)
from tests.trees import random_trees

DRAWING = """\
0
├─ 1
│  ├─ 3
│  │  └─ 5
│  └─ 4
└─ 2"""


def drawn_tree() -> TokenTree:
    """The tree of `DRAWING`, with one padded slot; token ids are the node numbers."""
    parent = torch.tensor([[ROOT, 0, 0, 1, 1, 3, PAD]])
    depth = torch.tensor([[0, 1, 1, 2, 2, 3, 0]])
    logp = -torch.tensor([[0.0, 0.5, 1.0, 0.25, 2.0, 0.125, 0.0]])
    return TokenTree(torch.arange(7)[None], parent, depth, logp)


def ancestors(parent: list[int], node: int) -> set[int]:
    found = {node}
    while parent[node] >= 0:
        node = parent[node]
        found.add(node)
    return found


def test_draw_shows_the_tree() -> None:
    assert draw(drawn_tree()) == DRAWING


def test_joint_logp_adds_along_the_path() -> None:
    expected = [0.0, -0.5, -1.0, -0.75, -2.5, -0.875, float("-inf")]
    assert joint_logp(drawn_tree())[0].tolist() == expected


def test_child_links_of_the_drawing() -> None:
    first, following = child_links(drawn_tree().parent)
    assert first[0].tolist() == [1, 3, -1, 5, -1, -1, -1]
    assert following[0].tolist() == [-1, 2, -1, 4, -1, -1, -1]


def test_take_renumbers_a_subtree() -> None:
    taken = take(drawn_tree(), torch.tensor([[0, 1, 4, -1]]))
    check_tree(taken)
    assert taken.token_ids[0, :3].tolist() == [0, 1, 4]
    assert taken.parent[0].tolist() == [ROOT, 0, 1, PAD]
    assert taken.num_nodes.tolist() == [3]


def test_root_tree_is_valid() -> None:
    tree = root_tree(torch.tensor([7, 8]))
    check_tree(tree)
    assert tree.num_nodes.tolist() == [1, 1]


@settings(max_examples=60, deadline=None)
@given(random_trees())
def test_ancestor_mask_equals_the_walk(tree: TokenTree) -> None:
    check_tree(tree)
    parent = tree.parent[0].tolist()
    mask = ancestor_mask(tree.parent, int(tree.depth.max()))[0]
    for node in range(len(parent)):
        assert set(mask[node].nonzero().flatten().tolist()) == ancestors(parent, node)


@settings(max_examples=60, deadline=None)
@given(random_trees())
def test_child_links_reach_every_node_once(tree: TokenTree) -> None:
    first, following = (links[0].tolist() for links in child_links(tree.parent))
    reached, open_nodes = [], [0]
    while open_nodes:
        node = open_nodes.pop()
        reached.append(node)
        open_nodes += [link for link in (first[node], following[node]) if link >= 0]
    assert sorted(reached) == list(range(int(tree.num_nodes)))


@given(st.lists(st.booleans(), min_size=1, max_size=150))
def test_pack_bits_holds_every_bit(bits: list[bool]) -> None:
    words = pack_bits(torch.tensor(bits)).tolist()
    assert len(words) == -(-len(bits) // 64)
    assert [(words[j // 64] >> (j % 64)) & 1 for j in range(len(bits))] == [int(b) for b in bits]


@pytest.mark.parametrize(
    ("law", "parent", "depth"),
    [
        ("node 0 is the root", [0, ROOT], [0, 1]),
        ("there is one root", [ROOT, ROOT], [0, 1]),
        ("parents stand before children", [ROOT, 2, 0], [0, 2, 1]),
        ("depth is the parent's plus one", [ROOT, 0, 1], [0, 1, 1]),
        ("padding stands at the end", [ROOT, PAD, 0], [0, 0, 1]),
    ],
)
def test_check_tree_names_the_broken_law(law: str, parent: list[int], depth: list[int]) -> None:
    size = len(parent)
    tree = TokenTree(
        torch.zeros(1, size).long(),
        torch.tensor([parent]),
        torch.tensor([depth]),
        torch.zeros(1, size),
    )
    with pytest.raises(InvariantError, match=law):
        check_tree(tree)


def test_check_tree_refuses_positive_logp() -> None:
    tree = drawn_tree()
    tree.draft_logp[0, 1] = 0.1
    with pytest.raises(InvariantError, match="at most 0"):
        check_tree(tree)
