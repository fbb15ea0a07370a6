"""Models that are tables of rational probabilities, behind the real interfaces.

`TableModel` stands where `CachedModel` stands. It stores token ids where the real one stores
keys and values, so a wrong mask, a wrong offset or a missed compaction gives it a wrong context,
and every probability it answers with is an integer over `TOTAL`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from specctl.runtime.cached_model import ForwardResult

VOCAB, TOTAL = 3, 4
_LAWS = ((2, 1, 1), (1, 2, 1), (1, 1, 2), (0, 3, 1), (3, 0, 1), (1, 3, 0))
Law = Callable[[list[int]], tuple[int, ...]]


def target_law(context: list[int]) -> tuple[int, ...]:
    """Weights over `VOCAB` tokens, summing to `TOTAL`, by the last two tokens and the length."""
    before = context[-2] if len(context) > 1 else 0
    return _LAWS[(3 * context[-1] + 5 * before + len(context)) % 6]


def drafter_law(context: list[int]) -> tuple[int, ...]:
    """A drafter that often disagrees."""
    return _LAWS[(2 * context[-1] + len(context)) % 6]


class _TextCache:
    """Token ids where keys and values would stand."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = torch.full((slots, capacity), -9)

    def commit(self, first_slot: int, offset: Tensor, path: Tensor) -> None:
        rows = range(first_slot, first_slot + len(offset))
        for slot, start, nodes in zip(rows, offset.tolist(), path.tolist(), strict=True):
            kept = [int(self.tokens[slot, start + node]) for node in nodes if node >= 0]
            self.tokens[slot, start:] = -9
            self.tokens[slot, start : start + len(kept)] = torch.tensor(kept)

    def move(self, source: int, target: int) -> None:
        self.tokens[target] = self.tokens[source]


class TableModel:
    """A model by table; see the module docstring."""

    def __init__(self, law: Law) -> None:
        self.law, self.vocab_size, self.context_tokens = law, VOCAB, 64
        self.device, self.cache = torch.device("cpu"), None
        self.config = SimpleNamespace(num_hidden_layers=1)

    def capture(self, aux_layers: tuple[int, ...]) -> None:
        assert aux_layers == ()

    def allocate(self, num_slots: int, capacity: int) -> None:
        self.cache = _TextCache(num_slots, capacity)

    def extend(self, slot: int, offset: int, token_ids: Tensor) -> ForwardResult:
        size = token_ids.shape[1]
        inner = torch.ones(1, size, size, dtype=torch.bool).tril()
        positions = torch.arange(offset, offset + size)[None]
        result = self.forward(slot, [offset], token_ids, positions, inner)
        return ForwardResult(result.logits[:, -1:], None)

    def forward(
        self,
        first_slot: int,
        offsets: list[int],
        token_ids: Tensor,
        position_ids: Tensor,
        inner: Tensor,
        *,
        behind: int = 0,
        last_only: bool = False,
        sizes: list[int] | None = None,
        mask_buffer: Tensor | None = None,
    ) -> ForwardResult:
        del last_only, sizes, mask_buffer
        answers = []
        seen = inner.expand(len(offsets), -1, -1).tolist()
        places = (position_ids + 1).tolist()
        for row, offset in enumerate(offsets):
            store = self.cache.tokens[first_slot + row]
            start = offset + behind
            store[start : start + token_ids.shape[1]] = token_ids[row]
            text = store.tolist()
            prefix, tree = text[:offset], text[offset : offset + inner.shape[2]]
            for visible, place in zip(seen[row], places[row], strict=True):
                context = (*prefix, *itertools.compress(tree, visible))
                # Padding, or a bug: something that no law says.
                wrong = len(context) != place or min(context) < 0
                answers.append(_NOTHING if wrong else _logits(self.law, context))
        return ForwardResult(torch.tensor(answers).view(*token_ids.shape, VOCAB), None)


_NOTHING = [0.0, -1.0, -2.0]


@cache
def _logits(law: Law, context: tuple[int, ...]) -> list[float]:
    weights = torch.tensor(law(list(context)), dtype=torch.float64)
    found: list[float] = (weights / TOTAL).log().float().tolist()
    return found
