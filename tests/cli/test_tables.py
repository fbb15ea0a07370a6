"""Every table at 80, 100 and 140 columns and in a pipe: no figure is cut, none is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group

from specctl import console
from specctl.artifacts.describe import Description
from specctl.cli import fitting, judging, showing
from specctl.cli import registry as registry_verbs
from specctl.formatting import NOTHING, Table
from tests.cli.command import NAME, publish
from tests.replay.logs import random_traces

LINEAR = "verify_fixed_us=1000,verify_token_us=10,draft_fixed_us=100,draft_token_us=1,step_us=50"
LINEAR += ",verify_cached_token_us=0"
POLICIES = ["ar", "chain:num_draft_tokens=3", "eagle2:depth=8:top_k=3:num_tokens=24"]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense traces of prompts enough for intervals and for tuning."""
    folder = tmp_path_factory.mktemp("many") / "traces"
    random_traces(folder, num_prompts=24, depth=4, top_k=3)
    return folder


def replayed(given: Any, **options: Any) -> Any:
    return judging.replay(traces=[str(given("many"))], policy=POLICIES, **options)


SHOWN: dict[str, Callable[[Any], Any]] = {
    "replay": replayed,
    "replay with times": lambda given: replayed(given, cost_model=given("cost"), by_category=True),
    "replay in order": lambda given: replayed(
        given, cost_model=given("cost"), in_order=True, batch_size=4
    ),
    "replay at a load": lambda given: replayed(
        given, cost_model=given("cost"), batch_size=4, tpot_limit_ms=5.0
    ),
    "ladder": lambda given: judging.ladder(
        traces=[str(given("many"))], out=given("tmp_path") / "ladder", linear=LINEAR,
        policy=["eagle2:depth=4:top_k=3:num_tokens=24"],
    ),
    "tune": lambda given: judging.tune(
        traces=[str(given("many"))], cost_model=given("cost"), family=["svip"], held_out=0.5
    ),
    "grids": lambda given: judging.tune(show_grid=True),
    "fit c2t": lambda given: fitting.fit_c2t(
        traces=[str(given("nodes"))], out=given("tmp_path") / "c2t", hidden=4, epochs=1, min_steps=1
    ),
    "fit adasd": lambda given: fitting.fit_adasd(
        prompts=[str(given("sums"))], out=given("tmp_path") / "adasd", clips="0.2", max_loss=0.6,
        confidence=0.5, max_new_tokens=8, device="cpu",
    ),
    "fit cart": lambda given: fitting.fit_cart(
        traces=[str(given("many"))], out=given("tmp_path") / "hetero", filter="all",
        max_leaf_depth=2,
    ),
    "show traces": lambda given: showing.show(what=str(given("traces"))),
    "show an artifact": lambda given: showing.show(what=str(given("artifacts")["eagle2"])),
    "registry list": lambda given: registry_verbs.list_(registry=str(given("registry"))),
    "registry search": lambda given: registry_verbs.list_(
        registry=str(given("registry")), words=["embedded"]
    ),
    "registry show": lambda given: registry_verbs.show(name=NAME, registry=str(given("registry"))),
    "registry log": lambda given: registry_verbs.log(name=NAME, registry=str(given("registry"))),
}  # fmt: skip
"""What each verb shows, from fixtures by name."""


def tables(part: Any) -> Iterator[Table]:
    if isinstance(part, Group):
        for one in part.renderables:
            yield from tables(one)
    elif isinstance(part, Description):
        yield Table("", part.columns, part.rows, left=len(part.columns))
    elif isinstance(part, Table):
        yield part


@pytest.mark.parametrize("name", SHOWN)
def test_no_figure_is_cut_or_broken(
    name: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name.startswith("registry"):
        request.getfixturevalue("registry")
        publish(request.getfixturevalue("artifacts"), "chain", "--reason", "a reason " * 20)
    answer = SHOWN[name](request.getfixturevalue)
    found = [table for part in answer.parts for table in tables(part) if table.rows]
    assert found
    for table in found:
        for is_terminal in (True, False):
            monkeypatch.setattr(console, "is_terminal", lambda told=is_terminal: told)
            for width in (80, 100, 140):
                monkeypatch.setenv("COLUMNS", str(width))
                for wide in (False, True):
                    check(table, width, capsys, wide=wide, is_pipe=not is_terminal)


def check(
    table: Table, width: int, capsys: pytest.CaptureFixture[str], *, wide: bool, is_pipe: bool
) -> None:
    console.show(replace(table, title="", legend=""), wide=wide)
    printed = capsys.readouterr().out
    assert "…" not in printed
    lines = [line.rstrip() for line in printed.splitlines()]
    shown = table if wide else table.narrow()
    for row in shown.rows:
        for cell in row[shown.left :]:
            assert cell == NOTHING or any(cell in line for line in lines), (cell, printed)
    if not (wide and is_pipe) and shown.left == 1:
        assert max(map(len, lines)) <= width, printed
    if wide and is_pipe:
        assert len(lines) == len(table.rows) + 2, "a row is a line, for grep and awk"


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
