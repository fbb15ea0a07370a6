"""Text that a model wrote itself: batched continuations, greedy and sampled, packed into rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

TEMPERATURE = 0.7
COVERAGE = 0.995  # of generated tokens that the draft vocabulary holds


@dataclass(frozen=True)
class Sample:
    """A prompt of `num_prompt` tokens and what the model wrote after it."""

    token_ids: tuple[int, ...]
    num_prompt: int


@torch.no_grad()
def continued(
    model: Any, prompts: Sequence[list[int]], num_new: int, *, sampled: bool
) -> list[Sample]:
    """Continuations up to and with the end of text, at most `num_new` tokens each.

    Args:
        model: a causal LM of transformers, on any device.
    """
    width, eos = max(map(len, prompts)), model.config.eos_token_id
    ids = torch.tensor([[eos] * (width - len(p)) + p for p in prompts])
    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    law = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0} if sampled else {}
    output = model.generate(
        ids.to(model.device),
        attention_mask=seen.to(model.device),
        max_new_tokens=num_new,
        pad_token_id=eos,
        **{"do_sample": False, **law},
    )
    texts = [[*row, eos] for row in output[:, width:].tolist()]
    texts = [text[: min(text.index(eos) + 1, output.shape[1] - width)] for text in texts]
    return [Sample((*p, *text), len(p)) for p, text in zip(prompts, texts, strict=True)]


class SampleRows:
    """Rows `[rows, length]` of packed samples with a mask of what was generated."""

    def __init__(self, samples: Sequence[Sample], seed: int) -> None:
        self.samples, self.rng = samples, Random(seed)
        self.queue: list[Sample] = []

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids i64 and whether each was generated, bool."""
        ids, marks = zip(*(self._row(length) for _ in range(rows)), strict=True)
        return torch.tensor(ids), torch.tensor(marks)

    def _row(self, length: int) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        marks: list[bool] = []
        while len(ids) < length:
            self.queue = self.queue or self.rng.sample(self.samples, len(self.samples))
            sample = self.queue.pop()
            ids += sample.token_ids
            marks += [i >= sample.num_prompt for i in range(len(sample.token_ids))]
        return ids[:length], marks[:length]


def draft_vocabulary(samples: Sequence[Sample], others: Tensor, vocab_size: int) -> Tensor:
    """Sorted ids of the most frequent generated tokens, in multiples of 256, 2,048 at least.

    Args:
        others: further token ids; they only break ties among those hardly ever written.
    """
    written = torch.tensor([t for s in samples for t in s.token_ids[s.num_prompt :]] or [0])
    own, rest = (torch.bincount(t.flatten(), minlength=vocab_size) for t in (written, others))
    order = (own + 1e-3 * rest).argsort(descending=True)
    covered = own[order].cumsum(0) / own.sum()
    sizes = range(256, vocab_size + 1, 256)
    size = next((n for n in sizes if covered[n - 1] >= COVERAGE), vocab_size)
    return order[: max(size, 2048)].sort().values
