"""Places of a policy: every output position of every logged request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import polars as pl
    from _typeshed import DataclassInstance

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
MAX_CONTEXTS = 4
RowsT = TypeVar("RowsT", bound="DataclassInstance")


@dataclass(frozen=True)
class Positions:
    """R positions of Q requests, request after request, positions ascending; the first round of a
    request starts at its first row."""

    start: Longs  # `[Q + 1]` int64, first row of each request; the last entry is R
    prompt: Ints  # `[Q]` int32, code into `prompt_ids`
    prompt_ids: tuple[str, ...]
    category: Ints  # `[Q]` int32, code into `categories`
    categories: tuple[str, ...]
    remaining: Ints  # `[R]` int32, tokens of the response from here on, at least 1
    context_tokens: Ints  # `[R]` int32, text length, root included

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.remaining)

    @property
    def num_requests(self) -> int:
        """Q."""
        return len(self.prompt)

    @property
    def num_tokens(self) -> Longs:
        """`[Q]` int64, tokens that rounds emit of each response: all but the first."""
        return self.remaining[self.start[:-1]].astype(np.int64)

    @property
    def request(self) -> Longs:
        """`[R]` int64, request of each row."""
        return np.repeat(np.arange(self.num_requests), np.diff(self.start))

    @property
    def row_prompts(self) -> NDArray[np.object_]:
        """`[R]` text, prompt of each row."""
        return np.array(self.prompt_ids, object)[self.prompt][self.request]

    def rows_of(self, requests: Bools) -> Bools:
        """`[R]` rows of some requests, `[Q]`."""
        return np.repeat(requests, np.diff(self.start))

    def take(self, requests: Bools) -> Positions:
        """The positions of some requests, `[Q]`; names keep their codes."""
        rows, lengths = self.rows_of(requests), np.diff(self.start)[requests]
        return replace(
            self,
            start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            prompt=self.prompt[requests],
            category=self.category[requests],
            remaining=self.remaining[rows],
            context_tokens=self.context_tokens[rows],
        )


def join_positions(parts: list[Positions]) -> Positions:
    """All requests of all parts, codes renumbered."""
    if len(parts) == 1:
        return parts[0]
    prompt_ids, prompt = _recoded([(p.prompt_ids, p.prompt) for p in parts])
    categories, category = _recoded([(p.categories, p.category) for p in parts])
    sizes = np.concatenate([np.diff(part.start) for part in parts])
    return Positions(
        start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        prompt=prompt,
        prompt_ids=prompt_ids,
        category=category,
        categories=categories,
        remaining=np.concatenate([part.remaining for part in parts]),
        context_tokens=np.concatenate([part.context_tokens for part in parts]),
    )


def join_rows(parts: Sequence[RowsT]) -> RowsT:
    """Concatenates dataclasses of row arrays, nested ones too; other fields are the first's."""
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Any] = {}
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        if isinstance(values[0], Positions):
            joined[field.name] = join_positions(values)
        elif isinstance(values[0], np.ndarray):
            joined[field.name] = np.concatenate(values)
        elif is_dataclass(values[0]):
            joined[field.name] = join_rows(values)
    return replace(parts[0], **joined)


def _recoded(parts: list[tuple[tuple[str, ...], Ints]]) -> tuple[tuple[str, ...], Any]:
    """One table of names for all parts, in order of appearance, and their codes."""
    codes: dict[str, int] = {}
    tables = [[codes.setdefault(name, len(codes)) for name in names] for names, _ in parts]
    rows = [np.array(t, np.int32)[c] for t, (_, c) in zip(tables, parts, strict=True) if len(c)]
    return tuple(codes), np.concatenate(rows) if rows else np.zeros(0, np.int32)


def context_parts(context_tokens: NDArray[Any], most: int = MAX_CONTEXTS) -> Longs | None:
    """`[R]`: part of each row, of up to `most` parts by context with as many rows each; None where
    the text of the longest is below twice that of the shortest."""
    edges = np.unique(np.quantile(context_tokens, np.arange(1, most) / most, method="lower"))
    _, part = np.unique(np.searchsorted(edges, context_tokens), return_inverse=True)
    means = np.bincount(part, context_tokens) / np.bincount(part)
    return part if means[-1] >= 2 * means[0] else None


def coded(column: pl.Series) -> tuple[Ints, tuple[str, ...]]:
    """A column of names as codes, and the names in order of appearance."""
    import polars as pl

    names = column.cast(pl.String)
    found = names.unique(maintain_order=True)
    return names.cast(pl.Enum(found)).to_physical().to_numpy().astype(np.int32), tuple(found)
