"""`tree_attention` on the heads of an 8B model, beside torch's attention and FlashInfer's.

python benchmarks/kernels/bench_tree_attention.py            # on a GPU, a minute
python benchmarks/kernels/bench_tree_attention.py --small    # to its end on any machine

The target is 1.2 times `sdpa causal` at 60 nodes: torch's kernel on the same tokens as though they
were a text, without a mask. It computes the wrong thing, as fast as torch can.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import Row, copy_bandwidth, main, optional, row, time_us, versus
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[2]))

from specctl.kernels.dispatch import runs_fused
from specctl.kernels.tree_attention import pack_ancestors, tree_attention
from tests.trees import ancestor_mask

HEADS, KEY_HEADS, DIM = 32, 8, 128
SHAPES = [(1, 60, 4096), (1, 8, 4096), (1, 1, 4096), (1, 60, 512), (1, 60, 32_768)]
SHAPES += [(8, 60, 4096), (32, 24, 4096)]
SMALL_SHAPES = [(1, 6, 128), (2, 6, 128)]
"""Requests, nodes of each, context."""


def rows(device: torch.device, *, small: bool = False) -> list[Row]:
    """Every shape; the bytes are those of keys, values, queries and means, once each."""
    bandwidth = copy_bandwidth(device, small=small)
    shapes = SMALL_SHAPES if small else SHAPES
    return [found for shape in shapes for found in of_shape(Given(*shape, device), bandwidth)]


@dataclass
class Given:
    """Random numbers in the runtime's layout: slots of a cache, padded queries, random trees."""

    batch_size: int
    num_nodes: int
    context: int
    device: torch.device

    def __post_init__(self) -> None:
        draw = torch.Generator(self.device).manual_seed(0)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        rows, nodes, width = self.batch_size, self.num_nodes, self.context + self.num_nodes

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=self.device).to(dtype)

        self.query = random(rows, nodes, HEADS, DIM)
        self.keys, self.values = (random(rows, KEY_HEADS, width, DIM) for _ in range(2))
        parent = torch.rand(rows, nodes, generator=draw, device=self.device)
        parent = (parent * torch.arange(nodes, device=self.device)).long()
        parent[:, 0] = -1
        self.inner = ancestor_mask(parent, nodes)
        self.words = pack_ancestors(self.inner).flatten(0, 1)
        self.prefixes = torch.full((rows,), self.context, device=self.device)
        self.offsets = torch.arange(rows + 1, device=self.device) * nodes

    @property
    def num_bytes(self) -> int:
        tensors = self.query, self.keys, self.values, self.query
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def ours(self) -> Tensor:
        return tree_attention(
            self.query.flatten(0, 1),
            self.keys,
            self.values,
            self.prefixes,
            self.offsets,
            self.words,
            scaling=DIM**-0.5,
            max_nodes=self.num_nodes,
        )

    def sdpa(self, mask: object) -> Callable[[], Tensor]:
        query = self.query.transpose(1, 2)
        return lambda: scaled_dot_product_attention(
            query, self.keys, self.values, attn_mask=mask, enable_gqa=True
        )

    def dense_mask(self) -> Tensor:
        width = self.keys.shape[2]
        mask = self.inner.new_ones(self.batch_size, 1, self.num_nodes, width)
        mask[..., self.context :] = self.inner[:, None]
        return mask


def of_shape(given: Given, bandwidth: float) -> list[Row]:
    """Ours first; the others' outputs are compared with it where they compute the same."""
    shape = {"batch": given.batch_size, "nodes": given.num_nodes, "context": given.context}

    def timed(system: str, run: Callable[[], object]) -> Row:
        labels = {"op": "tree_attention", "system": system, **shape}
        return row(time_us(run, given.device), given.num_bytes, bandwidth, **labels)

    backend = "fused" if runs_fused("tree_attention", given.query) else "reference"
    dense = given.sdpa(given.dense_mask())
    expected = dense().transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(given.ours(), expected, atol=2e-2, rtol=2e-2)
    first = timed(f"specctl {backend}", given.ours)
    causal = causal_lower_right(given.num_nodes, given.keys.shape[2])
    rivals = {"sdpa causal": given.sdpa(causal), "sdpa dense mask": dense, **flashinfer(given)}
    return versus([first, *(timed(name, run) for name, run in rivals.items())], first)


def flashinfer(given: Given) -> dict[str, Callable[[], object]]:
    """Its prefill with the mask's bits, for one request; empty where it is not installed."""
    library = optional("flashinfer")
    if library is None or given.batch_size > 1 or given.device.type != "cuda":
        return {}
    query, keys, values = given.query[0], given.keys[0], given.values[0]
    bits = library.packbits(given.dense_mask().flatten(), bitorder="little")
    prefill = library.single_prefill_with_kv_cache
    return {
        "flashinfer bits": lambda: prefill(
            query, keys, values, packed_custom_mask=bits, kv_layout="HND"
        ),
        "flashinfer causal": lambda: prefill(query, keys, values, causal=True, kv_layout="HND"),
    }


if __name__ == "__main__":
    main("tree_attention", rows, "Microseconds of tree attention.")
