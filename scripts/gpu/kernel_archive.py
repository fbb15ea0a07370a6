"""Compiled Triton kernels of a cache as one small archive: what a launch needs and no more.

    python scripts/gpu/kernel_archive.py pack CACHE kernels.tar.xz
    python scripts/gpu/kernel_archive.py unpack kernels.tar.xz CACHE

Triton finds a kernel by its source, line numbers, arguments and version, so an archive serves any
machine with the same Triton and the same files under specctl/kernels.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

KEPT = (".cubin", ".json")
"""The machine code, and how it is launched; intermediate forms are left out."""


def pack(cache: Path, archive: Path) -> int:
    """Writes the kernels of a cache; returns their number."""
    folders = sorted({path.parent for path in cache.glob("*/*.cubin")})
    with tarfile.open(archive, "w:xz", preset=6) as out:
        for path in (path for folder in folders for path in sorted(folder.iterdir())):
            if path.suffix in KEPT:
                out.add(path, f"{path.parent.name}/{path.name}")
    return len(folders)


def unpack(archive: Path, cache: Path) -> int:
    """Adds the kernels of an archive to a cache; returns their number."""
    cache.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as given:
        given.extractall(cache, filter="data")
    return len(list(cache.glob("*/*.cubin")))


if __name__ == "__main__":
    verb, source, target = sys.argv[1], *map(Path, sys.argv[2:])
    print({"pack": pack, "unpack": unpack}[verb](source, target), "kernels")
