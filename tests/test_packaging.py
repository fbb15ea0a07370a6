"""What is published: sdist, wheel and their metadata, and the one version that all of it bears."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from configparser import ConfigParser
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import specctl

ROOT = Path(__file__).parents[1]
MAX_BYTES = 20 << 20
"""Of either file; both are 16 MB, of which the embedded pair is 15."""
NOT_SHIPPED = (
    "pairs/",
    ".ci/",
)
OF_THE_BUILD = {"PKG-INFO", ".gitignore"}
"""Written into every sdist by the build, or by hatchling for rebuilding."""


def test_refusals_install_packages_by_their_own_names() -> None:
    """An extra of specctl can be installed only where specctl itself is published."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    known = {re.split(r"[^\w-]", line)[0] for extra in extras for line in extra}
    code = "".join(path.read_text() for path in sorted((ROOT / "specctl").rglob("*.py")))
    named = {name for line in re.findall('"pip install ([^"{,]+)', code) for name in line.split()}
    assert {"gguf", "accelerate", "obstore", "ray"} <= named <= known | {"xllamacpp"}


@dataclass(frozen=True)
class Built:
    """An sdist, and the wheel that was built from it."""

    sdist: Path
    wheel: Path

    @property
    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as files:
            [name] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
            return BytesParser().parsebytes(files.read(name))

    @property
    def entry_points(self) -> str:
        with zipfile.ZipFile(self.wheel) as files:
            [name] = [one for one in files.namelist() if one.endswith("/entry_points.txt")]
            return files.read(name).decode()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    dist = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [sdist], [wheel] = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return Built(sdist, wheel)


def test_wheel_has_the_package_with_its_data_and_nothing_else(built: Built) -> None:
    names = set(zipfile.ZipFile(built.wheel).namelist())
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "specctl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = f"specctl-{specctl.__version__}.dist-info"
    rest = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    assert names == package | {f"{info}/{name}" for name in rest}
    for needed in ("py.typed", "embedded/prompts.jsonl", "report/templates/page.html"):
        assert f"specctl/{needed}" in names
    assert sum(name.endswith("model.safetensors") for name in names) == 3


def test_sdist_has_the_repository_and_nothing_else(built: Built) -> None:
    tracked, new = listed("--cached"), listed("--others", "--exclude-standard")
    top = f"specctl-{specctl.__version__}/"
    with tarfile.open(built.sdist) as files:
        names = {member.name.removeprefix(top) for member in files if member.isfile()}
    wanted = {name for name in tracked if not name.startswith(NOT_SHIPPED)}
    assert wanted - names == set(), "name it in pyproject.toml, or in NOT_SHIPPED"
    assert names - wanted - new - OF_THE_BUILD == set()


def listed(*which: str) -> set[str]:
    """Files of the checkout that git knows so."""
    command = ["git", "ls-files", "-z", *which]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}


def test_an_index_would_take_both(built: Built) -> None:
    """By size; `make dist` asks twine."""
    assert max(built.sdist.stat().st_size, built.wheel.stat().st_size) < MAX_BYTES


def test_readme_of_the_index_has_no_link_into_the_checkout(built: Built) -> None:
    """Links of Markdown become names; other ways to link would need the same."""
    assert built.metadata["Description-Content-Type"] == "text/markdown"
    shown = built.metadata.get_payload()
    assert isinstance(shown, str)
    targets = re.findall(r"\]\(([^)]*)\)", shown)
    targets += re.findall(r"<[^>]*\b(?:href|src|srcset)=[\"']([^\"']*)", shown)
    assert not [one for one in targets if not one.startswith(("https://", "http://", "#"))]
    page = (ROOT / "README.md").read_text("utf-8")
    for file in re.findall(r"(?<!!)\[[^\]]+\]\(([\w/.-]+)[^)]*\)", page):
        assert file in shown, f"{file} is no longer named"


def test_entry_points_lead_to_code(built: Built) -> None:
    found = ConfigParser()
    found.read_string(built.entry_points)
    assert {group: [*found[group]] for group in found.sections()} == {
        "console_scripts": ["specctl"], "vllm.general_plugins": ["specctl"],
    }  # fmt: skip
    for group in found.sections():
        assert callable(EntryPoint("specctl", found[group]["specctl"], group).load())


# --------------------------------------------------------------------------- one version


def test_changelog_begins_with_the_version() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    forms = [
        re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (unreleased|\d{4}-\d\d-\d\d)", s) for s in sections
    ]
    assert all(forms), sections
    assert next(form[1] for form in forms if form) == specctl.__version__
    assert all(form[2] != "unreleased" for form in forms[1:] if form)


def test_the_version_is_written_once() -> None:
    """A second literal, or the metadata of an older installation, would part from the first."""
    literal = re.compile(rf"[\"']{re.escape(specctl.__version__)}[\"']|version\(\"specctl\"\)")
    found = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "specctl").rglob("*.py")
        if literal.search(path.read_text("utf-8"))
    ]
    assert found == ["specctl/version.py"]
    assert specctl.__version__ not in (ROOT / "pyproject.toml").read_text("utf-8")
