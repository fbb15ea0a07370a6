"""Compiled Triton kernels of a cache as one small archive: what a launch needs and no more.

    python scripts/gpu/kernel_archive.py pack CACHE kernels.tar.xz
    python scripts/gpu/kernel_archive.py unpack kernels.tar.xz CACHE
    python scripts/gpu/kernel_archive.py newer CACHE FILE       how many were compiled since

Each prints the number of kernels.

Triton finds a kernel by its source, line numbers, arguments and version, so an archive serves any
machine with the same Triton and the same files under specctl/kernels.
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
from pathlib import Path

KEPT = (".cubin", ".json", ".so")
"""Machine code, how it is launched, and compiled launchers; intermediate forms are left out."""


def pack(cache: Path, archive: Path) -> int:
    """Writes the kernels and launchers of a cache, whole or not at all; returns the kernels."""
    paths = sorted(path for path in cache.glob("*/*") if path.suffix in KEPT)
    folders = {path.parent for path in paths if path.suffix in (".cubin", ".so")}
    partial = archive.with_suffix(".part")
    with tarfile.open(partial, "w:xz", preset=1) as out:
        for path in paths:
            if path.parent in folders:
                out.add(path, f"{path.parent.name}/{path.name}")
    os.replace(partial, archive)
    return sum(path.suffix == ".cubin" for path in paths)


def unpack(archive: Path, cache: Path) -> int:
    """Adds the kernels of an archive to a cache; returns their number.

    The files of a kernel are listed with the paths that they had where they were compiled; Triton
    leaves out those that are not there, so the lists are written for this cache.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as given:
        given.extractall(cache, filter="data")
    for path in cache.glob("*/__grp__*.json"):
        group = json.loads(path.read_text("utf-8"))
        here = {name: path.parent / name for name in group["child_paths"]}
        group["child_paths"] = {name: str(file) for name, file in here.items() if file.exists()}
        path.write_text(json.dumps(group), "utf-8")
    return len(list(cache.glob("*/*.cubin")))


def newer(cache: Path, than: Path) -> int:
    """Kernels that were compiled behind a file's last change."""
    since = than.stat().st_mtime_ns
    return sum(path.stat().st_mtime_ns > since for path in cache.glob("*/*.cubin"))


if __name__ == "__main__":
    verb, one, other = sys.argv[1], *map(Path, sys.argv[2:])
    print({"pack": pack, "unpack": unpack, "newer": newer}[verb](one, other))
