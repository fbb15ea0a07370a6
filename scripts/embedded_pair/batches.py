"""Token rows for training: domains mixed by weight, documents packed to a fixed length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .corpus import Document, drill_documents, endless, held_out_problems, problem_documents
from .tokenizer import encode

WEIGHTS = {
    "arithmetic": 4.0,
    "drill": 1.0,
    "strings": 5.0,
    "qa": 1.2,
    "code": 2.2,
    "prose": 0.6,
    "chat": 0.8,
}
CONTIGUOUS = {"code", "prose"}  # a document cut by the row's end goes on in the next row


@dataclass
class Stream:
    """Endless tokens of one domain."""

    documents: Iterator[Document]
    tokenizer: PreTrainedTokenizerFast
    is_contiguous: bool
    left: list[int] = field(default_factory=list)

    def row(self, length: int) -> list[int]:
        """The next `length` tokens; starts a document unless the domain is contiguous."""
        tokens = self.left if self.is_contiguous else []
        while len(tokens) < length:
            tokens = tokens + encode(self.tokenizer, next(self.documents).render())
        self.left = tokens[length:]
        return tokens[:length]


class Mixture:
    """Batches `[rows, length]` of token ids, each row from one domain."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, finite: dict[str, list[Document]], seed: int
    ) -> None:
        sources = {d: endless(found, seed) for d, found in finite.items()}
        sources |= {c: problem_documents(c, seed) for c in ("arithmetic", "strings")}
        sources["drill"] = drill_documents(seed)
        self.streams = {d: Stream(s, tokenizer, d in CONTIGUOUS) for d, s in sources.items()}
        self.weights = [WEIGHTS[d] for d in self.streams]
        self.rng = Random(seed)

    def batch(self, rows: int, length: int) -> Tensor:
        """Token ids [rows, length] i64."""
        domains = self.rng.choices(list(self.streams), self.weights, k=rows)
        return torch.tensor([self.streams[d].row(length) for d in domains])


def validation_rows(
    tokenizer: PreTrainedTokenizerFast,
    finite: dict[str, list[Document]],
    rows: int = 24,
    length: int = 256,
) -> dict[str, Tensor]:
    """Held-out token ids by domain, [<= rows, length] i64."""
    held = {d: [x for x in found if x.held_out] for d, found in finite.items()}
    held |= {c: held_out_problems(c, 300) for c in ("arithmetic", "strings")}
    return {d: _packed(tokenizer, found, rows, length) for d, found in held.items()}


def _packed(
    tokenizer: PreTrainedTokenizerFast, documents: list[Document], rows: int, length: int
) -> Tensor:
    tokens = (t for d in documents for t in encode(tokenizer, d.render()))
    flat = list(islice(tokens, rows * length))
    return torch.tensor(flat[: len(flat) // length * length]).view(-1, length)
