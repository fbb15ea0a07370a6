"""What a folder or a prefix of a bucket is, told by one file in it: for refusals."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from specctl.artifacts.manifest import MANIFEST
from specctl.errors import ArtifactError

_KINDS = {
    "registry.json": "a registry",
    "trace.json": "a trace set",
    "import.json": "an import of another tool's log",
    "config.json": "an artifact or a model",
}


def kind_of(names: Iterable[str]) -> str:
    """What holds files and folders of these names, e.g. `a trace set (trace.json)`."""
    found = sorted(names)
    for name, kind in _KINDS.items():
        if name in found:
            return f"{kind} ({name})"
    if not found:
        return "an empty folder"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"a folder with {ascii(found[0])[:80]}{more}"


def check_is_artifact(folder: Path) -> None:
    """Refuses a folder that is none of an artifact, naming what it is and what was meant.

    Raises:
        ArtifactError: E_MISSING.
    """
    try:
        names = os.listdir(folder)
    except (OSError, ValueError):  # no folder, or none that can be read: the loader says why
        return
    if MANIFEST in names:
        return
    inner = folder / "policy"  # of `specctl tune` and `fit auto`, whose reports lie beside it
    raise ArtifactError(
        "E_MISSING",
        "files",
        artifact=str(folder),
        expected=f"the folder of an artifact, with {MANIFEST}",
        found=kind_of(names),
        fix=f"name {inner}, which is one"
        if os.path.lexists(inner / MANIFEST)
        else "name the folder that `specctl fit`, `tune` or `compose` wrote",
    )
