"""Trees at random."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from specctl.tree import PAD, ROOT, TokenTree


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
