"""The wheel in an environment of its own: the README and the demo in an empty folder.

Minutes, and gigabytes of other packages' wheels; `make nightly`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pages import blocks, lines_to_run

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DEMO = (
    "specctl collect embedded -o demo-traces --dense --limit 30 --max-new-tokens 16",
    "specctl fit hetero demo-traces -o hetero",
    "specctl fit c2t demo-traces -o c2t",
    "specctl replay demo-traces -p eagle2 -p ar -p hetero -p c2t -o replayed",
    "specctl run embedded --compare ar,eagle2,hetero,c2t -o decoded --limit 2 --max-new-tokens 8",
    "specctl report demo-traces --results replayed/replay.json -o demo.html",
)
"""The verbs of `make demo` at small limits; what it uses besides are prompts of the checkout."""
Run = Callable[..., str]


def alone() -> dict[str, str]:
    """This environment without ways to the checkout, to its packages and to a user's settings."""
    left_out = ("PYTHON", "SPECCTL_", "XDG_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment that holds the wheel and what it asks for, nothing else; 3 GB."""
    folder = tmp_path_factory.mktemp("clean")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel], venv = folder.glob("*.whl"), folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, env=alone())
    pip = [str(venv / "bin" / "pip"), "-q", "--disable-pip-version-check"]
    install = [*pip, "install", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(install, check=True, env=alone())
    subprocess.run([*pip, "check"], check=True, env=alone())
    yield venv
    shutil.rmtree(venv)


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Run:
    """Runs a program of the environment in an empty folder; what it printed."""
    empty, home = tmp_path / "empty", tmp_path / "home"
    empty.mkdir()
    home.mkdir()
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    given = alone() | {"PATH": path, "HOME": str(home), "OMP_NUM_THREADS": "1"}

    def words(*words: str) -> str:
        done = subprocess.run(words, cwd=empty, env=given, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return words


def test_what_one_types_first(run: Run) -> None:
    assert "llama-server" in run("specctl")
    for word in ("--version", "--help", "doctor"):
        run("specctl", word)


def test_commands_of_the_readme_and_the_demo(run: Run, tmp_path: Path) -> None:
    for line in (*lines_to_run(README), *DEMO):
        if words := shlex.split(line, comments=True):
            run(*words)
    assert '"c2t"' in (tmp_path / "empty" / "decoded" / "results.json").read_text("utf-8")
    assert (tmp_path / "empty" / "report.html").stat().st_size > 10_000


def test_python_of_the_pages(run: Run, environment: Path) -> None:
    block = next(one for one in blocks("python") if one.page.name == "python-api.md")
    printed = run("python", "-c", f"{block.code}\nimport specctl\nprint(specctl.__file__)\n")
    assert Path(printed.splitlines()[-1]).is_relative_to(environment)
