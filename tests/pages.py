"""The pages of the project, and the blocks of code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->\n\Z")
BLOCK = re.compile(r"^```(?P<language>[a-z]+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `reason` why it is not run, or None."""

    page: Path
    language: str
    code: str
    reason: str | None


def blocks(language: str) -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text("utf-8")
        for found in BLOCK.finditer(text):
            if found["language"] == language:
                exempt = NOT_RUN.search(text[: found.start()])
                yield Block(page, language, found["code"], exempt and exempt["reason"])


def pages_with(language: str) -> list[Path]:
    return sorted({block.page for block in blocks(language)})


def lines_to_run(page: Path) -> Iterator[str]:
    for block in blocks("bash"):
        if block.page == page and block.reason is None:
            yield from block.code.replace("\\\n", " ").splitlines()
