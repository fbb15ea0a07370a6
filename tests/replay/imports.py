"""Texts with per-position acceptance, as imports of chains hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st

from specctl.logs.imported_log import AcceptedLengths
from tests.logs.import_cases import import_rows, request


@dataclass(frozen=True)
class Text:
    """A request as a naive reader sees it: tokens, and accepted draft tokens at 1, 2, ..."""

    num_tokens: int
    accepted: list[int]


@st.composite
def texts(draw: Any) -> list[Text]:
    found = []
    for size in draw(st.lists(st.integers(2, 12), min_size=1, max_size=6)):
        wanted = draw(st.lists(st.integers(0, 6), min_size=size - 1, max_size=size - 1))
        found.append(Text(size, [min(a, size - p) for p, a in enumerate(wanted, start=1)]))
    return found


def as_log(found: list[Text], depth: int = 6) -> AcceptedLengths:
    rows = [
        request(str(i), t.num_tokens, prompt=i + 1, eagle=[1] + [a + 1 for a in t.accepted])
        for i, t in enumerate(found)
    ]
    with TemporaryDirectory() as folder:
        return import_rows(Path(folder), *rows, offered_depths={"eagle": depth}).lengths("eagle")


@cache
def by_hand() -> AcceptedLengths:
    """Two texts. `a`, six tokens: positions 1..5 accept 3, 0, 2, 0, 1. `b`, three: 0, 1."""
    return as_log([Text(6, [3, 0, 2, 0, 1]), Text(3, [0, 1])], depth=3)
