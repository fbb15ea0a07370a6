"""The column tables of docs/trace-format.md are those of specctl/trace.py.

`python -m tests.test_docs_trace_format` writes them anew after a column changed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specctl.logs.trace_files import NodesFile, SegmentRecord, TraceHeader
from specctl.trace import TABLES, TRACE_VERSION
from tests.collect.sets import collect

PAGE = Path(__file__).parents[1] / "docs" / "trace-format.md"
BEGIN = "<!-- begin columns: python -m tests.test_docs_trace_format -->\n"
END = "<!-- end columns -->"


def column_tables() -> str:
    lines = []
    for table, columns in TABLES.items():
        lines += [f"### `{table}`", "", "| column | type | unit | meaning |", "|---|---|---|---|"]
        for column in columns:
            kind = column.dtype + ("?" if column.nullable else "")
            lines.append(f"| `{column.name}` | {kind} | {column.unit} | {column.meaning} |")
        lines.append("")
    return "\n".join(lines)


def rewrite(page: str) -> str:
    """The page with its column tables replaced."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + column_tables() + END + rest.split(END)[1]


def test_columns_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert page == rewrite(page), "run `python -m tests.test_docs_trace_format`"


def test_lines_for_other_tools_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect(tmp_path / "traces", "ab", "c")
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})


def test_version_and_fields_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert f"version {TRACE_VERSION}\n" in page
    for record in (TraceHeader, SegmentRecord, NodesFile):
        for field in record.model_fields:
            assert f"`{field}`" in page, f"{record.__name__}.{field} is not on the page"


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text()))
