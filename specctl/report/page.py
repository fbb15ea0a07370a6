"""The page: sections of plain values, rendered once, alike for people and for scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from specctl.formatting import Table
from specctl.report.charts import Chart
from specctl.runtime.output import finite, write_whole

TITLES = {
    "recommendation": "Recommended setting",
    "policies": "Replayed policies",
    "ladder": "The ladder: distance to what is possible",
    "pareto": "Static settings: verified tokens against τ",
    "depth": "Acceptance by depth",
    "category": "Acceptance by category",
    "tcr": "Terminal confidence rank",
    "phi": "Φ against acceptance",
    "confidence": "Confidence of accepted and rejected nodes",
    "caveats": "Support and caveats",
}
"""Sections by key, in the order of the page."""


@dataclass(frozen=True)
class Figure:
    """Charts side by side under one caption."""

    caption: str
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Section:
    """One question and its answer.

    Attributes:
        key: anchor on the page and key in the JSON.
        reading: the answer in words.
        basis: prompts, rounds and source behind it.
        missing: in place of an answer: what the data lack, and the command that brings it.
        notes: caveats of these figures.
        data: result records of the section, for scripts.
    """

    key: str
    reading: str = ""
    basis: str = ""
    missing: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    data: Any = None

    @property
    def title(self) -> str:
        return TITLES[self.key]

    def to_json(self) -> dict[str, Any]:
        """Words and figures, without the drawings."""
        names = ("title", "reading", "basis", "missing", "notes")
        words = {name: getattr(self, name) for name in names}
        return words | {"data": to_jsonable_python(self.data)}


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        facts: names and values of its sources.
        warnings: shown before anything else.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    warnings: Sequence[str]
    sections: Sequence[Section]

    def to_json(self) -> dict[str, Any]:
        """The twin of the page, for scripts; NaN becomes null."""
        value = {
            "kind": "report",
            "title": self.title,
            "facts": dict(self.facts),
            "warnings": list(self.warnings),
            "sections": {section.key: section.to_json() for section in self.sections},
        }
        found: dict[str, Any] = finite(value)
        return found

    def html(self) -> str:
        """One file that loads nothing: no script, styles and figures inline.

        The content security policy forbids every source but the one style sheet, by its digest.
        """
        import jinja2

        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        template, style = environment.from_string(_resource("page.html")), _resource("page.css")
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        return template.render(page=self, style=style, style_digest=digest)


def _resource(name: str) -> str:
    return (files("specctl.report") / "templates" / name).read_text("utf-8")


def write_page(page: Page, path: Path) -> None:
    """Writes the page, whole or not at all; an older file is replaced.

    Raises:
        OutputError: a place that cannot be written.
    """
    write_whole(path, page.html().encode(), "report")
