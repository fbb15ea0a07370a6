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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, create_model

from specctl.errors import InputError, UsageError, check_choice
from specctl.logs.import_lines import (
    Category,
    Counts,
    Name,
    OnBytes,
    OtherRecord,
    Row,
    Spot,
    json_objects,
)
from specctl.logs.positions import Ints, Longs
from specctl.logs.sources import Source

if TYPE_CHECKING:
    import polars as pl

PREDICTS = ("same", "next")
"""The generated token that entry i drafts first: token i, or token i + 1."""
LAST_ROUND = "last_round"
"""The kind that is no fault: of the last round, a list or its text may hold a part."""
KINDS = {
    "missing": "positions without an entry: the list is too short, by more than a round emits",
    LAST_ROUND: "entries that lack or are left over at the end, no more than a round accepts",
    "surplus": "entries past the last generated token: the list is too long, by more than that",
    "below_one": "entries below 1, although the bonus token counts",
    "behind_below_one": "entries after the first one below 1",
    "beyond_end": "entries that accept more tokens than the text has left",
    "first_not_one": "first entries other than 1, although prefill drafts nothing",
}
"""Kinds of misaligned entries, and what they are."""
PREFIX = "num_accepted_"
"""Of the column of each drafter."""
DRAFTER = re.compile(r"acc(?:_(?P<name>[A-Za-z0-9_]{1,64}))?")


@dataclass
class DrafterLists:
    """One drafter's lists on the positions of their texts.

    Attributes:
        accepted: by request, `[c]` int32, accepted draft tokens (bonus excluded) at positions
            1..c; c is num_generated - 1 where the list covers the text.
        num_entries: entries that the lists hold or should hold, whichever is more, summed.
        misaligned: entries by kind, see `KINDS`. first_line: 1-based line where each was met first.
        uneven: of lists too short or too long, the kind, how many entries and the line; `check`
            tells which of them are a last round's.
    """

    accepted: list[Ints] = field(default_factory=list)
    num_entries: int = 0
    misaligned: Counter[str] = field(default_factory=Counter)
    first_line: dict[str, int] = field(default_factory=dict)
    uneven: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def max_accepted(self) -> int:
        """Most draft tokens accepted at a position."""
        return max(int(values.max(initial=0)) for values in self.accepted)

    def add(self, entries: Longs, num_generated: int, predicts: str, line: int) -> None:
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
        counts = Counter(
            missing=max(needed - len(entries), 0),
            surplus=max(len(entries) - num_generated, 0),
            below_one=int(low.sum()),
            behind_below_one=int((~low[covered:]).sum()),
            beyond_end=int((accepted > remaining).sum()),
            first_not_one=int(first and len(entries) > 0 and entries[0] != 1),
        )
        self.accepted.append(np.minimum(accepted, remaining).astype(np.int32))
        self.num_entries += max(num_generated, len(entries))
        self.uneven += [(k, counts[k], line) for k in ("missing", "surplus") if counts[k]]
        self.misaligned += counts
        self.first_line = dict.fromkeys(+counts, line) | self.first_line

    def check(self, what: str, limit: float) -> None:
        """Refuses a file whose lists do not belong to its texts; all of them are added by then."""
        for kind, _, _ in self.uneven:
            self.first_line.pop(kind, None)
        for kind, size, line in self.uneven:
            told = LAST_ROUND if size <= self.max_accepted else kind
            self.misaligned.update({told: size})
            self.misaligned.subtract({kind: size})
            self.first_line.setdefault(told, line)
        self.misaligned = +self.misaligned
        share = misfit_share(self.misaligned, self.num_entries)
        if share <= limit:
            return
        kinds = (
            f"{count} {kind} (first in line {self.first_line[kind]})"
            for kind, count in self.misaligned.items()
        )
        worst = max(self.misaligned, key=lambda kind: (kind != LAST_ROUND) * self.misaligned[kind])
        raise InputError(
            what,
            expected=f"at most {limit:.2%} of the entries misaligned",
            found=f"{share:.2%} of {self.num_entries}: {', '.join(kinds)}",
            fix=f"{KINDS[worst]}; correct the file, leave the drafter out (--drafter), or raise "
            f"--max-misaligned",
        )


def misfit_share(misaligned: Mapping[str, int], num_entries: int) -> float:
    """The share of a drafter's entries that do not fit their texts; a last round cut short does."""
    misfits = sum(misaligned.values()) - misaligned.get(LAST_ROUND, 0)
    return misfits / max(num_entries, 1)


@dataclass(frozen=True)
class AcceptanceTable:
    """A file of per-position acceptance, aligned.

    Attributes:
        positions: a row a position, request after request: `request_id`, `category`, `position`
            (1, 2, ... in every request), `context_tokens`, `remaining` and for each drafter
            `num_accepted_<name>` (bonus excluded, never beyond the end of the text).
        lists: by drafter.
        num_without_rounds: requests whose usable text is shorter than two tokens: prefill gives
            the first, so no round is needed. They are left out.
        num_cut_tokens: generated tokens left out, because a list does not reach them.
    """

    positions: pl.DataFrame
    lists: dict[str, DrafterLists]
    num_without_rounds: int
    num_cut_tokens: int


class _Request(OtherRecord):
    """One request; `_request_kind` adds a field a drafter."""

    id: Name
    prompt_token_ids: Annotated[Counts, Field(min_length=1)]
    generated_token_ids: Counts
    category: Category = ""


_Lengths = Annotated[
    Counts,
    BeforeValidator(lambda value: value.get("acc_len") if isinstance(value, dict) else value),
]


_COLUMNS = ("request_id", "category", "num_prompt", "num_generated")


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
    check_choice("--entry-predicts", entry_predicts, PREDICTS)
    if not 0 <= max_misaligned <= 1:
        raise UsageError(
            "--max-misaligned",
            expected="a share in [0, 1]",
            found=str(max_misaligned),
            fix="0.01 allows one entry in a hundred",
        )
    import polars as pl

    requests: list[tuple[str, str, int, int]] = []
    lists: dict[str, DrafterLists] = {}
    first: dict[str, Spot] = {}
    kind = _Request
    for spot, row in json_objects(Source(str(path)), on_bytes):
        if not lists:
            lists = {name: DrafterLists() for name in drafters or _drafters(row, spot)}
            fields: Any = {_key(name): (_Lengths, ...) for name in lists}
            kind = create_model("Request", __base__=_Request, **fields)
        request = spot.record(kind, row)
        spot.check_new(request.id, first, "request")
        num_generated = len(request.generated_token_ids)
        for name, held in lists.items():
            entries = np.array(getattr(request, _key(name)), np.int64)
            held.add(entries, num_generated, entry_predicts, spot.number)
        num_prompt = len(request.prompt_token_ids)
        requests.append((request.id, request.category, num_prompt, num_generated))
    for name, held in lists.items():
        held.check(f"{path}, drafter {name}", max_misaligned)
    sizes = np.array([[len(one) for one in held.accepted] for held in lists.values()]).min(0)
    if not sizes.any():
        raise InputError(
            str(path),
            expected="a request with at least two generated tokens that its lists cover",
            found=f"{len(sizes)} without",
            fix="name a file with generated text",
        )
    rows = pl.DataFrame(requests, _COLUMNS, orient="row").with_columns(size=sizes)
    positions = rows.filter(pl.col("size") > 0).select(
        pl.col("request_id", "category").cast(pl.Categorical),
        position=pl.int_ranges(1, pl.col("size") + 1),
        context_tokens=pl.int_ranges(1, pl.col("size") + 1) + pl.col("num_prompt"),
        remaining=pl.int_ranges("size", 0, -1),
    )
    positions = positions.explode("position", "context_tokens", "remaining")
    for name, held in lists.items():
        accepted = [one[:size] for one, size in zip(held.accepted, sizes, strict=True)]
        kept = np.minimum(np.concatenate(accepted), positions["remaining"].to_numpy())
        positions = positions.with_columns(pl.Series(PREFIX + name, kept))
    num_rounds = rows["num_generated"].clip(1) - 1
    num_cut_tokens = int((num_rounds - rows["size"]).sum())
    return AcceptanceTable(positions, lists, int((sizes == 0).sum()), num_cut_tokens)


def _drafters(row: Row, spot: Spot) -> list[str]:
    found = [match for key in sorted(row) if (match := DRAFTER.fullmatch(key))]
    if not found:
        raise spot.refuse("a key such as 'acc_eagle' or 'acc_ngram'", f"keys {sorted(row)[:8]}")
    return [match["name"] or match[0] for match in found]


def _key(drafter: str) -> str:
    return drafter if drafter == "acc" else f"acc_{drafter}"
