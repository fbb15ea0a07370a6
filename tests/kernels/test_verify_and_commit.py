"""`verify_tree` and `commit_kv` against the loops that their docstrings spell out."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.kernels.commit_kv import commit_kv
from specctl.kernels.verify_tree import verify_tree
from specctl.tree import TokenTree
from tests.trees import random_trees


def walk(parent: list[int], admitted: list[bool]) -> list[int]:
    path = [0]
    while True:
        following = [c for c, up in enumerate(parent) if up == path[-1] and admitted[c]]
        if not following:
            return path
        path.append(following[0])


@settings(max_examples=150, deadline=None)
@given(random_trees(), st.randoms(use_true_random=False))
def test_verify_tree_equals_the_walk(tree: TokenTree, random: object) -> None:
    parent = tree.parent[0].tolist()
    admitted = [False] * len(parent)
    for node in range(len(parent)):
        children = [c for c, up in enumerate(parent) if up == node]
        if children and random.random() < 0.8:
            admitted[random.choice(children)] = True
    path = verify_tree(tree.parent, torch.tensor([admitted]), int(tree.depth.max()))
    expected = walk(parent, admitted)
    assert path[0, : len(expected)].tolist() == expected
    assert bool((path[0, len(expected) :] == -1).all())
    assert path.shape[1] == int(tree.depth.max()) + 1


def test_an_admitted_node_below_a_refused_one_is_not_reached() -> None:
    parent = torch.tensor([[-1, 0, 1, -2]])
    admitted = torch.tensor([[False, False, True, True]])
    assert verify_tree(parent, admitted, 2)[0].tolist() == [0, -1, -1]


def test_commit_kv_equals_the_loop() -> None:
    generator = torch.Generator().manual_seed(3)
    storage = torch.randn(4, 2, 3, 20, 5, generator=generator)
    before, offset = storage.clone(), torch.tensor([4, 9])
    path = torch.tensor([[0, 2, 5, 6], [0, 1, -1, -1]])
    commit_kv(storage, offset, path)
    expected = before.clone()
    for row in range(2):
        for step, node in enumerate(path[row].tolist()):
            if node >= 0:
                start = int(offset[row])
                expected[:, row, :, start + step] = before[:, row, :, start + node]
    assert torch.equal(storage, expected)


def test_commit_kv_reads_before_it_writes() -> None:
    storage = torch.arange(6.0).reshape(1, 1, 1, 6, 1).clone()
    commit_kv(storage, torch.tensor([0]), torch.tensor([[0, 2, 3, 5]]))
    assert storage.flatten()[:4].tolist() == [0.0, 2.0, 3.0, 5.0]
