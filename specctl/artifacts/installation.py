"""What wrote an artifact: the package's own code, and all that it runs on."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path

from specctl.artifacts.facts import Provenance
from specctl.artifacts.manifest import Origin

RECORDED_LIBRARIES = ("numpy", "onnx", "polars", "pydantic", "safetensors", "scikit-learn", "torch")
_PACKAGE = Path(__file__).parents[1]
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_GIT = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
_GIT_TIMEOUT_S = 10


def provenance(origin: Origin) -> Provenance:
    """Provenance of an artifact written now by this installation."""
    return Provenance(
        specctl_version=version("specctl"),
        library_versions=_library_versions(),
        created=origin.created,
        parent=origin.parent,
        source_digest=source_digest(),
        git_commit=git_commit(),
        lock_digest=lock_digest(),
    )


@cache
def source_digest() -> str:
    """`sha256:<hex>` over names and bytes of the package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256:{digest.hexdigest()}"


@cache
def git_commit() -> str | None:
    """The commit that the code is of, or None where that is not known or the code was changed."""
    stated = distribution("specctl").read_text("direct_url.json")  # of `pip install git+...`
    commit = json.loads(stated or "{}").get("vcs_info", {}).get("commit_id")
    return commit if isinstance(commit, str) else _checkout_commit()


def _checkout_commit() -> str | None:
    root = _PACKAGE.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *_GIT],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # no git here, or a checkout that it does not trust: not known
    found = done.stdout.strip()
    return found if re.fullmatch(r"[0-9a-f]{40,64}", found) else None  # "-dirty" has no commit


@cache
def lock_digest() -> str:
    """`sha256:<hex>` of the lines of `lock_lines`."""
    return "sha256:" + hashlib.sha256("\n".join(lock_lines()).encode()).hexdigest()


def lock_lines() -> list[str]:
    """`name==version` of each installed distribution that the package depends on, sorted.

    Extras, such as tools of development, do not count; what is not installed has no line.
    """
    waiting, found = ["specctl"], dict[str, str]()
    while waiting:
        name = _normal(waiting.pop())
        installed = None if name in found else _installed(name)
        if installed is not None:
            found[name] = installed.version
            waiting += _required(installed)
    del found["specctl"]  # its own code has a digest of its own
    return sorted(f"{name}=={version}" for name, version in found.items())


def _required(installed: Distribution) -> list[str]:
    lines = [line for line in installed.requires or () if "extra ==" not in line]
    return [match[0] for match in map(_REQUIREMENT.match, lines) if match]


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None  # for another platform, or not asked for


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _library_versions() -> dict[str, str]:
    """A serving box has no fitting libraries; what is absent is not recorded."""
    found = {library: _installed(library) for library in RECORDED_LIBRARIES}
    return {library: one.version for library, one in found.items() if one is not None}
