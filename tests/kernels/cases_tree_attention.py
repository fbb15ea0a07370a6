"""Tree attention against the loop of its docstring in float64, on any device.

A layout is prefixes and tree sizes of the requests, and how many of the packed tokens belong to
nobody. Storage of other slots, entries behind a request's own and bits beyond its tail are NaN or
set, so that whatever is read beyond its bounds shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp

import torch
from torch import Tensor

from specctl.kernels.tree_attention import pack_ancestors, tree_attention
from tests.kernels.poison import poisoned


@dataclass(frozen=True)
class Layout:
    prefixes: tuple[int, ...]
    sizes: tuple[int, ...]
    spare: int = 0
    behind: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.sizes) + self.spare

    @property
    def bounds(self) -> list[int]:
        return [0, *accumulate(self.sizes)]

    @property
    def longest_tail(self) -> int:
        return self.behind + max(self.sizes)

    @property
    def capacity(self) -> int:
        return max(self.prefixes) + self.longest_tail + 3


@dataclass(frozen=True)
class Heads:
    key_heads: int
    group: int
    dim: int


LAYOUTS = {
    "one node, no prefix": Layout((0,), (1,)),
    "one tree": Layout((70,), (9,)),
    "prefix of whole blocks": Layout((128,), (33,)),
    "ragged, one empty, one new": Layout((65, 0, 3, 97), (4, 5, 0, 35), spare=2),
    "second level of a draft": Layout((31, 66), (4, 6), behind=35),
}
HEADS = {
    "alone": Heads(2, 1, 16),
    "groups of 4": Heads(2, 4, 64),
    "groups of 7": Heads(1, 7, 80),
}
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative to 1 + |expected|: two units in the last place of a dtype of two bytes, as weights are
rounded to it before they meet the values, and the mean once more."""


@dataclass(frozen=True)
class Given:
    """Arguments on the CPU, and the answer in float64."""

    layout: Layout
    query: Tensor
    keys: Tensor
    values: Tensor
    seen: Tensor
    expected: Tensor
    scaling: float

    def on(self, device: torch.device, index: torch.dtype = torch.int32) -> dict[str, object]:
        """Arguments as the runtime gives them: views of a larger cache, queries transposed."""
        offsets = torch.tensor(self.layout.bounds, dtype=index, device=device)
        transposed = self.query.transpose(0, 1).contiguous().to(device).transpose(0, 1)
        return {
            "query": transposed,
            "keys": self.keys.to(device)[1:-1],
            "values": self.values.to(device)[1:-1],
            "prefixes": torch.tensor(self.layout.prefixes, dtype=index, device=device),
            "offsets": offsets,
            "ancestors": pack_ancestors(self.seen).to(device),
            "scaling": self.scaling,
            "max_nodes": max(self.layout.sizes),
            "behind": self.layout.behind,
        }


def given(layout: Layout, heads: Heads, dtype: torch.dtype, seed: int = 0) -> Given:
    """Random numbers, random trees' masks (any bits: the op reads them, not trees)."""
    draw = torch.Generator().manual_seed(seed)
    shape = len(layout.sizes) + 2, heads.key_heads, layout.capacity, heads.dim
    keys = torch.randn(shape, generator=draw).to(dtype)
    values = torch.randn(shape, generator=draw).to(dtype)
    query = torch.randn(
        layout.num_tokens, heads.key_heads * heads.group, heads.dim, generator=draw
    ).to(dtype)
    seen = torch.rand(layout.num_tokens, layout.longest_tail, generator=draw) < 0.4
    for start, end in pairwise(layout.bounds):
        own = torch.arange(end - start)
        seen[start:end, layout.behind + own] |= own[:, None] == own
    seen[: layout.bounds[1]][-1] = False  # a token that sees its prefix alone, or nothing at all
    scaling = heads.dim**-0.5
    expected = looped(query, keys[1:-1], values[1:-1], layout, seen, scaling)
    for slot in range(shape[0]):
        row = slot - 1
        inside = 0 <= row < len(layout.sizes)
        used = layout.prefixes[row] + layout.behind + layout.sizes[row] if inside else 0
        keys[slot, :, used:] = values[slot, :, used:] = float("nan")
    for row, (start, end) in enumerate(pairwise(layout.bounds)):
        seen[start:end, layout.behind + layout.sizes[row] :] = True  # bits beyond the tail
    return Given(layout, query, keys, values, seen, expected, scaling)


def looped(
    query: Tensor, keys: Tensor, values: Tensor, layout: Layout, seen: Tensor, scaling: float
) -> Tensor:
    """The docstring, in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    out, group = torch.zeros_like(query), query.shape[1] // keys.shape[1]
    for row, (start, end) in enumerate(pairwise(layout.bounds)):
        prefix, num_tail = layout.prefixes[row], layout.behind + end - start
        for token in range(start, end):
            entries = list(range(prefix))
            entries += [prefix + j for j in range(num_tail) if bool(seen[token, j])]
            for head in range(query.shape[1] if entries else 0):
                scores = keys[row, head // group, entries] @ query[token, head] * scaling
                weights = softmax(scores.tolist())
                out[token, head] = weights @ values[row, head // group, entries]
    return out


def softmax(scores: list[float]) -> Tensor:
    weights = [exp(score - max(scores)) for score in scores]
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


def check(
    layout: Layout,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    index: torch.dtype = torch.int32,
) -> float:
    """Largest error against float64; fresh memory is NaN, tokens of nobody are exactly 0."""
    case = given(layout, heads, dtype)
    with poisoned():
        found = tree_attention(**case.on(device, index))
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert found[layout.bounds[-1] :].count_nonzero() == 0
    return assert_near(found, case.expected)


def assert_near(found: Tensor, expected: Tensor) -> float:
    """Returns the largest error."""
    errors = (found.cpu().double() - expected).abs() / (1 + expected.abs())
    assert float(errors.max()) <= TOLERANCES[found.dtype]
    return float(errors.max())
