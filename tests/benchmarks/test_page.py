"""docs/systems.md: its figures stand in the results that were measured, or are generated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.systems import page as systems
from scripts.pages import with_part

ROOT = Path(__file__).parents[2]
CHANGE = re.compile(r"[+-]\d+\.\d % \[[^\]]+\]")
RATIO = re.compile(r"× (\d\.\d+ \[[^\]]+\])")


def intervals(value: Any) -> Iterator[dict[str, float]]:
    """Every interval of a document."""
    if isinstance(value, dict):
        if {"value", "low", "high"} <= value.keys() and value["value"] is not None:
            yield value
        for inner in value.values():
            yield from intervals(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from intervals(inner)


def test_every_figure_of_the_page_was_measured() -> None:
    result = json.loads((ROOT / "docs" / "systems.json").read_text("utf-8"))
    written = with_part(systems.PAGE.read_text("utf-8"), *systems.PART, "")
    page = " ".join(written.split())
    known = {
        f"{100 * one['value']:+.1f} % [{100 * one['low']:+.1f}, {100 * one['high']:+.1f}]"
        for one in intervals(result)
    }
    shown = CHANGE.findall(page)
    assert len(shown) > 50
    assert set(shown) <= known
    sampled = ROOT / "benchmarks" / "results" / "sampled-cpu.json"
    rows = json.loads(sampled.read_text("utf-8"))["rows"]
    ratios = RATIO.findall(page)
    assert len(ratios) == 4
    assert set(ratios) <= {row.get("ratio") for row in rows}


def test_the_generated_part_is_the_scripts() -> None:
    path = systems.RESULTS / systems.NAME
    if not path.exists():
        pytest.skip("not measured yet: the head is still being trained")
    text = systems.PAGE.read_text("utf-8")
    assert systems.written(text, json.loads(path.read_text("utf-8"))) == text
