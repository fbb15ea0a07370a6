"""The target's own text: batched, cached continuations of training prompts, greedy and sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .corpus import Document, endless, problem_documents
from .tokenizer import encode

MAX_NEW_TOKENS = 128
MAX_PROMPT_TOKENS = 220
TEMPERATURE = 0.7
SHARES = {"arithmetic": 0.25, "strings": 0.17, "qa": 0.16, "code": 0.2, "prose": 0.1, "chat": 0.12}


@dataclass(frozen=True)
class Sample:
    """A prompt of `num_prompt` tokens and what the target wrote after it."""

    domain: str
    token_ids: tuple[int, ...]
    num_prompt: int


def prompt_ids(tokenizer: PreTrainedTokenizerFast, document: Document, rng: Random) -> list[int]:
    """The first question of a conversation, or a random head of a plain text."""
    if document.turns:
        return encode(tokenizer, document.prompt())[:MAX_PROMPT_TOKENS]
    ids = encode(tokenizer, document.render())[:-1]
    return ids[: max(8, min(MAX_PROMPT_TOKENS, int(len(ids) * rng.uniform(0.05, 0.7))))]


@torch.no_grad()
def continue_batch(
    target: LlamaForCausalLM, prompts: list[list[int]], num_new: int, *, sampled: bool
) -> list[list[int]]:
    """Continuations up to and with `<|eos|>`, at most `num_new` tokens each."""
    width, pad = max(map(len, prompts)), target.config.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    options = (
        {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}
        if sampled
        else {"do_sample": False}
    )
    output = target.generate(
        ids, attention_mask=(ids != pad).long(), max_new_tokens=num_new, pad_token_id=pad, **options
    )
    return [_until_eos(row, target.config.eos_token_id) for row in output[:, width:].tolist()]


def _until_eos(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos) + 1] if eos in ids else ids


def training_samples(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    finite: dict[str, list[Document]],
    *,
    num_batches: int,
    seed: int,
    batch_size: int = 64,
) -> Iterator[list[Sample]]:
    """Batches of one domain each, every other one greedy."""
    rng = Random(f"generate/{seed}")
    streams = {d: endless(found, seed + 1) for d, found in finite.items()}
    streams |= {c: problem_documents(c, seed + 1) for c in ("arithmetic", "strings")}
    for number in range(num_batches):
        domain = rng.choices(list(SHARES), list(SHARES.values()))[0]
        documents = islice(streams[domain], batch_size)
        prompts = sorted((prompt_ids(tokenizer, d, rng) for d in documents), key=len)
        texts = continue_batch(target, prompts, MAX_NEW_TOKENS, sampled=number % 2 == 1)
        yield [Sample(domain, tuple(p + t), len(p)) for p, t in zip(prompts, texts, strict=True)]


class SampleRows:
    """Rows `[rows, length]` of packed samples with a mask of what was generated."""

    def __init__(self, samples: list[Sample], seed: int) -> None:
        self.samples, self.rng = samples, Random(seed)
        self.queue: list[Sample] = []

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids i64 and whether each was generated, bool."""
        pairs = [self._row(length) for _ in range(rows)]
        ids, marks = zip(*pairs, strict=True)
        return torch.tensor(ids), torch.tensor(marks)

    def _row(self, length: int) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        marks: list[bool] = []
        while len(ids) < length:
            sample = self._next()
            ids += sample.token_ids
            marks += [i >= sample.num_prompt for i in range(len(sample.token_ids))]
        return ids[:length], marks[:length]

    def _next(self) -> Sample:
        if not self.queue:
            self.queue = self.rng.sample(self.samples, len(self.samples))
        return self.queue.pop()
