"""The wheel in an environment of its own: the README's commands, in an empty folder.

Minutes, and gigabytes of other packages' wheels; `make nightly`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import blocks, lines_to_run

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEFORE = ("specctl --version",)
"""Before the README's own small commands; what a newcomer runs first belongs here."""
AFTER = (
    "specctl collect embedded -o traces --dense --limit 30 --max-new-tokens 16",
    "specctl fit cart traces -o hetero",
    "specctl fit c2t traces -o c2t",
    "specctl replay traces -p eagle2 -p ar -p hetero -p c2t -o replayed",
    "specctl run embedded --compare ar,eagle2,hetero,c2t -o decoded --limit 2 --max-new-tokens 8",
    "specctl report traces --results replayed/replay.json -o report.html",
)
"""`make demo` at small limits: what it uses besides are prompts of the checkout."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds the wheel and what it asks for, nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    pip = [str(folder / "venv" / "bin" / "pip"), "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    subprocess.run([*pip, "check"], check=True)
    return folder / "venv"


def settings(environment: Path, home: Path) -> dict[str, str]:
    """A newcomer's environment: no caches, no settings, and no way to the checkout."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    path = f"{environment / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {**kept, **quiet, "PATH": path, "HOME": str(home)}


def commands() -> Iterator[list[str]]:
    for line in (*BEFORE, *lines_to_run(README), *AFTER):
        if words := shlex.split(line, comments=True):
            yield words


def test_commands_run_outside_the_checkout(environment: Path, tmp_path: Path) -> None:
    empty, home = tmp_path / "empty", tmp_path / "home"
    empty.mkdir(), home.mkdir()
    given = settings(environment, home)
    for words in commands():
        assert words[0] == "specctl", words
        done = subprocess.run(words, cwd=empty, env=given, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    results = (empty / "decoded" / "results.json").read_text("utf-8")
    assert '"c2t"' in results
    assert (empty / "report.html").stat().st_size > 10_000
    for block in blocks("python"):
        if block.page == README and block.reason is None:
            code = f"{block.code}\nimport specctl\nprint(specctl.__file__)\n"
            python = [str(environment / "bin" / "python"), "-c", code]
            done = subprocess.run(python, cwd=empty, env=given, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert Path(done.stdout.splitlines()[-1]).is_relative_to(environment), done.stdout
