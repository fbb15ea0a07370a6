"""The reference of `tree_attention` against float64, what it refuses, and how work is cut."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels.tree_attention import pack_ancestors, tree_attention
from specctl.kernels.tree_attention.reference import seen_of
from specctl.kernels.tree_attention.tiling import num_splits_for
from tests.kernels.cases_tree_attention import HEADS, LAYOUTS, check, given

CPU = torch.device("cpu")
DTYPES = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_float64(layout: str, heads: str, dtype: torch.dtype, index: torch.dtype) -> None:
    check(LAYOUTS[layout], HEADS[heads], dtype, CPU, index)


def test_float64_is_exact_on_the_cpu() -> None:
    case = given(LAYOUTS["one tree"], HEADS["groups of 4"], torch.float64)
    found = tree_attention(**case.on(CPU))
    assert (found - case.expected).abs().max() < 1e-14


@pytest.mark.parametrize("num_entries", [1, 31, 32, 33, 64, 100])
def test_words_hold_the_bits(num_entries: int) -> None:
    generator = torch.Generator().manual_seed(num_entries)
    seen = torch.rand(5, num_entries, generator=generator) < 0.5
    words = pack_ancestors(seen)
    assert words.dtype == torch.int32
    for row in range(5):
        for entry in range(num_entries):
            bit = int(words[row, entry // 32]) >> (entry % 32) & 1
            assert bit == int(seen[row, entry])
    assert torch.equal(seen_of(words, num_entries), seen)


def test_no_tokens_give_none() -> None:
    arguments = given(LAYOUTS["one tree"], HEADS["alone"], torch.float32).on(CPU)
    arguments |= {"query": arguments["query"][:0], "ancestors": arguments["ancestors"][:0]}
    arguments["offsets"] = torch.zeros(2, dtype=torch.int32)
    assert tree_attention(**arguments).shape == (0, 2, 16)


WRONG = {
    "keys: expected float32": ("keys", lambda x: x.half()),
    "values: expected float32 of 1 x 2": ("values", lambda x: x[:, :, 1:]),
    "prefixes: expected int32 or int64 of 1": ("prefixes", lambda x: x.float()),
    "offsets: expected int32 or int64 of 2": ("offsets", lambda x: x[1:]),
    "ancestors: expected int32": ("ancestors", lambda x: x.long()),
    "tail entries: expected at most 32, found 33": ("max_nodes", lambda _: 33),
    "query contiguous": ("query", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "a multiple of 2 query heads": ("query", lambda x: torch.cat([x, x[:, :1]], 1)),
    "ancestors, prefixes and offsets contiguous": ("ancestors", lambda x: x.repeat(1, 2)[:, ::2]),
}


@pytest.mark.parametrize("message", WRONG)
def test_refused_before_anything_runs(message: str) -> None:
    arguments = given(LAYOUTS["one tree"], HEADS["alone"], torch.float32).on(CPU)
    name, spoil = WRONG[message]
    arguments[name] = spoil(arguments[name])
    with pytest.raises(UsageError, match=message):
        tree_attention(**arguments)


def test_heads_too_wide_are_refused() -> None:
    tensor = torch.zeros(1, 1, 1, 257)
    with pytest.raises(UsageError, match="head size: expected at most 256, found 257"):
        tree_attention(
            tensor[0],
            tensor,
            tensor,
            torch.zeros(1, dtype=torch.int64),
            torch.tensor([0, 1]),
            torch.ones(1, 1, dtype=torch.int32),
            scaling=1.0,
            max_nodes=1,
        )


def test_splits_fill_the_chip_and_no_more() -> None:
    """132 multiprocessors: 60 nodes of an 8B model are 16 tiles; a batch of 32 needs no splits."""
    assert num_splits_for(16, 64, 132) == 8
    assert num_splits_for(8, 64, 132) == 15
    assert num_splits_for(16 * 32, 64, 132) == 1
    assert num_splits_for(16, 1, 132) == 1
