"""The API reference: what it refuses, and that it has the names that the pages use."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.reference import PAGE, ROOT, public_names, write_reference
from tests.pages import BLOCK

GOOD = '''
"""A shelf of `Box`es; see `Box.weight_kg` and `open_box()`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A box, of `config.json`.

    Attributes:
        weight_kg: without its lid.
    """

    weight_kg: float = 1.0

    @property
    def is_heavy(self) -> bool:
        """Whether two people are wanted, by `weight_kg`."""
        return self.weight_kg > 20


def open_box(box: Box) -> None:
    """Opens a box; `ValueError` and `other` are no names of ours, `_unseen` is private."""
'''
Write = Callable[[str], list[str]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the reference of a module with that text; its faults."""
    monkeypatch.syspath_prepend(tmp_path)

    def faults(text: str) -> list[str]:
        (tmp_path / "shelf.py").write_text(text, "utf-8")
        sys.modules.pop("shelf", None)
        return write_reference({"shelf": ["Box", "open_box"]}, tmp_path / "out")

    return faults


def test_reference_has_pages_with_links(write: Write, tmp_path: Path) -> None:
    assert write(GOOD) == []
    page = (tmp_path / "out" / "shelf.html").read_text("utf-8")
    for wanted in ('href="#Box.weight_kg"', 'href="#open_box"', "Whether two people are wanted"):
        assert wanted in page
    assert "shelf.html" in (tmp_path / "out" / "index.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("good", "bad", "fault"),
    [
        ('"""A shelf of', 'pass\n"""A shelf of', "shelf: no docstring"),
        ("weight_kg: without", "its mass: without", "shelf.Box.weight_kg: no docstring"),
        ("`Box.weight_kg`", "`Box.weight`", "shelf: `Box.weight` leads nowhere"),
        ("`other`", "[it](no.html)", "shelf.html: dead link no.html"),
        (") -> None", ") -> 'Crate'", "Crate failed: name 'Crate' is not defined"),
    ],
)
def test_fault_is_named(write: Write, good: str, bad: str, fault: str) -> None:
    text = GOOD.replace(good, bad)
    assert text != GOOD
    [found] = write(text)
    assert fault in found


def test_names_that_pages_import_are_public() -> None:
    public = public_names(PAGE.read_text("utf-8"))
    for page in (PAGE, ROOT / "README.md"):
        for block in BLOCK.finditer(page.read_text("utf-8")):
            if block["language"] == "python":
                for module, names in re.findall(
                    r"^from (specctl\S*) import (.+)$", block["code"], re.M
                ):
                    assert set(names.split(", ")) <= set(public[module]), f"{page.name}: {module}"


def test_names_that_the_page_quotes_are_public() -> None:
    text = PAGE.read_text("utf-8")
    public = public_names(text)
    names = tuple(f"{module}.{name}" for module in public for name in public[module])
    for quoted in re.findall(r"`(specctl\.[\w.]+)", text):
        assert quoted in public or f"{quoted}.".startswith(tuple(f"{one}." for one in names)), (
            quoted
        )


def test_table_with_an_unknown_name_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"specctl\.tree has no TokenTreee"):
        public_names("| `specctl.tree` | `TokenTreee` |")
