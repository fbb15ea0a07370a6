"""What the verbs print and write when all goes well: quiet when piped, JSON for scripts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from specctl import console
from specctl.cli.verbs import verb
from specctl.collect.trace_writer import TraceWriter
from specctl.console import Answer, show_json
from specctl.errors import StoreError
from specctl.logs.trace_set import TraceSet
from specctl.stores.local import LocalStore
from tests.cli.command import passes, specctl, write_artifact
from tests.cli.conftest import SMALL

COUNTS = ("policy", "calls", "verified_tokens", "mean_acceptance_length", "artifact_digest")


def test_json_holds_any_text_and_obeys_none(capsys: pytest.CaptureFixture[str]) -> None:
    """What hides or turns text is escaped; letters of any script stay readable."""
    value = {"\u202ename": ["\u2028", "\x1b[2J", "\u200b", "\ud800", "\U000e0041", "λ 日本\n", 0.5]}
    show_json(value)
    printed = capsys.readouterr().out
    assert json.loads(printed) == value
    assert all(line.isprintable() for line in printed.split("\n"))
    assert "λ 日本" in printed


def test_progress_says_how_much_time_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five of ten prompts, ten seconds each by a clock of the test's own: fifty are left."""
    now = [0.0]
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the stream for a terminal
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    with console.progress("prompts", 10) as tick:
        for _ in range(5):
            now[0] += 10
            tick(1)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).split("prompts")[-1]
    assert re.search(r"5/10 +0:00:50 so far, 0:00:50 left", " ".join(last.split()))


@pytest.mark.parametrize(
    ("total", "done", "line"),
    [(10, 5, "prompts: 5 of 10, 0:"), (None, 5, "prompts: 5, 0:"), (None, 0, "prompts, 0:")],
)
def test_progress_off_a_terminal_is_a_line_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    total: int | None,
    done: int,
    line: str,
) -> None:
    """Also of work that counts nothing, such as loading; none before the first interval ends."""
    monkeypatch.setattr(console, "LINE_S", 0.01)
    said = ""
    with console.lines_of_progress("collect"), console.progress("prompts", total) as tick:
        tick(done)
        while f"collect, {line}" not in said:
            said += capsys.readouterr().err
    monkeypatch.setattr(console, "LINE_S", 3600.0)
    capsys.readouterr()
    with console.progress("prompts", total) as tick:
        tick(5)
    assert capsys.readouterr().err == ""


def test_every_verb_writes_such_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one whose work opens no bar."""
    verbs = typer.Typer()

    @verb(verbs, "slow")
    def slow_() -> Answer:
        """Wait for a line."""
        while not (said := capsys.readouterr().err):
            pass
        return Answer({}, [said])

    monkeypatch.setattr(console, "LINE_S", 0.01)
    verbs([], standalone_mode=False)
    assert capsys.readouterr().out.startswith("slow, 0:00:00 so far\n")


def in_a_shell(
    command: str, encoding: str = "utf-8", **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command with outputs that only a process of its own can have."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    line = re.sub("^specctl", f"{sys.executable} -m specctl", command)
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        encoding=encoding,
        timeout=120,
    )


def test_what_an_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    """A terminal of Latin letters must not end a command that is done."""
    options = {"HOME": str(tmp_path), "PYTHONIOENCODING": "latin-1"}
    for form in ("", "--json"):
        url = f"{tmp_path}/ö-λ-😀{form}"
        made = in_a_shell(f"specctl registry init --registry '{url}' {form}", "latin-1", **options)
        assert (made.returncode, made.stderr) == (0, "")
        assert json.loads(made.stdout)["url"] == url if form else r"ö-\u03bb-" in made.stdout


def test_an_output_that_is_full_is_refused_in_one_line(tmp_path: Path) -> None:
    full = in_a_shell("specctl registry trust list --json > /dev/full", HOME=str(tmp_path))
    assert full.returncode == 6
    assert full.stderr.count("\n") == 1
    assert full.stderr.startswith("error: standard output cannot be written: ")


def test_an_output_that_nobody_reads_is_no_error(tmp_path: Path) -> None:
    for ending in ("| true", ">&-"):
        gone = in_a_shell(f"specctl registry trust list {ending}", HOME=str(tmp_path))
        assert (gone.returncode, gone.stderr) == (0, ""), ending


def test_what_a_module_logs_is_a_warning_like_any_other() -> None:
    code = (
        "import logging; from specctl.console import prepare_output; prepare_output(); "
        "logging.getLogger('specctl.policy').warning('offline')"
    )
    ran = in_a_shell(f"{sys.executable} -c {shlex.quote(code)}")
    assert (ran.returncode, ran.stderr) == (0, "warning: offline\n")


def test_compare_prints_a_table_and_whether_texts_are_equal(prompts: Path, tmp_path: Path) -> None:
    hetero = write_artifact(tmp_path / "policy", "hetero")
    options = ("--compare", f"ar,chain,eagle2,{hetero}", "-o", tmp_path / "out", *SMALL)
    shown = passes("run", prompts, *options).out
    assert "All outputs equal plain decoding's, token for token." in shown
    assert "4 prompts, 8 new tokens, greedy" in " ".join(shown.split())  # long names of CPUs wrap
    assert "fixture" in shown, "a figure of the embedded pair must say so"
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    names = ["ar", "chain", "eagle2", str(hetero)]
    assert [row["policy"] for row in rows] == names
    assert all(
        row.keys() >= {*COUNTS, "tokens_per_s"} and row["equal_to_ar"] is True for row in rows
    )
    assert [row["artifact_digest"] is None for row in rows] == [True, True, True, False]
    for name in names:
        texts = read_texts(tmp_path / "out", re.sub(r"[^\w.=-]+", "_", name))
        assert [row["prompt_id"][:6] for row in texts] == ["line-1", "line-2", "line-3", "line-4"]


def read_texts(out: Path, policy: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{policy}.jsonl").read_text().splitlines()]


def test_the_text_of_every_prompt_is_printed(prompts: Path, tmp_path: Path) -> None:
    options = ("--limit", 2, "--policy", "chain", "-o", tmp_path, *SMALL)
    shown = passes("run", prompts, *options).out
    for line in read_texts(tmp_path, "chain"):
        assert shown.count(f"--- {line['prompt_id']}/0\n{line['texts'][0]}") == 1


def test_show_traces(traces: Path) -> None:
    shown, text = json.loads(passes("show", traces, "--json").out), passes("show", traces).out
    assert shown["summary"]["num_prompts"] == 4
    assert shown["digest"] in text
    [line] = [one for one in text.splitlines() if "emitted" in one]
    assert "the first of each request not counted" in line


FIT = ("--epochs", 1, "--min-steps", 1, "--hidden", 4, "--held-out", 0.4)


def test_a_fit_freezes_what_it_names(nodes: Path, tmp_path: Path) -> None:
    """The digest in the artifact opens the rows of the fit, after others were added too."""
    traces, out = tmp_path / "traces", tmp_path / "policy"
    shutil.copytree(nodes, traces, ignore=shutil.ignore_patterns("snapshots"))  # of other fits
    num_prompts = len(TraceSet.open(traces).prompt_ids)
    passes("fit", "c2t", traces, "-o", out, *FIT)
    named = json.loads((out / "config.json").read_text())["evidence"]["trace_digest"]
    [frozen] = json.loads(passes("traces", "snapshot", traces, "--list", "--json").out)
    assert frozen == named
    with TraceWriter.open(traces, TraceSet.open(traces).header, resume=True) as writer:
        writer.commit(["another"], {})
    shown = json.loads(passes("show", f"{traces}@{named}", "--json").out)
    assert (shown["digest"], shown["summary"]["num_prompts"]) == (named, num_prompts)


def test_a_fit_of_traces_that_it_cannot_write_says_so_and_goes_on(
    nodes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for another team's traces; a folder's own permissions do not stop root, who runs CI."""
    traces = tmp_path / "traces"
    shutil.copytree(nodes, traces, ignore=shutil.ignore_patterns("snapshots"))  # of other fits

    def refuse(store: LocalStore, key: str, data: bytes) -> None:
        raise StoreError(f"{key}: expected a right to write, found none", hint="ask for it")

    monkeypatch.setattr(LocalStore, "put_new", refuse)
    outcome = specctl("fit", "c2t", traces, "-o", tmp_path / "policy", *FIT)
    assert outcome.code == 0
    assert f"specctl traces snapshot {traces}" in outcome.err
    assert not (traces / "snapshots").exists()
