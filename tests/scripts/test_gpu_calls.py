"""The two GPU calls: what is known when the time is up, when a process dies, and on a CPU."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.gpu import cuda_tests, kernel_archive, publish, smoke
from scripts.gpu.cuda_tests import Job, Report

ROOT = Path(__file__).parents[2]
STEPS = {
    "call1": ("smoke", "headline, first rows", "CUDA tests"),
    "call2": (
        "tests again", "headline", "kernels beside torch", "cost table",
        "texts beside transformers", "split of a round", "a thousand launches",
    ),
}  # fmt: skip


def run_call(name: str, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    here = {"PYTHON": sys.executable, "DEVICE": "cpu", "OUT": str(out), "RERUN": "commit"}
    return subprocess.run(
        ["bash", f"scripts/gpu/{name}.sh"],
        cwd=ROOT,
        env=os.environ | here | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", STEPS)
def test_without_time_every_step_is_named_and_nothing_passes(name: str, tmp_path: Path) -> None:
    done = run_call(name, tmp_path, LIMIT_S="0")
    assert done.returncode == 1, done.stderr
    told = [line for line in done.stdout.splitlines() if line.endswith("0 s  no time left")]
    assert [line[:28].rstrip() for line in told] == list(STEPS[name])
    assert (tmp_path / "log.txt").read_text() == done.stdout
    assert (tmp_path / "results.tgz").stat().st_size > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", STEPS)
def test_a_call_runs_small_on_a_cpu(name: str, tmp_path: Path) -> None:
    """Every step to its end, in fewer files than come back from the device machine."""
    done = run_call(name, tmp_path, LIMIT_S="1500")
    assert done.returncode == 0, done.stdout
    told = [line for line in done.stdout.splitlines() if line.endswith(" s  ok")]
    assert [line[:28].rstrip() for line in told] == list(STEPS[name])
    assert len(list(tmp_path.iterdir())) <= 8
    rows = json.loads((tmp_path / "cuda_headline-cpu.json").read_text())["rows"]
    assert len(rows) == 20
    assert all(row["ms"] > row["floor_ms"] > 0 for row in rows)


# --------------------------------------------------------------------------- tests in processes

LOG = """
tests/runtime/test_cuda.py::test_text[eagle2-1] PASSED             [ 10%]
tests/runtime/test_cuda.py::test_text[echo, budget-1] FAILED       [ 20%]
tests/runtime/test_cuda.py::test_text[ar-1] SKIPPED (no CUDA)      [ 30%]
tests/runtime/test_cuda.py::test_records
"""


def test_failures_stand_with_their_reason() -> None:
    report = Report()
    summary = "FAILED tests/runtime/test_cuda.py::test_text[echo, budget-1] - assert 1 == 2"
    report.add(Job("tests/runtime/test_cuda.py"), 1, LOG + summary)
    assert report.bad == ["tests/runtime/test_cuda.py::test_text[echo, budget-1]  assert 1 == 2"]
    report.add(Job("tests/kernels/test_rows.py"), 3, "INTERNALERROR> no context\n")
    assert report.bad[1:] == [
        "tests/kernels/test_rows.py  pytest ended with status 3: INTERNALERROR> no context"
    ]


class Collected:
    """A plugin that keeps the names of what pytest collects."""

    tests: tuple[str, ...] = ()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = tuple(item.nodeid for item in session.items)


def test_parts_of_a_file_are_disjoint_and_have_every_cuda_test() -> None:
    """Collected in this process, which has imported torch and most of these files."""
    files = {f"tests/{name}.py": parts for name, parts in cuda_tests.PARTS.items()}
    collected = Collected()
    paths = (str(ROOT / file) for file in files)
    pytest.main(["--collect-only", "-qq", "-m", "cuda", *paths], plugins=[collected])
    for file, parts in files.items():
        tests = [test for test in collected.tests if test.startswith(file)]
        assert len(tests) > 10, collected.tests
        for test in tests:
            found = [part for part in parts if matches(part, test)]
            assert len(found) == 1, f"{test} is in {found}"


def matches(expression: str, test: str) -> bool:
    """As pytest's -k: a word holds where the test's name has it."""
    words = expression.replace("(", " ( ").replace(")", " ) ").split()
    operators = {"and", "or", "not", "(", ")"}
    terms = [word if word in operators else str(word in test) for word in words]
    return bool(eval(" ".join(terms)))  # of the constants above, True and False


# --------------------------------------------------------------------------- smoke


def test_a_check_that_ends_its_process_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next child goes on behind it."""
    lines = [
        {"ready": 2.0},
        {"index": 0, "name": "a", "begun": True},
        {"index": 0, "name": "a", "ok": True, "remark": "fine", "s": 1.0},
        {"index": 1, "name": "b", "begun": True},
    ]
    told = "a warning\n" + "".join(f"{json.dumps(line)}\n" for line in lines)
    child = SimpleNamespace(stdout=io.StringIO(told), wait=lambda: -11)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: child)
    monkeypatch.setenv("OUT", str(tmp_path))
    given, found = SimpleNamespace(device="cuda", small=False), list[dict[str, Any]]()
    assert smoke.one_child(given, 0.0, 0, found) == (-11, 2)  # type: ignore[arg-type]
    kept = json.loads((tmp_path / "smoke.json").read_text())
    assert [(line["name"], line["ok"]) for line in kept] == [("a", True), ("b", False)]
    shown = capsys.readouterr().out
    assert "a warning" in shown
    assert "FAIL  b" in shown
    assert "the process ended with -11" in shown


# --------------------------------------------------------------------------- kernels, bytes


def test_kernels_are_found_in_another_folder(tmp_path: Path) -> None:
    """By Triton's own look-up; it left out what stood under the paths of the first folder."""
    pytest.importorskip("triton")
    from triton.runtime.cache import FileCacheManager

    def manager(folder: str) -> FileCacheManager:
        found = FileCacheManager("K1")
        found.cache_dir = str(tmp_path / folder / "K1")
        return found

    (tmp_path / "cache" / "K1").mkdir(parents=True)
    files = {}
    for file in ("a.cubin", "a.json", "a.ptx", "launcher.so"):
        path = tmp_path / "cache" / "K1" / file
        path.write_text(file)
        files[file] = str(path)
    group = {"child_paths": files}
    (tmp_path / "cache" / "K1" / "__grp__a.json").write_text(json.dumps(group))
    (tmp_path / "cache" / "K2").mkdir()
    (tmp_path / "cache" / "K2" / "b.ttir").write_text("b")
    assert kernel_archive.pack(tmp_path / "cache", tmp_path / "kernels.tar.xz") == 1
    shutil.rmtree(tmp_path / "cache")
    assert kernel_archive.unpack(tmp_path / "kernels.tar.xz", tmp_path / "other") == 1
    found = manager("other").get_group("a.json")
    assert found is not None
    here = tmp_path / "other" / "K1"
    assert found == {name: str(here / name) for name in ("a.cubin", "a.json", "launcher.so")}


def test_kernels_that_were_compiled_since(tmp_path: Path) -> None:
    """In their old folders too, where counting folders would miss them."""
    (tmp_path / "K1").mkdir()
    (tmp_path / "K1" / "a.cubin").write_text("old")
    (tmp_path / "began").touch()
    assert kernel_archive.newer(tmp_path, tmp_path / "began") == 0
    later = (tmp_path / "began").stat().st_mtime_ns + 1
    os.utime(tmp_path / "K1" / "a.cubin", ns=(later, later))
    assert kernel_archive.newer(tmp_path, tmp_path / "began") == 1


def test_bytes_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by hand for the tiny pair: float32, 8 layers, a head of one layer."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import torch

    from benchmarks.decode_8b.pair import TINY, random_pair
    from scripts.gpu.headline import bytes_read

    pair, context = random_pair(TINY, torch.device("cpu")), 100
    hidden, inner, vocabulary, drafted, keys = 64, 96, 512, 160, 2 * 16
    layer = 2 * hidden * hidden + 2 * keys * hidden + 3 * hidden * inner + 2 * hidden
    target = 8 * layer + hidden + vocabulary * hidden
    block = 2 * hidden * (hidden + 2 * keys) + hidden * hidden + 3 * hidden * inner
    text = 2 * keys * context
    plain = bytes_read(pair, {"batch": 3}, context)
    assert plain == 4 * (target + 3 * 8 * text)
    drafting = bytes_read(pair, {"batch": 1, "levels": 5.0}, context) - 4 * (target + 8 * text)
    assert drafting == 4 * (5 * (block + drafted * hidden + text) + 3 * hidden * hidden)


# --------------------------------------------------------------------------- the page


def test_the_page_has_the_figures_of_the_results_and_no_other() -> None:
    page = publish.PAGE.read_text("utf-8")
    assert publish.written(page, publish.headline_of(publish.RESULTS)) == page
