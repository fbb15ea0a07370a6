"""`tree_attention` against the loop of its docstring in float64, its refusals, and how work is cut.

A layout is prefixes and tree sizes of the requests, and how many of the packed tokens belong to no
request. Storage of other slots, entries behind a request's own and bits beyond its tail are NaN or
set, so that reads out of bounds show.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp

import pytest
import torch
from torch import Tensor

from specctl.kernels.checks import FLOATS
from specctl.kernels.dispatch import forced
from specctl.kernels.tree_attention import pack_ancestors, tree_attention
from tests.kernels.conftest import FUSED
from tests.kernels.helpers import CPU, captured, overwrite, poisoned


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
    "one long among short": Layout((700, 3, 0, 31, 64), (5, 7, 1, 2, 4)),
}
HEADS = {
    "alone": Heads(2, 1, 16),
    "groups of 4": Heads(2, 4, 64),
    "groups of 7": Heads(1, 7, 80),
}
RAGGED = LAYOUTS["ragged, one empty, one new"]
HALVES = [dtype for dtype in FLOATS if dtype != torch.float32]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative to 1 + |expected|. In float32 a GPU's exp2 is approximate; else two units in the last
place of a dtype of two bytes: weights are rounded before they meet the values, the mean once more.
"""


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


def given(
    layout: Layout, heads: Heads, dtype: torch.dtype, seed: int = 0, *, is_exact: bool = True
) -> Given:
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
    expected = query.double()
    if is_exact:
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


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [*((heads, torch.float32) for heads in HEADS), *(("groups of 4", dtype) for dtype in HALVES)],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_float64(
    layout: str, heads: str, dtype: torch.dtype, device: torch.device, *, is_quick: bool
) -> None:
    if not is_quick and heads != "alone" and layout != "one tree":
        pytest.skip("too slow as Python")
    check(LAYOUTS[layout], HEADS[heads], dtype, device)
    if heads == "alone" and layout == "one tree":
        check(LAYOUTS[layout], HEADS[heads], dtype, device, torch.int64)


@pytest.mark.parametrize(("dim", "dtype"), [(96, torch.float16), (256, torch.bfloat16)])
def test_every_width(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    check(RAGGED, Heads(1, 2, dim), dtype, device, torch.int64)


def cuts() -> list[object]:
    """Every table of tiles, and few to many slots, in the interpreter or on a GPU."""
    pytest.importorskip("triton")
    from specctl.kernels.tree_attention import fused

    tiles = {*fused.NARROW, *fused.NARROW_AMPERE, *fused.WIDE, *fused.FLOAT32}
    found = [(each, num_slots) for each in sorted(tiles) for num_slots in (6, 12)]
    return [*found, (fused.NARROW[0], 4), (fused.NARROW[0], 5), (fused.NARROW[0], 40)]


@FUSED
@pytest.mark.parametrize("cut", cuts(), ids=str)
def test_any_cut_gives_the_same(cut: object, backend: str, device: torch.device) -> None:
    """Splits that hold part of the prefix, its end and the tail, the tail alone, or nothing."""
    from specctl.kernels.tree_attention import fused

    tiles, num_slots = cut  # type: ignore[misc]
    if backend == "interpreter" and num_slots == 6:
        pytest.skip("too slow as Python")
    dtype = torch.float32 if backend == "interpreter" or tiles in fused.FLOAT32 else torch.bfloat16
    case = given(RAGGED, Heads(1, 2, 16), dtype)
    with poisoned():
        found = fused.tree_attention(**case.on(device), tiles=tiles, num_slots=num_slots)
    assert found[RAGGED.bounds[-1] :].count_nonzero() == 0
    assert_near(found, case.expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
@pytest.mark.parametrize("num_slots", [4, 12, None])
def test_nan_of_a_query_stays(num_slots: int | None, backend: str, device: torch.device) -> None:
    """In splits too, whose maxima drop it on a GPU."""
    case = given(RAGGED, Heads(1, 2, 16), torch.float32).on(device)
    spoilt = RAGGED.bounds[3] + 1  # of the longest request
    case["query"][spoilt] = float("nan")
    if backend == "reference" or num_slots is None:
        found = tree_attention(**case)
    else:
        from specctl.kernels.tree_attention import fused

        found = fused.tree_attention(**case, num_slots=num_slots)
    assert found[spoilt].isnan().all()
    assert found[:spoilt].isfinite().all()
    assert found[spoilt + 1 :].isfinite().all()


@pytest.mark.cuda
def test_a_graph_reads_the_lengths_of_its_replay() -> None:
    """Captured at capacity; trees, prefixes and the rows that have nodes change in place."""
    heads, there = Heads(2, 4, 128), torch.device("cuda")
    names = "query", "keys", "values", "prefixes", "offsets", "ancestors"
    first = given(RAGGED, heads, torch.bfloat16, seed=1).on(there)
    first["query"] = first["query"].contiguous()
    with forced("fused"):
        graph, found = captured(lambda: tree_attention(**first))
    for seed, order in enumerate([(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]):
        layout = Layout(
            tuple(RAGGED.prefixes[row] for row in order),
            tuple(RAGGED.sizes[row] for row in order),
            spare=2,
        )
        case = given(layout, heads, torch.bfloat16, seed)
        fresh = case.on(there)
        overwrite([first[name] for name in names], [fresh[name] for name in names])
        graph.replay()
        assert_near(found, case.expected)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("context", "sizes"),
    [(4096, [60]), (4096, [1]), (4095, [8]), (1000, [60, 1, 24, 8]), (513, [24] * 32)],
)
def test_shapes_of_8b(context: int, sizes: list[int]) -> None:
    """The fused kernel and the reference, on the same GPU."""
    layout = Layout((context,) * len(sizes), tuple(sizes))
    arguments = given(layout, Heads(8, 4, 128), torch.bfloat16, is_exact=False).on(
        torch.device("cuda")
    )
    with forced("reference"):
        expected = tree_attention(**arguments)
    with forced("fused"):
        found = tree_attention(**arguments)
    assert_near(found, expected.cpu().double())


def test_float64_is_exact_on_the_cpu() -> None:
    case = given(LAYOUTS["one tree"], HEADS["groups of 4"], torch.float64)
    found = tree_attention(**case.on(CPU))
    assert (found - case.expected).abs().max() < 1e-14


def test_no_tokens_give_none() -> None:
    arguments = given(LAYOUTS["one tree"], HEADS["alone"], torch.float32).on(CPU)
    arguments |= {"query": arguments["query"][:0], "ancestors": arguments["ancestors"][:0]}
    arguments["offsets"] = torch.zeros(2, dtype=torch.int32)
    assert tree_attention(**arguments).shape == (0, 2, 16)
