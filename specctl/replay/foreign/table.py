"""Per-position acceptance of many requests, before it is written."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from specctl.logs.positions import Ints, Positions


@dataclass(frozen=True)
class DrafterReport:
    """How one drafter's lists fitted their texts.

    Attributes:
        num_entries: entries that the lists hold or should hold, whichever is more, summed.
        misaligned: entries by kind, see `align.KINDS`.
        first_line: 1-based line where each kind was met first.
        max_accepted: most draft tokens accepted at a position.
    """

    num_entries: int
    misaligned: dict[str, int]
    first_line: dict[str, int]
    max_accepted: int

    @property
    def misaligned_share(self) -> float:
        """Misaligned entries over all entries."""
        return sum(self.misaligned.values()) / max(self.num_entries, 1)


@dataclass(frozen=True)
class AcceptanceTable:
    """What a file of per-position acceptance says, aligned.

    Attributes:
        positions: R positions of Q requests; a request is its own prompt.
        num_accepted: drafter to `[R]` int32, draft tokens accepted there, bonus excluded, and
            never beyond the end of the text.
        reports: by drafter.
        num_without_rounds: requests whose usable text is shorter than two tokens: prefill gives
            the first, so no round is needed. They are left out.
        num_cut_tokens: generated tokens left out, because a list does not reach them.
    """

    positions: Positions
    num_accepted: dict[str, Ints]
    reports: dict[str, DrafterReport]
    num_without_rounds: int
    num_cut_tokens: int


class TableBuilder:
    """Collects requests."""

    def __init__(self, drafters: tuple[str, ...]) -> None:
        self._ids: list[str] = []
        self._categories: list[str] = []
        self._num_rows: list[int] = []
        self._num_prompt: list[int] = []
        self._accepted: dict[str, list[Ints]] = {name: [] for name in drafters}
        self.num_without_rounds = self.num_cut_tokens = 0

    def add(
        self,
        request_id: str,
        category: str,
        num_prompt: int,
        num_generated: int,
        accepted: dict[str, Ints],
    ) -> None:
        """Adds one request, cut to the positions that all its lists reach."""
        num_rows = min(len(values) for values in accepted.values())
        self.num_cut_tokens += max(num_generated - 1, 0) - num_rows
        if not num_rows:
            self.num_without_rounds += 1
            return
        remaining = np.arange(num_rows, 0, -1, dtype=np.int32)
        for name, values in accepted.items():
            self._accepted[name].append(np.minimum(values[:num_rows], remaining))
        self._ids.append(request_id)
        self._categories.append(category)
        self._num_rows.append(num_rows)
        self._num_prompt.append(num_prompt)

    def build(self, reports: dict[str, DrafterReport]) -> AcceptanceTable:
        """Everything that was added, as flat arrays."""
        accepted = {name: _flat(lists) for name, lists in self._accepted.items()}
        return AcceptanceTable(
            self._positions(), accepted, reports, self.num_without_rounds, self.num_cut_tokens
        )

    def _positions(self) -> Positions:
        sizes = np.array(self._num_rows, np.int64)
        start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        ascending = np.arange(start[-1]) - np.repeat(start[:-1], sizes) + 1
        categories = tuple(sorted(set(self._categories)))
        code = {name: index for index, name in enumerate(categories)}
        return Positions(
            start=start,
            prompt=np.arange(len(sizes), dtype=np.int32),
            prompt_ids=tuple(self._ids),
            category=np.array([code[name] for name in self._categories], np.int32),
            categories=categories,
            remaining=(np.repeat(sizes, sizes) - ascending + 1).astype(np.int32),
            context_tokens=(np.repeat(self._num_prompt, sizes) + ascending).astype(np.int32),
        )


class ReportBuilder:
    """Counts one drafter's misalignments, and remembers where each kind was met first."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first_line: dict[str, int] = {}
        self._num_entries = self._max_accepted = 0

    def add(self, line: int, num_entries: int, misaligned: Counter[str], accepted: Ints) -> None:
        self._num_entries += num_entries
        self._counts += misaligned
        self._max_accepted = max(self._max_accepted, int(accepted.max(initial=0)))
        for kind in misaligned:
            self._first_line.setdefault(kind, line)

    def build(self) -> DrafterReport:
        return DrafterReport(
            self._num_entries, dict(self._counts), self._first_line, self._max_accepted
        )


def _flat(lists: list[Ints]) -> Ints:
    return np.concatenate(lists) if lists else np.zeros(0, np.int32)
