"""The page: sections of plain values, rendered as HTML and as JSON."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from pydantic_core import to_jsonable_python

from specctl.engines.engine import EngineSettings
from specctl.formatting import Table
from specctl.records import finite
from specctl.report.charts import Chart

TITLES = {
    "recommendation": "The best setting",
    "drift": "Whether the deployed policy still fits its traffic",
    "policies": "Replayed policies",
    "runs": "Measured runs",
    "ladder": "The ladder: distance to what is possible",
    "depth": "Acceptance by depth",
    "category": "Acceptance by category",
    "traces": "Acceptance by depth and category",
    "caveats": "Before these figures travel",
}
"""Titles of sections by key, without terms that need an explanation."""
TERMS = {
    "τ": "mean acceptance length: tokens that one call of the target emits, 1 + accepted ones",
    "TPOT": "time per output token",
    "R_feat": "rate of the best trees that the drafter's own features could choose, estimated",
    "R_prob": "rate of the best trees by the target's uncertainty: an estimate of the best that "
    "any policy can do with this drafter",
    "R_clair": "rate of trees chosen with the accepted path known: an upper bound",
    "R_ceil": "rate if every draft token were accepted",
    "λ*": "price of time at which a node is still worth verifying",
}
"""Terms that a page explains at their first use."""
WHOLE = re.compile(r"(\[-?\d[^\[\]]*\]|--[a-z-]+)")
"""Text kept on one line: an interval, or an option of the command line."""
SETTING = re.compile(r"(?<=:)(?=[a-z_]+=)")
"""Possible line breaks in a policy's words."""
CODE = re.compile(r"(?<=[,/:])(?=\S)")
"""Possible line breaks in a command."""

PLACE = re.compile(
    r"(?<![\w:./~-])(?:(?:~|\.{1,2})?(?:/[^\s:;,\"'()\[\]<>+/]+){2,}|\.{1,2}/[^\s:;,\"'()\[\]<>+/]+)"
)
"""A path in a text, which is not that of an address."""


@dataclass(frozen=True)
class Figure:
    """A chart and its caption."""

    caption: str
    chart: Chart


@dataclass(frozen=True)
class Section:
    """One question and its answer."""

    key: str  # anchor on the page and key in the JSON
    reading: str = ""  # the answer in words
    basis: str = ""  # prompts, rounds and source behind it
    missing: str = ""  # in place of an answer: the missing data, and the option that supplies it
    setting: str = ""  # the recommended policy, in words
    marks: Sequence[tuple[str, str]] = ()  # highlighted figures with their meanings
    engines: Sequence[EngineSettings] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()  # caveats of these figures
    data: Any = None  # result records of the section, for JSON

    @property
    def title(self) -> str:
        return TITLES[self.key]

    def to_json(self) -> dict[str, Any]:
        """Words and figures, without the drawings."""
        names = ("title", "setting", "reading", "marks", "engines", "basis", "missing", "notes")
        found = {name: getattr(self, name) for name in (*names, "data")}
        return dict(to_jsonable_python(found))

    @property
    def words(self) -> str:
        """All text of the section, to find terms in."""
        texts = (self.reading, self.basis, self.missing, self.marks, self.notes, self.engines)
        return repr((texts, self.figures, self.tables))


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    byline: str  # the most important facts
    facts: Sequence[tuple[str, str]]  # names and values of its sources
    warnings: Sequence[str]  # shown before anything else
    sections: Sequence[Section]

    def to_json(self) -> dict[str, Any]:
        """The page as JSON; NaN becomes null."""
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
        """One self-contained file: no script, styles and figures inline.

        The content security policy allows only the style sheet with this digest.
        """
        import jinja2

        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters |= {"folding": folding, "code": partial(folding, places=CODE)}
        template, style = environment.from_string(_resource("page.html")), _resource("page.css")
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        terms = dict(self.first_uses())
        return template.render(page=self, terms=terms, style=style, style_digest=digest)

    def first_uses(self) -> Iterator[tuple[str, dict[str, str]]]:
        """By section, the terms that it uses first, with their meanings."""
        left = dict(TERMS)
        for section in self.sections:
            found = {
                term: left.pop(term) for term in TERMS if term in left and term in section.words
            }
            yield section.key, found


def portable(value: Any, models: Iterable[str]) -> Any:
    """A part of a page with the last name of each path for the path: a page is made to travel.

    Args:
        models: names of the pair; a folder's name may have spaces.
    """
    if isinstance(value, str):
        for place in sorted(models, key=len, reverse=True):
            if "/" in place and (os.path.isabs(place) or os.path.exists(place)):
                value = value.replace(place, Path(place).name)
        return PLACE.sub(_last_name, value)
    if isinstance(value, list | tuple):
        return [portable(one, models) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        names = {one.name for one in fields(value)} - {"data"}  # of the records, as they were read
        return replace(value, **{name: portable(getattr(value, name), models) for name in names})
    return value


def _last_name(path: re.Match[str]) -> str:
    """A path's last name; the folder above for what `tune` names itself."""
    *_, above, last = ("", *path[0].split("/"))
    return above if last == "policy" and above else last


def folding(text: str, places: re.Pattern[str] = SETTING) -> Markup:
    """Escapes text and marks its possible line breaks."""
    wrap = Markup('<span class="whole">{}</span>').format
    parts = (
        wrap(part) if number % 2 else Markup("<wbr>").join(map(escape, places.split(part)))
        for number, part in enumerate(WHOLE.split(text))
    )
    return Markup("").join(parts)


def _resource(name: str) -> str:
    return (files("specctl.report") / "templates" / name).read_text("utf-8")
