"""Where a policy may stand: every output position of every logged request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.errors import InvariantError

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Positions:
    """R positions of Q requests, request after request, positions ascending.

    The first row of a request is where its first round starts.

    Attributes:
        start: `[Q + 1]` int64, first row of each request; the last entry is R.
        prompt: `[Q]` int32, code into `prompt_ids`. category: the same into `categories`.
        remaining: `[R]` int32, tokens of the response from here on, at least 1.
        context_tokens: `[R]` int32, text length up to and with the root.
    """

    start: Longs
    prompt: Ints
    prompt_ids: tuple[str, ...]
    category: Ints
    categories: tuple[str, ...]
    remaining: Ints
    context_tokens: Ints

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.remaining)

    @property
    def num_requests(self) -> int:
        """Q."""
        return len(self.prompt)

    @property
    def request(self) -> Longs:
        """`[R]` int64, request of each row."""
        return np.repeat(np.arange(self.num_requests), np.diff(self.start))


def join_positions(parts: list[Positions]) -> Positions:
    """All requests of all parts, codes renumbered."""
    prompt_ids, prompt = _recode([(p.prompt_ids, p.prompt) for p in parts])
    categories, category = _recode([(p.categories, p.category) for p in parts])
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


def _recode(parts: list[tuple[tuple[str, ...], Ints]]) -> tuple[tuple[str, ...], Ints]:
    """One table of names for all parts, in order of first appearance."""
    codes: dict[str, int] = {}
    tables = [[codes.setdefault(name, len(codes)) for name in names] for names, _ in parts]
    rows = [np.array(t, np.int32)[c] for t, (_, c) in zip(tables, parts, strict=True) if len(c)]
    return tuple(codes), np.concatenate(rows) if rows else np.zeros(0, np.int32)


def check_positions(positions: Positions) -> None:
    """Raises `InvariantError` where the arrays do not fit together."""
    rows, starts = positions.num_rows, positions.start
    laws: dict[str, Any] = {
        "start rises from 0 to R": starts[0] == 0
        and starts[-1] == rows
        and bool((np.diff(starts) > 0).all()),
        "one prompt and category a request": len(positions.category) == len(positions.prompt)
        and len(starts) == len(positions.prompt) + 1,
        "a token remains at every position": bool((positions.remaining >= 1).all()),
    }
    for law, holds in laws.items():
        if not holds:
            raise InvariantError(
                "positions", expected=law, found=f"{rows} rows", fix="report this log"
            )


def positions_of(rounds: Any, starts: Longs) -> Positions:
    """Of a table of `rounds` with whole dense requests.

    Args:
        starts: `[Q + 1]` first row of every request.
    """
    prompt_ids, prompt = _codes(rounds["prompt_id"], starts)
    categories, category = _codes(rounds["category"], starts)
    position = rounds["position"].to_numpy()
    last = starts[1:] - 1
    total = position[last] + rounds["num_emitted"].to_numpy()[last]
    return Positions(
        start=starts,
        prompt=prompt,
        prompt_ids=prompt_ids,
        category=category,
        categories=categories,
        remaining=(np.repeat(total, np.diff(starts)) - position).astype(np.int32),
        context_tokens=rounds["context_tokens"].to_numpy(),
    )


def _codes(column: Any, starts: Longs) -> tuple[tuple[str, ...], Any]:
    """Names and their code at each request's first row."""
    values = column.combine_chunks().take(starts[:-1]).dictionary_decode().dictionary_encode()
    return tuple(values.dictionary.to_pylist()), values.indices.to_numpy()
