"""Models that are tables of rational probabilities, behind the real interfaces.

`TableModel` stands where `CachedModel` stands. It stores token ids where the real one stores
keys and values, so a wrong mask, a wrong offset or a missed compaction gives it a wrong context,
and every probability it answers with is an integer over `TOTAL`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from specctl.runtime.attention import Pass
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

    def commit(self, offset: Tensor, path: Tensor) -> None:
        for slot, (start, nodes) in enumerate(zip(offset.tolist(), path.tolist(), strict=True)):
            kept = [int(self.tokens[slot, start + node]) for node in nodes if node >= 0]
            self.tokens[slot, start:] = -9
            self.tokens[slot, start : start + len(kept)] = torch.tensor(kept)

    def move(self, source: int, target: int) -> None:
        self.tokens[target] = self.tokens[source]


class TableModel:
    """A model by table; see the module docstring."""

    def __init__(self, law: Law) -> None:
        self.law, self.vocab_size, self.context_tokens = law, VOCAB, 64
        self.devices = (torch.device("cpu"),)
        self.device, self.cache = self.devices[0], None
        self.config = SimpleNamespace(num_hidden_layers=1)

    dtype = torch.float32
    window = None
    aux_layers = ()

    def capture(self, aux_layers: tuple[int, ...]) -> None:
        assert aux_layers == ()

    def allocate(self, num_slots: int, capacity: int) -> None:
        self.cache = _TextCache(num_slots, capacity)

    def extend(
        self, slot: int, offset: int, token_ids: Tensor, *, last_only: bool = True
    ) -> ForwardResult:
        assert last_only
        store, size = self.cache.tokens[slot], token_ids.shape[1]
        store[offset : offset + size] = token_ids[0]
        context = tuple(store[: offset + size].tolist())
        return ForwardResult(torch.tensor([_logits(self.law, context)]), None)

    def forward(self, reads: Pass) -> ForwardResult:
        """Every token's context is what it sees of its slot."""
        answers = []
        words, prefixes = reads.packed_words.tolist(), reads.prefixes.tolist()
        tails = range(reads.behind + reads.max_nodes)
        tokens = zip(
            reads.row.tolist(), reads.place.tolist(), reads.token_ids.tolist(), strict=True
        )
        for row, place, token in tokens:
            self.cache.tokens[row, place] = token
        texts = self.cache.tokens.tolist()
        places = zip(reads.row.tolist(), reads.position_ids.tolist(), words, strict=True)
        for row, position, bits in places:
            text, prefix = texts[row], prefixes[row]
            tree = [text[prefix + i] for i in tails if bits[i // 32] >> (i % 32) & 1]
            context = (*text[:prefix], *tree)
            # Padding, or a bug: something that no distribution has.
            wrong = len(context) != position + 1 or min(context) < 0
            answers.append(_NOTHING if wrong else _logits(self.law, context))
        return ForwardResult(torch.tensor(answers).view(-1, VOCAB), None)


_NOTHING = [0.0, -1.0, -2.0]


@cache
def _logits(law: Law, context: tuple[int, ...]) -> list[float]:
    weights = torch.tensor(law(list(context)), dtype=torch.float64)
    found: list[float] = (weights / TOTAL).log().float().tolist()
    return found
