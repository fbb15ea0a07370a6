"""Settings of the papers on the pages: every word is a policy, every departure has a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specctl.runtime.words import resolve_policy
from specctl.train.presets import PRESETS

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "papers.md").read_text("utf-8")
CODE = [word for line in PAGE.splitlines() if line[0:1] == "|" for word in line.split("`")[1::2]]
WORDS = [word for word in CODE if not word.startswith("specctl")]
HEADER = "| paper | here | reason |\n"


@pytest.mark.parametrize("word", WORDS)
def test_every_word_is_a_policy(word: str) -> None:
    policy = resolve_policy(word, allow_lossy=True).policy
    assert policy.lossless == ("mars" not in word and "accept" not in word)


def test_mars_is_named_in_its_papers_size() -> None:
    """The tree of the preset, with and without the rule, and a lossless chain as long."""
    tree = PRESETS["mars-paper"].options["shape"]
    assert {tree, f"{tree}+mars-paper", "chain:7+ratio"} <= set(WORDS)


def test_every_preset_is_there_with_its_verb() -> None:
    named = dict(re.findall(r"specctl fit (?:\w+) [^`\n]*--preset ([\w-]+)()", PAGE)).keys()
    verbs = {name: verb for verb, name in re.findall(r"fit (\w+) [^`\n]*--preset ([\w-]+)", PAGE)}
    wanted = {name: preset.verb for name, preset in PRESETS.items() if name in named}
    assert verbs == wanted
    assert set(PRESETS) - set(named) <= {"echo-dense", "mars-paper"}  # words too


@pytest.mark.parametrize("page", ["concepts", "c2t", "echo", "mars", "adasd"])
def test_every_departure_has_a_reason(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text("utf-8")
    rows = text.partition(HEADER)[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert len(cells) >= 3
    assert all(len(row) == 3 and all(row) for row in cells), cells
