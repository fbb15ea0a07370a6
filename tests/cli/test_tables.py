"""Tables at 80, 100 and 140 columns and in a pipe: no figure is cut, none is broken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specctl import console
from specctl.formatting import NOTHING, Table

NAMES = st.from_regex(r"[a-z]{1,9}(:[a-z_]{1,9}=[a-z0-9./]{1,9}){0,3}", fullmatch=True)
FIGURES = st.from_regex(r"-|[0-9]{1,7}\.5( \[[0-9]{1,5}\.5, [0-9]{1,5}\.7\])?", fullmatch=True)
PROSE = st.lists(st.text("aeno", min_size=1, max_size=9), max_size=30).map(" ".join)


@st.composite
def tables(draw: Any) -> Table:
    """Names or prose, then figures, some of them for `--wide` alone."""
    left, num_figures = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    row = st.tuples(*[NAMES, PROSE][:left], *[FIGURES] * num_figures)
    rows = draw(st.lists(row, min_size=1, max_size=5))
    heads = [f"figure {place}" for place in range(num_figures)]
    wide = draw(st.sets(st.sampled_from(heads), max_size=num_figures - 1))
    return Table("", (*("policy", "note")[:left], *heads), rows, left=left, wide=wide)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=tables(), width=st.sampled_from((80, 100, 140)), wide=st.booleans())
@pytest.mark.parametrize("is_pipe", [False, True])
def test_no_figure_is_cut_or_broken(
    table: Table,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    wide: bool,
    is_pipe: bool,
) -> None:
    monkeypatch.setattr(console, "is_terminal", lambda: not is_pipe)
    monkeypatch.setenv("COLUMNS", str(width))
    console.show(table, wide=wide)
    printed = capsys.readouterr().out
    assert "…" not in printed
    lines = [line.rstrip() for line in printed.splitlines()]
    shown = table if wide else table.narrow()
    for row in shown.rows:
        for cell in row[shown.left :]:
            assert cell == NOTHING or any(cell in line for line in lines), (cell, printed)
    if wide and is_pipe:
        assert len(lines) == len(table.rows) + 2, "a row is a line, for grep and awk"
    elif shown.left == 1:
        assert max(map(len, lines)) <= width, printed


def test_what_does_not_fit_is_a_block_of_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    heads = ("policy", *(f"figure {place}" for place in range(8)))
    table = Table("", heads, [("a" * 30, *["12345.67 [12345.67, 12345.67]"] * 8)])
    console.show(table)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"policy: {'a' * 30}"
    assert lines[8] == "figure 7: 12345.67 [12345.67, 12345.67]"


def test_names_fold_between_their_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name, figure = "eagle2:depth=6:top_k=8:num_tokens=48", "1" * 20
    console.show(Table("", ("policy", "calls"), [(name, figure)]))
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["eagle2:depth=6:", figure],
        ["top_k=8:"],
        ["num_tokens=48"],
    ]
