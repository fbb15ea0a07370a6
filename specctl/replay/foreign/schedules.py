"""How long a chain is: fixed, by the size of the batch, or as long as it is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from specctl.errors import InputError, UsageError
from specctl.logs.positions import Ints, Longs
from specctl.policy.records import MAX_DEPTH
from specctl.replay.foreign.lines import Spot, parse_json


class Schedule(Protocol):
    """Draft length of every request of a step."""

    def draft_tokens(self, num_active: Longs, accepted: Ints) -> Longs:
        """`[n]` draft tokens.

        Args:
            num_active: `[n]` requests in the step's batch. accepted: `[n]`, what the log accepts.
        """
        ...

    def looks_past(self, offered_depth: int, drafted: Longs) -> Any:
        """`[n]` bool: a longer log might have let the request accept more."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """A chain of `num_draft_tokens` always; 0 is plain decoding."""

    num_draft_tokens: int

    def __post_init__(self) -> None:
        _check_length(self.num_draft_tokens, "chain length")

    def draft_tokens(self, num_active: Longs, accepted: Ints) -> Longs:
        return np.full(len(accepted), self.num_draft_tokens)

    def looks_past(self, offered_depth: int, drafted: Longs) -> Any:
        return drafted > offered_depth


@dataclass(frozen=True)
class ByBatchSize:
    """vLLM's `num_speculative_tokens_per_batch_size`: entries [first, last, K], inclusive.

    Batch sizes between two entries, and above the last, keep the K before them; the first entry
    starts at 1 (vLLM's `SpeculativeConfig`; notes/live-engines.md, 1.3). vLLM looks up the number
    of requests scheduled in the step, which is what decodes here.
    """

    entries: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        if not self.entries or self.entries[0][0] != 1:
            raise _bad_table("an entry that starts at batch size 1", str(list(self.entries[:1])))
        for first, last, length in self.entries:
            _check_length(length, "batch-size table")
            if not 1 <= first <= last:
                raise _bad_table("1 <= first <= last in every entry", f"[{first}, {last}, …]")
        for low, high in pairwise(self.entries):
            if high[0] <= low[1]:
                raise _bad_table("entries in order that do not overlap", f"{low} before {high}")

    @classmethod
    def parse(cls, text: str) -> ByBatchSize:
        """A table from JSON such as `[[1, 4, 5], [5, 16, 3], [17, 64, 1]]`.

        Raises:
            UsageError: anything else.
        """
        try:
            value = parse_json(text, Spot("batch-size table", 1))
        except InputError as error:
            raise _bad_table("JSON", error.found) from error
        rows = value if isinstance(value, list) else [value]
        for row in rows:
            if not isinstance(row, list) or [type(v) for v in row] != [int, int, int]:
                raise _bad_table("a list of [first, last, K]", str(row)[:40])
        return cls(tuple(sorted((first, last, length) for first, last, length in rows)))

    def draft_tokens(self, num_active: Longs, accepted: Ints) -> Longs:
        firsts, _, lengths = np.array(self.entries, np.int64).T
        entry = np.searchsorted(firsts, num_active, side="right") - 1
        return np.take(lengths, entry)

    def looks_past(self, offered_depth: int, drafted: Longs) -> Any:
        return drafted > offered_depth


@dataclass(frozen=True)
class Oracle:
    """Drafts exactly what is accepted, so nothing is rejected (SpecDecode-Bench's ORACLE)."""

    def draft_tokens(self, num_active: Longs, accepted: Ints) -> Longs:
        return accepted.astype(np.int64)

    def looks_past(self, offered_depth: int, drafted: Longs) -> Any:
        return drafted >= offered_depth


def _check_length(length: int, what: str) -> None:
    if not 0 <= length <= MAX_DEPTH:
        raise UsageError(
            what,
            expected=f"0 to {MAX_DEPTH} draft tokens",
            found=str(length),
            fix="0 is plain decoding",
        )


def _bad_table(expected: str, found: str) -> UsageError:
    fix = "write [[first, last, K], ...] as for vLLM's num_speculative_tokens_per_batch_size"
    return UsageError("batch-size table", expected=expected, found=found, fix=fix)
