"""Lists of accepted lengths to output positions. What does not fit is counted by kind.

The published files of SpecDecode-Bench (github.com/SpecDecode-Bench/simulator, `data/`; paper
2601.11580) hold one entry a generated token, and entry i drafts token i: entry 0 is the prefill's
own step, 1 in every list, and entry p the round that starts once p tokens are out. Their
simulator reads entry p - 1 there. Both readings exist here; `same` is what the numbers show
(docs/import.md has the check).

A list of another length than the text comes from another run of the model, so at most the prefix
that both cover can be used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from specctl.logs.positions import Ints, Longs

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


@dataclass(frozen=True)
class Aligned:
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


def align(entries: Longs, num_generated: int, predicts: str) -> Aligned:
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
    return Aligned(
        np.minimum(accepted, remaining).astype(np.int32),
        max(num_generated, len(entries)),
        Counter({kind: count for kind, count in counts.items() if count}),
    )
