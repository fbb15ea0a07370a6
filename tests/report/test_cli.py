"""`specctl report` end to end: a page, its twin, quiet where piped, one line where it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import passes, refuses
from tests.replay.logs import random_traces
from tests.replay.reports import write_log


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "traces"
    random_traces(folder, num_prompts=6, depth=3)
    return folder


def test_report_writes_a_page_from_traces_and_results(log: Path, tmp_path: Path) -> None:
    passes("replay", log, "-p", "chain", "-p", "eagle2:depth=3:top_k=4", "-o", tmp_path, "--json")
    out = tmp_path / "report.html"
    shown = passes("report", log, "--results", tmp_path / "replay.json", "-o", out).out
    assert shown.split() == ["wrote", str(out)]
    text = out.read_text("utf-8")
    assert "eagle2:<wbr>depth=3:<wbr>top_k=4" in text
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_without_a_page_the_words_are_printed(log: Path) -> None:
    twin = json.loads(passes("report", log, "--json").out)
    assert twin["sections"]["depth"]["reading"] in passes("report", log).out


def test_report_shows_what_ran(tmp_path: Path) -> None:
    """With its run.json beside it; without, or for another file, it is said what is missing."""
    words = ("--compare", "ar,chain", "--limit", 2, "--max-new-tokens", 4, "--threads", 1)
    passes("run", "embedded", *words, "-o", tmp_path)
    out, results = tmp_path / "report.html", tmp_path / "results.json"
    twin = json.loads(passes("report", "--run", results, "-o", out, "--json").out)
    measured = json.loads(results.read_text())
    shown = twin["sections"]["runs"]["data"]["policies"]
    assert [one["tokens_per_s"] for one in shown] == [one["tokens_per_s"] for one in measured]
    assert twin["sections"]["runs"]["reading"].endswith("token for token.")
    (tmp_path / "run.json").unlink()
    assert "run.json cannot be read" in refuses(4, "report", "--run", results, "-o", out)
    (tmp_path / "run.json").write_text("{}")
    assert "`specctl run` writes: facts" in refuses(4, "report", "--run", results, "-o", out)


@pytest.mark.usefixtures("two_prompts_are_enough")
def test_equal_seeds_give_equal_pages(log: Path, tmp_path: Path) -> None:
    pages = [tmp_path / "one.html", tmp_path / "two.html", tmp_path / "three.html"]
    for page, seed in zip(pages, (7, 7, 8), strict=True):
        passes("report", log, "-o", page, "--seed", seed)
    one, two, three = (page.read_bytes() for page in pages)
    assert one == two
    assert one != three


def test_refusals(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    assert "needs traces" in refuses(2, "report", "-o", out)
    assert "no-such" in refuses(6, "report", log, "-o", tmp_path / "no-such" / "r.html")
    assert "a folder" in refuses(6, "report", log, "-o", tmp_path)
    assert "no such file" in refuses(4, "report", log, "--ladder", tmp_path / "l.json", "-o", out)
    other = tmp_path / "other"
    write_log(other, drafter_digest="sha256:" + 64 * "2")
    assert "drafter_digest" in refuses(4, "report", log, other, "-o", out)
    assert not out.exists()
