"""Per-position acceptance, as SpecDecode-Bench writes it: one JSON object a request.

Keys `id`, `prompt_token_ids`, `generated_token_ids`, and for each drafter `acc_<name>` with
`acc_len` (or the list itself; one unnamed drafter is `acc`), as `request.py` of
github.com/SpecDecode-Bench/simulator reads them; `category` may stand beside them. The format
does not state how many tokens were drafted.

The published files (`data/`; paper 2601.11580) hold one entry a generated token, and entry i
drafts token i: entry 0 is the prefill's own step, 1 in every list, and entry p the round that
starts once p tokens are out. Their simulator reads entry p - 1 there. Both readings exist here;
`same` is what the numbers show (docs/import.md has the check).

A list of another length than the text comes from another run of the model, so at most the prefix
that both cover can be used. Entries that do not fit are counted by kind.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from specctl.errors import InputError, UsageError
from specctl.logs.import_lines import OnBytes, Row, Spot, json_objects, kind_of
from specctl.logs.positions import Ints, Longs, Positions

PREDICTS = ("same", "next")
"""Which generated token entry i drafts first: token i, or token i + 1."""
KINDS = {
    "missing": "positions without an entry: the list is too short",
    "surplus": "entries past the last generated token: the list is too long",
    "below_one": "entries below 1, although the bonus token counts",
    "behind_below_one": "entries after the first one below 1",
    "beyond_end": "entries that accept more tokens than the text has left",
    "first_not_one": "first entries other than 1, although prefill drafts nothing",
}
"""Kinds of misaligned entries, and what they are."""
_DRAFTER = re.compile(r"acc(?:_(?P<name>[A-Za-z0-9_]{1,64}))?")


@dataclass(frozen=True)
class AlignedList:
    """One list on the positions of its text.

    Attributes:
        accepted: `[c]` int32, accepted draft tokens (bonus excluded) at positions 1..c; c is
            num_generated - 1 where the list covers the text.
        num_entries: what the list has and should have, whichever is more.
        misaligned: entries by kind, see `KINDS`.
    """

    accepted: Ints
    num_entries: int
    misaligned: Counter[str]


def align(entries: Longs, num_generated: int, predicts: str) -> AlignedList:
    """Places a list of accepted lengths.

    A list is used up to its first entry below 1: a walk could not pass it.

    Args:
        entries: `[L]` accepted lengths, bonus included.
        num_generated: n, tokens of the text.
        predicts: one of `PREDICTS`.
    """
    first = 1 if predicts == "same" else 0
    rows = entries[first : max(num_generated - 1, 0) + first]
    low = rows < 1
    covered = int(low.argmax()) if low.any() else len(rows)
    accepted = rows[:covered] - 1
    remaining = num_generated - np.arange(1, covered + 1)
    # Where entry i drafts token i + 1, the last one has nothing to draft and may be left out.
    needed = num_generated if first else num_generated - 1
    counts = {
        "missing": max(needed - len(entries), 0),
        "surplus": max(len(entries) - num_generated, 0),
        "below_one": int(low.sum()),
        "behind_below_one": int((~low[covered:]).sum()),
        "beyond_end": int((accepted > remaining).sum()),
        "first_not_one": int(first and len(entries) > 0 and entries[0] != 1),
    }
    return AlignedList(
        np.minimum(accepted, remaining).astype(np.int32),
        max(num_generated, len(entries)),
        Counter({kind: count for kind, count in counts.items() if count}),
    )


@dataclass
class DrafterLists:
    """One drafter's lists.

    Attributes:
        accepted: by request, draft tokens accepted at each position, bonus excluded.
        num_entries: entries that the lists hold or should hold, whichever is more, summed.
        misaligned: entries by kind. first_line: 1-based line where each kind was met first.
        max_accepted: most draft tokens accepted at a position.
    """

    accepted: list[Ints] = field(default_factory=list)
    num_entries: int = 0
    misaligned: Counter[str] = field(default_factory=Counter)
    first_line: dict[str, int] = field(default_factory=dict)
    max_accepted: int = 0

    def count(self, found: AlignedList, line: int) -> None:
        """Counts the entries of one list."""
        self.num_entries += found.num_entries
        self.misaligned += found.misaligned
        self.max_accepted = max(self.max_accepted, int(found.accepted.max(initial=0)))
        for kind in found.misaligned:
            self.first_line.setdefault(kind, line)

    def check(self, what: str, limit: float) -> None:
        """Refuses a file whose lists do not belong to its texts."""
        misaligned_share = self.misaligned.total() / max(self.num_entries, 1)
        if misaligned_share <= limit:
            return
        kinds = ", ".join(
            f"{count} {kind} (first in line {self.first_line[kind]})"
            for kind, count in self.misaligned.items()
        )
        worst = max(self.misaligned, key=lambda kind: self.misaligned[kind])
        raise InputError(
            what,
            expected=f"at most {limit:.2%} of the entries misaligned",
            found=f"{misaligned_share:.2%} of {self.num_entries}: {kinds}",
            fix=f"{KINDS[worst]}; correct the file, leave the drafter out (--drafter), or raise "
            f"--max-misaligned",
        )


@dataclass(frozen=True)
class AcceptanceTable:
    """A file of per-position acceptance, aligned.

    Attributes:
        positions: R positions of Q requests; a request is its own prompt.
        num_accepted: drafter to `[R]` int32, draft tokens accepted there, bonus excluded, and
            never beyond the end of the text.
        lists: by drafter.
        num_without_rounds: requests whose usable text is shorter than two tokens: prefill gives
            the first, so no round is needed. They are left out.
        num_cut_tokens: generated tokens left out, because a list does not reach them.
    """

    positions: Positions
    num_accepted: dict[str, Ints]
    lists: dict[str, DrafterLists]
    num_without_rounds: int
    num_cut_tokens: int


def is_acceptance(row: Row) -> bool:
    """Whether a record has the keys of this format."""
    return "generated_token_ids" in row and any(_DRAFTER.fullmatch(key) for key in row)


def read_acceptance(
    path: Path,
    *,
    drafters: tuple[str, ...] = (),
    entry_predicts: str = "same",
    max_misaligned: float = 0.01,
    on_bytes: OnBytes | None = None,
) -> AcceptanceTable:
    """Reads and aligns a file.

    Args:
        drafters: names after `acc_` to read; none for all of the first line. Every line must
            hold them: positions are those that all their lists cover.
        entry_predicts: `same` or `next`, see `PREDICTS`.
        max_misaligned: largest share of a drafter's entries that may be misaligned.

    Raises:
        InputError: a malformed line, by its number; a request twice; too much misaligned.
        UsageError: an option out of range, or a drafter that the file lacks.
    """
    if entry_predicts not in PREDICTS:
        raise UsageError(
            "--entry-predicts",
            expected=" or ".join(PREDICTS),
            found=repr(entry_predicts),
            fix="name one of them",
        )
    if not 0 <= max_misaligned <= 1:
        raise UsageError(
            "--max-misaligned",
            expected="a share in [0, 1]",
            found=str(max_misaligned),
            fix="0.01 allows one entry in a hundred",
        )
    reader = _Reader(drafters, entry_predicts)
    for spot, row in json_objects(path, on_bytes):
        reader.add(row, spot)
    for name, lists in reader.lists.items():
        lists.check(f"{path}, drafter {name}", max_misaligned)
    if not reader.num_rows:
        raise InputError(
            str(path),
            expected="a request with at least two generated tokens that its lists cover",
            found=f"{reader.num_without_rounds} without",
            fix="name a file with generated text",
        )
    return reader.table()


class _Reader:
    """Collects requests, each cut to the positions that all its lists reach."""

    def __init__(self, drafters: tuple[str, ...], entry_predicts: str) -> None:
        self.entry_predicts = entry_predicts
        self.lists = {name: DrafterLists() for name in drafters}
        self.num_rows: list[int] = []
        self.num_without_rounds = self.num_cut_tokens = 0
        self._ids: list[str] = []
        self._categories: list[str] = []
        self._num_prompt: list[int] = []
        self._first: dict[str, Spot] = {}

    def add(self, row: Row, spot: Spot) -> None:
        """Adds one request."""
        if not self.lists:
            found = [match for key in sorted(row) if (match := _DRAFTER.fullmatch(key))]
            if not found:
                raise spot.refuse(
                    "a key such as 'acc_eagle' or 'acc_ngram'", f"keys {sorted(row)[:8]}"
                )
            self.lists = {match["name"] or match[0]: DrafterLists() for match in found}
        request_id = spot.text(row, "id")
        earlier = self._first.setdefault(request_id, spot)
        if earlier is not spot:  # one id twice would count a request twice
            found_id = f"{request_id[:80]!r}, which {earlier.unit} {earlier.number} has too"
            raise spot.refuse("an id that is not used yet", found_id)
        num_prompt = len(spot.counts(row.get("prompt_token_ids"), "'prompt_token_ids'"))
        if not num_prompt:
            raise spot.refuse("at least one prompt token", "an empty list")
        generated = len(spot.counts(row.get("generated_token_ids"), "'generated_token_ids'"))
        category = spot.text(row, "category") if row.get("category") else ""
        aligned: dict[str, Ints] = {}
        for name, lists in self.lists.items():
            one = align(_entries(row, name, spot), generated, self.entry_predicts)
            lists.count(one, spot.number)
            aligned[name] = one.accepted
        num_rows = min(map(len, aligned.values()))
        self.num_cut_tokens += max(generated - 1, 0) - num_rows
        if not num_rows:
            self.num_without_rounds += 1
            return
        remaining = np.arange(num_rows, 0, -1, dtype=np.int32)
        for name, accepted in aligned.items():
            self.lists[name].accepted.append(np.minimum(accepted[:num_rows], remaining))
        self._ids.append(request_id)
        self._categories.append(category)
        self.num_rows.append(num_rows)
        self._num_prompt.append(num_prompt)

    def table(self) -> AcceptanceTable:
        """Everything that was added, as flat arrays."""
        sizes = np.array(self.num_rows, np.int64)
        start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        place = np.arange(start[-1]) - np.repeat(start[:-1], sizes) + 1
        categories = tuple(sorted(set(self._categories)))
        code = {name: index for index, name in enumerate(categories)}
        positions = Positions(
            start=start,
            prompt=np.arange(len(sizes), dtype=np.int32),
            prompt_ids=tuple(self._ids),
            category=np.array([code[name] for name in self._categories], np.int32),
            categories=categories,
            remaining=(np.repeat(sizes, sizes) - place + 1).astype(np.int32),
            context_tokens=(np.repeat(self._num_prompt, sizes) + place).astype(np.int32),
        )
        accepted = {name: np.concatenate(lists.accepted) for name, lists in self.lists.items()}
        return AcceptanceTable(
            positions, accepted, self.lists, self.num_without_rounds, self.num_cut_tokens
        )


def _entries(row: Row, drafter: str, spot: Spot) -> Longs:
    key = drafter if drafter == "acc" else f"acc_{drafter}"
    value = row.get(key)
    if value is None:
        found = f"keys {sorted(k for k in row if _DRAFTER.fullmatch(k))[:8]}"
        raise spot.refuse(f"key {key!r}", found, "name drafters that every line has (--drafter)")
    if isinstance(value, dict):
        if "acc_len" not in value:
            raise spot.refuse(f"'acc_len' in {key!r}", f"keys {sorted(value)[:8]}")
        key, value = f"{key}.acc_len", value["acc_len"]
    if not isinstance(value, list):
        raise spot.refuse(f"{key!r} as a list of accepted lengths", kind_of(value))
    return spot.counts(value, repr(key))
