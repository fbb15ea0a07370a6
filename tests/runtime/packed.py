"""Packed passes of a few trees, and how far they are from passes one by one."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from specctl.runtime.cached_model import CachedModel
from specctl.tree import PAD, ancestor_mask
from tests.runtime.toy import toy_model

FIRST = 1
PREFIXES = [[5, 9, 2], [7, 30, 11, 8, 6, 6], [12], [21, 22, 23, 24]]
PARENTS = [[-1], [-1, 0, 0, 1, 1, 2, 3], [-1, 0, 0], [-1, 0, 1, 2, 3]]
PATHS = [[0], [0, 1, 3, 6], [0, 2], [0, 1, 2]]
SIZES = [len(parents) for parents in PARENTS]
OFFSETS = [len(prefix) for prefix in PREFIXES]


def token(row: int, node: int) -> int:
    return 40 + 10 * row + node


def path_to(row: int, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(row, PARENTS[row][node]), token(row, node)]


def trees() -> tuple[Tensor, Tensor, Tensor]:
    """`[4, 7]` tokens, parents and depths; padding as the round pads."""
    shape = len(SIZES), max(SIZES)
    tokens, parent = torch.zeros(shape, dtype=torch.int64), torch.full(shape, PAD)
    depth = torch.zeros(shape, dtype=torch.int64)
    for row, parents in enumerate(PARENTS):
        for node, above in enumerate(parents):
            tokens[row, node], parent[row, node] = token(row, node), above
            depth[row, node] = len(path_to(row, node)) - 1
    return tokens, parent, depth


def packed_pass(cached: CachedModel) -> Tensor:
    """Prompts read one by one, then all trees in one pass: logits `[4, 7, V]`."""
    cached.allocate(6, 24)
    for slot in range(6):  # what stands in other slots must not matter, and stays
        cached.extend(slot, 0, torch.full((1, 20), 90))
    for row, prefix in enumerate(PREFIXES):
        cached.extend(FIRST + row, 0, torch.tensor([prefix]))
    tokens, parent, depth = trees()
    positions, mask = torch.tensor(OFFSETS)[:, None] + depth, ancestor_mask(parent, 4)
    return cached.forward(FIRST, OFFSETS, tokens, positions, mask, sizes=SIZES).logits


def largest_error(config: PreTrainedConfig) -> float:
    """Over all nodes, and over the token after each accepted path once it is compacted."""
    cached, reference = CachedModel(toy_model(0, config)), toy_model(0, config)
    reference.set_attn_implementation("eager")

    def alone(text: list[int]) -> Tensor:
        return reference(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]

    errors = []
    with torch.inference_mode():
        logits = packed_pass(cached)
        for row, size in enumerate(SIZES):
            for node in range(size):
                expected = alone(PREFIXES[row] + path_to(row, node))
                errors.append((logits[row, node] - expected).abs().max())
            assert not logits[row, size:].any(), "0 behind a row's own nodes"
        longest = max(len(path) for path in PATHS)
        paths = torch.tensor([path + [-1] * (longest - len(path)) for path in PATHS])
        cached.cache.commit(FIRST, torch.tensor(OFFSETS), paths)
        for row, path in enumerate(PATHS):
            text = PREFIXES[row] + [token(row, node) for node in path] + [77]
            after = cached.extend(FIRST + row, len(text) - 1, torch.tensor([[77]])).logits[0, -1]
            errors.append((after - alone(text)).abs().max())
    return float(max(errors))
