"""The fused tree attention on a GPU: float64, torch's own attention, graphs, no synchronisation."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from specctl.kernels.dispatch import forced
from specctl.kernels.tree_attention import fused, pack_ancestors, tree_attention
from specctl.kernels.tree_attention.tiling import FLOAT32, NARROW, NARROW_AMPERE, WIDE, Tiles
from tests.kernels.cases_tree_attention import (
    HEADS,
    LAYOUTS,
    TOLERANCES,
    Heads,
    assert_near,
    check,
    given,
)
from tests.kernels.cuda.capture import CUDA, captured, no_sync, overwrite

pytestmark = pytest.mark.cuda
LLAMA_8B = Heads(8, 4, 128)
RAGGED = LAYOUTS["ragged, one empty, one new"]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_float64(layout: str, heads: str, dtype: torch.dtype) -> None:
    with forced("fused"):
        check(LAYOUTS[layout], HEADS[heads], dtype, CUDA)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 192, 256])
def test_every_width(dim: int, dtype: torch.dtype) -> None:
    with forced("fused"):
        check(RAGGED, Heads(2, 4, dim), dtype, CUDA, torch.int64)


@pytest.mark.parametrize("num_splits", [1, 3, 8, 32])
@pytest.mark.parametrize("tiles", [*NARROW, *NARROW_AMPERE, *WIDE])
def test_any_cut_gives_the_same(tiles: Tiles, num_splits: int) -> None:
    case = given(RAGGED, Heads(2, 4, 64), torch.bfloat16)
    found = fused.tree_attention(**case.on(CUDA), tiles=tiles, num_splits=num_splits)
    assert_near(found, case.expected)


def test_float32_cut_gives_the_same() -> None:
    case = given(RAGGED, Heads(2, 4, 128), torch.float32)
    found = fused.tree_attention(**case.on(CUDA), tiles=FLOAT32[0], num_splits=5)
    assert_near(found, case.expected)


def dense(context: int, sizes: list[int], dtype: torch.dtype, heads: Heads) -> tuple:
    """Arguments at equal prefixes, and torch's answer with a dense mask in float64."""
    draw = torch.Generator(CUDA).manual_seed(0)
    rows, most, capacity = len(sizes), max(sizes), context + max(sizes)
    shape = rows, heads.key_heads, capacity, heads.dim
    keys = torch.randn(shape, generator=draw, device=CUDA).to(dtype)
    values = torch.randn(shape, generator=draw, device=CUDA).to(dtype)
    query_heads = heads.key_heads * heads.group
    query = torch.randn(rows, most, query_heads, heads.dim, generator=draw, device=CUDA).to(dtype)
    inner = torch.rand(rows, most, most, generator=draw, device=CUDA) < 0.3
    inner |= torch.eye(most, dtype=torch.bool, device=CUDA)
    mask = torch.ones(rows, 1, most, capacity, dtype=torch.bool, device=CUDA)
    for row, size in enumerate(sizes):
        inner[row, :, size:] = False
    mask[:, 0, :, context:] = inner
    expected = scaled_dot_product_attention(
        query.double().transpose(1, 2),
        keys.double(),
        values.double(),
        attn_mask=mask,
        enable_gqa=True,
    ).transpose(1, 2)
    own = torch.arange(most, device=CUDA) < torch.tensor(sizes, device=CUDA)[:, None]
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], device=CUDA)
    arguments = {
        "query": query[own],
        "keys": keys,
        "values": values,
        "prefixes": torch.full((rows,), context, device=CUDA),
        "offsets": offsets,
        "ancestors": pack_ancestors(inner)[own].contiguous(),
        "scaling": heads.dim**-0.5,
        "max_nodes": most,
    }
    return arguments, expected[own]


@pytest.mark.parametrize(
    ("context", "sizes"),
    [(4096, [60]), (4096, [1]), (4095, [8]), (1000, [60, 1, 24, 8]), (513, [24] * 32)],
)
def test_shapes_of_8b(context: int, sizes: list[int]) -> None:
    arguments, expected = dense(context, sizes, torch.bfloat16, LLAMA_8B)
    with forced("fused"), no_sync():
        found = tree_attention(**arguments)
    assert_near(found, expected.cpu())


def test_a_graph_reads_the_lengths_of_its_replay() -> None:
    """Captured at capacity; trees, prefixes and who has nodes change in place."""
    heads, dtype = Heads(2, 4, 128), torch.bfloat16
    names = "query", "keys", "values", "prefixes", "offsets", "ancestors"
    given_first = given(RAGGED, heads, dtype, seed=1).on(CUDA)
    given_first["query"] = given_first["query"].contiguous()
    with forced("fused"):
        graph, found = captured(lambda: tree_attention(**given_first))
    for seed, order in enumerate([(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]):
        layout = type(RAGGED)(
            tuple(RAGGED.prefixes[row] for row in order),
            tuple(RAGGED.sizes[row] for row in order),
            spare=2,
        )
        case = given(layout, heads, dtype, seed)
        fresh = case.on(CUDA)
        overwrite([given_first[name] for name in names], [fresh[name] for name in names])
        graph.replay()
        assert_near(found, case.expected)


def test_a_chip_that_is_asked_waits_for_nothing() -> None:
    arguments = given(RAGGED, LLAMA_8B, torch.bfloat16).on(CUDA)
    with forced("fused"):
        tree_attention(**arguments)
        with no_sync():
            tree_attention(**arguments)
