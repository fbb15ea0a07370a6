"""`specctl import` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specctl.cli import importing
from specctl.logs.imported_log import ImportedLog
from tests.cli.command import passes, refuses
from tests.logs.import_cases import COUNTERS, answer, choice, metrics, request, scrape, write_rows

ROW = request("a", 5, eagle=[1, 3, 2, 1, 2], ngram=[1, 1, 1, 1, 1])


def test_the_verb_is_there() -> None:
    assert importing.app is not None


def test_traces_for_a_person_and_for_a_script(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "s.jsonl", ROW)
    shown = passes("import", source, "-o", tmp_path / "one", "--offered-depth", "eagle=4").out
    for named in ("eagle", "inferred", "4 (0 tokens cut off)", "token i"):
        assert named in shown
    told = json.loads(passes("import", source, "-o", tmp_path / "two", "--json").out)
    assert told["format"] == "specdecode-bench"
    assert told["digest"] == ImportedLog.open(tmp_path / "two").digest
    assert told["header"]["num_positions"] == 4


def test_one_drafter(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "s.jsonl", ROW)
    passes("import", source, "-o", tmp_path / "one", "--drafter", "ngram")
    assert ImportedLog.open(tmp_path / "one").drafters == ("ngram",)


@pytest.mark.parametrize("kind", ["answers", "requests", "counters"])
def test_summaries(tmp_path: Path, kind: str) -> None:
    source = {
        "answers": lambda path: write_rows(path, answer(1, choice(), category="qa")),
        "requests": lambda path: write_rows(path, metrics(2, 1, 1)),
        "counters": lambda path: scrape(path, *COUNTERS),
    }[kind](tmp_path / "source")
    assert "not replayed" in passes("import", source).out
    told = json.loads(passes("import", source, "--json", "-o", tmp_path / "out").out)
    assert told == json.loads((tmp_path / "out" / "summary.json").read_text())


def test_refusals(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "s.jsonl", ROW)
    assert "--out" in refuses(2, "import", source)
    assert "--format" in refuses(2, "import", source, "--format", "csv")
    assert "--offered-depth" in refuses(2, "import", source, "--offered-depth", "five")
    assert "absent" in refuses(4, "import", tmp_path / "absent")
    assert "line 1" in refuses(4, "import", write_rows(tmp_path / "b", "{"), "-o", tmp_path / "o")
    assert "something else" in refuses(6, "import", source, "-o", tmp_path)
