"""The page of the papers' settings: every departure has a reason, every word is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specctl.runtime.policy_spec import resolve_policy

PAGE = (Path(__file__).parents[1] / "docs" / "papers.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith("|---")
]
WORDS = [
    word
    for row in ROWS
    for word in re.findall(r"`([^`]+)`", row[1])
    if len(row) == 2 and not word.startswith("specctl")
]


def test_every_departure_has_a_reason() -> None:
    departures = [row for row in ROWS if len(row) > 2]
    assert len(departures) > 25
    assert all(len(row) == 3 and all(row) for row in departures)
    assert {len(row) for row in ROWS} == {2, 3}


@pytest.mark.parametrize("word", WORDS)
def test_every_word_is_a_policy(word: str) -> None:
    policy = resolve_policy(word, allow_lossy=True).policy
    assert policy.lossless == ("mars" not in word and "accept" not in word)
