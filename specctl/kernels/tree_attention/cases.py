"""Configurations of `tree_attention` to compile for chips that are not here."""

from __future__ import annotations

from typing import NamedTuple

from specctl.kernels.aot import Case
from specctl.kernels.tree_attention.kernel import attend, merge
from specctl.kernels.tree_attention.tiling import (
    FLOAT32,
    NARROW,
    NARROW_AMPERE,
    WIDE,
    Tiles,
    merge_warps,
    padded_dim,
)

STRIDES = ("query_token", "query_head", "key_slot", "key_head", "value_slot", "value_head")
COUNTS = ("num_tokens", "num_words", "behind", "num_splits")


class Heads(NamedTuple):
    """A model, as attention sees it."""

    name: str
    key_heads: int
    group: int
    dim: int


LLAMA_8B = Heads("llama-8b", 8, 4, 128)
EMBEDDED = Heads("embedded", 2, 2, 64)
GEMMA_9B = Heads("gemma-9b", 8, 2, 256)


def aot_cases(arch: int) -> tuple[Case, ...]:
    """Every tuned configuration of a chip, on the model that asks most of it."""
    one, *more = NARROW if arch >= 90 else NARROW_AMPERE
    ceiling = {80: 255, 90: 200, 100: 240}[arch]
    return (
        attend_case(EMBEDDED, one, "bf16", 112),
        *(attend_case(LLAMA_8B, tiles, "bf16", ceiling) for tiles in more),
        attend_case(GEMMA_9B, WIDE[-1], "bf16", ceiling),
        attend_case(EMBEDDED, FLOAT32[0], "fp32", 88),
        merge_case(LLAMA_8B, 8, 64),
        merge_case(GEMMA_9B, 32, 184),
    )


def attend_case(
    heads: Heads, tiles: Tiles, dtype: str, registers: int, *, is_split: bool = True
) -> Case:
    """One model under one configuration, as the launcher specialises it."""
    constexprs = {
        "KEY_ENTRY": heads.dim,
        "VALUE_ENTRY": heads.dim,
        "KEY_HEADS": heads.key_heads,
        "GROUP": heads.group,
        "DIM": heads.dim,
        "PADDED_DIM": padded_dim(heads.dim),
        "QUERIES": tiles.queries,
        "ENTRIES": tiles.entries,
        "IS_SPLIT": is_split,
    }
    written = "*fp32" if is_split else f"*{dtype}"
    return Case(
        name=f"attend-{heads.name}-{dtype}-{tiles.queries}x{tiles.entries}",
        kernel=attend,
        signature={
            **dict.fromkeys(("query", "keys", "values"), f"*{dtype}"),
            **dict.fromkeys(("prefixes", "offsets", "ancestors"), "*i32"),
            **dict.fromkeys(("out", "lse"), written),
            "scale": "fp32",
            **dict.fromkeys((*COUNTS, *STRIDES), "i32"),
            **dict.fromkeys(constexprs, "constexpr"),
        },
        constexprs=constexprs,
        divisible=("query", "keys", "values", "out", "lse", *STRIDES),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        max_registers=registers,
        vector_loads=True,
    )


def merge_case(heads: Heads, splits: int, registers: int) -> Case:
    """The merge of so many splits."""
    padded = padded_dim(heads.dim)
    constexprs = {
        "HEADS": heads.key_heads * heads.group,
        "DIM": heads.dim,
        "PADDED_DIM": padded,
        "SPLITS": splits,
    }
    return Case(
        name=f"merge-{heads.name}-{splits}",
        kernel=merge,
        signature={
            **dict.fromkeys(("partial", "lse"), "*fp32"),
            "offsets": "*i32",
            "out": "*bf16",
            **dict.fromkeys(("num_tokens", "num_requests", "num_splits"), "i32"),
            **dict.fromkeys(constexprs, "constexpr"),
        },
        constexprs=constexprs,
        divisible=("partial", "lse", "out"),
        num_warps=merge_warps(splits, padded),
        max_registers=registers,
        vector_loads=True,
    )
