"""The default output of every verb on the embedded pair: the verdict first, all on one screen."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from specctl import console
from tests.cli.command import NAME, Outcome, specctl, write_lines
from tests.cli.conftest import SMALL

WIDTH, HEIGHT = 80, 24
"""Columns and lines of a terminal."""
TEXTS = " ".join(map(str, SMALL))
COMMANDS = {
    f"collect p.txt -o dense --dense --depth 4 --children 3 {TEXTS}": "dense: 16 prompts",
    f"collect p.txt -o live --policy eagle2:4x3/8 {TEXTS}": "live: 16 prompts",
    "show dense": "16 prompts, ",
    "show live": "16 prompts, ",
    "traces verify dense": "dense: ",
    "show cost": "made up|",
    "replay dense -p ar,chain,eagle2:4x3/9,threshold -o replayed": "Fewest calls: ",
    "replay dense -p ar,chain,eagle2:4x3/9 --cost-model cost": "(Fastest: |No policy is faster)",
    "replay dense -p ar,chain:2 --cost-model cost --batch-size 4": "Fastest: chain:2, × ",
    "replay dense -p chain:2": "chain:2: ",
    "show replayed": "Fewest calls: ",
    "ladder dense -o rungs --cost-model cost -p eagle2:2x3/5": "Best: ",
    "show rungs": "Best: ",
    "fit hetero dense -o hetero --min-rows 1 --held-out 0.5": r"(\d bins|These bins) ",
    "fit c2t nodes -o c2t --epochs 2 --min-steps 1 --hidden 4 --held-out 0.4": "(Keeps|These sc)",
    "fit survival nodes -o survival --held-out 0.4": "(Keeps|These scores) ",
    "tune dense -o tuned --cost-model cost --held-out 0.5 --family svip": "Best: ",
    "tune dense -o plain --cost-model cost --held-out 0.5 --for vllm": "Best: ",
    "show tuned": "Best: ",
    "show tuned/policy": r"\w+, lossless$",
    "export chain:3 --to sglang --drafter me/head --method eagle3": "SGLang runs chain:3:$",
    "show hetero": "hetero, lossless$",
    f"run p.txt --limit 2 --compare ar,chain -o ran {TEXTS}": "No verdict on speed: ",
    "show ran": "ran/results.json",
    "drift live --policy eagle2:4x3/8 --reference dense -o watched": "(No alarm|ALARM)",
    "show watched": "(No alarm|ALARM)",
    "report dense -o page.html --tune tuned/tune.json": "wrote page.html",
    f"registry push tuned/policy {NAME} --alias prod": "publish ",
    "registry list": "",
    "registry list embedded": "",
    f"registry log {NAME}": re.escape(NAME),
    f"registry show {NAME}": re.escape(NAME),
    "registry verify": "no damage",
    "doctor": "(Nothing is wrong here|Wrong: )",
}
"""Commands in the order in which a user gives them, and how the first line begins."""


@pytest.fixture(scope="module")
def screens(
    tmp_path_factory: pytest.TempPathFactory, nodes: Path, cost: Path
) -> Iterator[dict[str, Outcome]]:
    """What each command prints on a terminal of 80 columns."""
    folder, before = tmp_path_factory.mktemp("screens"), Path.cwd()
    (folder / "nodes").symlink_to(nodes)
    (folder / "cost").symlink_to(cost)
    write_lines(folder / "p.txt", *(f"How much is {n} + {n}?" for n in range(16)))
    homes = {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("CACHE", "STATE", "CONFIG")}
    places = {**homes, "SPECCTL_REGISTRY": "shelf", "COLUMNS": str(WIDTH)}
    terminal = patch.object(console, "is_terminal", lambda: True)
    os.chdir(folder)
    with patch.dict(os.environ, places), terminal:
        specctl("registry", "init")
        yield {command: specctl(*command.split()) for command in COMMANDS}
    os.chdir(before)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_verdict_is_the_first_line_and_all_fits_one_screen(
    command: str, screens: dict[str, Outcome]
) -> None:
    found = screens[command]
    lines = found.out.splitlines()
    assert lines, found.err
    assert re.match(COMMANDS[command], lines[0]), found.out
    assert max(map(len, map(str.rstrip, lines))) <= WIDTH, found.out
    assert len(lines) <= HEIGHT, found.out


@pytest.mark.parametrize("command", COMMANDS)
def test_no_table_breaks_into_blocks_and_no_figure_has_16_digits(
    command: str, screens: dict[str, Outcome]
) -> None:
    out = screens[command].out
    assert not re.search(r"^(policy|rung|bin|level|batch|entry|reference): ", out, re.MULTILINE)
    assert not re.search(r"\d\.\d{7}", out), out
