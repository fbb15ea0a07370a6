"""Every small tree over a few tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specctl.tree import TokenTree
from tests.runtime.loops import PROMPT
from tests.runtime.table import VOCAB


def all_trees(max_nodes: int) -> Iterator[list[tuple[int, ...]]]:
    """Every prefix-closed set of token paths with the root, up to `max_nodes`, level order."""

    def grow(paths: list[tuple[int, ...]], candidates: list[tuple[int, ...]]) -> Iterator:
        yield paths
        if len(paths) < max_nodes:
            for place, path in enumerate(candidates):
                children = [(*path, token) for token in range(VOCAB)]
                yield from grow([*paths, path], candidates[place + 1 :] + children)

    yield from grow([()], [(token,) for token in range(VOCAB)])


def tree_of(paths: list[tuple[int, ...]]) -> TokenTree:
    ordered = sorted(paths, key=lambda path: (len(path), path))
    parent = [-1] + [ordered.index(path[:-1]) for path in ordered[1:]]
    tokens = [PROMPT[-1]] + [path[-1] for path in ordered[1:]]
    depth = [len(path) for path in ordered]
    columns = (torch.tensor([column]) for column in (tokens, parent, depth))
    return TokenTree(*columns, torch.zeros(1, len(paths)))
