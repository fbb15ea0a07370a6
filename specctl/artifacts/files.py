"""Reads an artifact's folder without trusting it, and writes one atomically. POSIX only."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from specctl.artifacts.manifest import (
    CARD,
    MANIFEST,
    REPORT_JSON,
    SIGNATURE,
    TENSORS,
    TWIN,
    FileEntry,
)
from specctl.durable import beside, check_folder, open_unfollowed, sync_folder, write_new
from specctl.errors import ArtifactError, OutputError, reason_of, refusals_of

MIB = 1 << 20
MAX_BYTES = {
    MANIFEST: MIB,
    TENSORS: 8 * MIB,
    TWIN: 16 * MIB,
    CARD: MIB,
    REPORT_JSON: 2 * MIB,
    SIGNATURE: MIB,
}
"""The files of the format and the most bytes that each may have."""
_UNLISTED = (MANIFEST, SIGNATURE)
_FETCH = "fetch the artifact again"
OF_HUB = {".cache": stat.S_ISDIR, ".gitattributes": stat.S_ISREG}
"""Entries that Hugging Face's tools leave in a folder, and the required kind of each."""
_KINDS = {
    "registry.json": "a registry",
    "trace.json": "a trace set",
    "config.json": "an artifact or a model",
}
_PLAIN = re.compile(r"[a-z0-9._-]+")
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_UNSAFE = re.compile(r"[\x00-\x1f\x7f/\\:%]|^\.*$")
T = TypeVar("T")


def check_name(name: str) -> None:
    """Refuses a name that is not a plain file of the format: E_PATH for one that could leave the
    folder or name a device, E_NAME for characters that look alike, E_EXTRA for other files."""
    if _UNSAFE.search(name) or _DEVICE.fullmatch(name) or len(name) > 255:
        raise ArtifactError("E_PATH", "file name", f"{name!a} is no plain file name")
    if name != CARD and not _PLAIN.fullmatch(name):
        raise ArtifactError("E_NAME", "file name", f"{name!a} is not of [a-z0-9._-]")
    if name not in MAX_BYTES:
        problem = f"{name!a} is none of {', '.join(MAX_BYTES)}"
        raise ArtifactError("E_EXTRA", "files", problem)


def check_size(name: str, size: int) -> None:
    """Refuses more bytes than the format allows for a file (E_SIZE)."""
    if size > MAX_BYTES[name]:
        raise ArtifactError("E_SIZE", name, f"it has more than {MAX_BYTES[name]} bytes")


def check_list(listed: Mapping[str, FileEntry]) -> None:
    """Refuses names that a manifest may not list: E_PATH, E_NAME, E_EXTRA."""
    for name in listed:
        check_name(name)
        if name in _UNLISTED:
            raise ArtifactError("E_EXTRA", "files", f"{name} must not be listed")


def check_contents(listed: Mapping[str, FileEntry], contents: Mapping[str, bytes]) -> None:
    """Refuses anything but the listed files, a manifest and a signature (E_MISSING, E_EXTRA,
    E_DIGEST)."""
    for name in listed:
        if name not in contents:
            raise missing_file(name)
    for name, data in contents.items():
        if name in _UNLISTED:
            continue
        if name not in listed:
            raise ArtifactError("E_EXTRA", "files", f"{name} is not listed in {MANIFEST}")
        wanted, found = listed[name], FileEntry.of(data)
        if found != wanted:
            problem = (
                f"it has {found.size_bytes} bytes, {found.digest}, but the manifest lists "
                f"{wanted.size_bytes} bytes, {wanted.digest}"
            )
            raise ArtifactError("E_DIGEST", name, problem, hint=_FETCH)


def missing_file(name: str) -> ArtifactError:
    """The error of an artifact without one of its files (E_MISSING)."""
    return ArtifactError("E_MISSING", name, "the file is missing", hint=_FETCH)


def read_folder(folder: Path) -> dict[str, bytes]:
    """Reads every file of an artifact folder, by name.

    Files are opened relative to one handle, so that a swapped path cannot mix two folders, and
    links are not followed. The entries of `OF_HUB` are skipped.

    Raises:
        ArtifactError: E_MISSING, E_PATH, E_NAME, E_EXTRA, E_FILETYPE or E_SIZE.
    """
    handle = None
    with refusals_of(str(folder)):
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            names = sorted(name for name in os.listdir(handle) if not _is_of_hub(name, handle))
            for name in names:
                check_name(name)
            return {name: _read_file(name, handle) for name in names}
        except (OSError, ValueError) as error:  # ValueError: a path that no file can have
            raise _missing("files", error) from None
        finally:
            if handle is not None:
                os.close(handle)


def _is_of_hub(name: str, folder: int) -> bool:
    try:
        return name in OF_HUB and OF_HUB[name](os.lstat(name, dir_fd=folder).st_mode)
    except OSError:  # removed since: refused by its name
        return False


def _read_file(name: str, folder: int) -> bytes:
    try:
        handle = open_unfollowed(name, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
            raise _not_a_file(name, os.strerror(error.errno)) from None
        raise _missing(name, error) from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(handle)
        raise _not_a_file(name, f"{stat.filemode(status.st_mode)} with {status.st_nlink} links")
    with os.fdopen(handle, "rb") as file:
        data = file.read(MAX_BYTES[name] + 1)
    check_size(name, len(data))
    return data


def _not_a_file(name: str, found: str) -> ArtifactError:
    fix = "copy the artifact with links followed (Hugging Face: download with local_dir)"
    problem = f"not a regular file with one link: {found}"
    return ArtifactError("E_FILETYPE", name, problem, hint=fix)


def _missing(field: str, error: OSError | ValueError) -> ArtifactError:
    problem = f"cannot be read: {reason_of(error)}"
    return ArtifactError("E_MISSING", field, problem, hint="check the path")


def read_plain(path: Path, *, max_bytes: int, follow: bool = False) -> tuple[bytes, os.stat_result]:
    """The first bytes of a file, and its status, which the caller checks.

    Pipes and devices are not read.

    Args:
        max_bytes: of a longer file one byte more is returned.
        follow: whether the path may be a link.

    Raises:
        OSError: it is absent or cannot be read; ELOOP for a link that is not followed.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    with open(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        return file.read(max_bytes + 1) if stat.S_ISREG(status.st_mode) else b"", status


def kind_of(names: Iterable[str]) -> str:
    """The kind of a folder with these entries, for refusals, e.g. `a trace set (trace.json)`."""
    found = sorted(names)
    for name, kind in _KINDS.items():
        if name in found:
            return f"{kind} ({name})"
    if not found:
        return "an empty folder"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"a folder with {ascii(found[0])[:80]}{more}"


def check_is_artifact(folder: Path) -> None:
    """Refuses a folder without a manifest (E_MISSING); the hint names the likely one."""
    try:
        names = os.listdir(folder)
    except (OSError, ValueError):  # unreadable: the loader gives the reason
        return
    if MANIFEST in names:
        return
    inner = folder / "policy"  # written by `tune` and `fit auto`
    fix = "name the folder that `specctl fit` or `tune` wrote"
    if os.path.lexists(inner / MANIFEST):
        fix = f"name {inner}, which is one"
    problem = f"this is no artifact, which has a {MANIFEST}, but {kind_of(names)}"
    raise ArtifactError("E_MISSING", "files", problem, hint=fix, artifact=str(folder))


def check_publishable(folder: Path) -> None:
    """Rejects a place where an artifact cannot be written, before the work on one.

    Raises:
        OutputError: it cannot be written, or holds something else.
    """
    _check_replaceable(folder)
    check_folder(folder.absolute().parent, f"artifact {folder}: the folder")


def _check_replaceable(folder: Path) -> None:
    if os.path.lexists(folder) and not _is_replaceable(folder):
        raise OutputError(
            f"artifact {folder}: the place holds something else",
            hint="choose another output folder; nothing was touched",
        )


def publish_folder(folder: Path, contents: Mapping[str, bytes], verify: Callable[[Path], T]) -> T:
    """Writes a temporary folder, calls `verify` on it, then renames it; returns `verify`'s result.

    Raises:
        OutputError: a place that cannot be written, or that holds something else.
    """
    _check_replaceable(folder)
    staged = beside(folder)
    try:
        write_folder(staged, contents)
        verified = verify(staged)
        _swap_in(staged, folder)
    except OSError as error:
        problem = f"artifact {folder} cannot be written: {reason_of(error)}"
        raise OutputError(problem, hint="choose another output folder") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return verified


def _is_replaceable(folder: Path) -> bool:
    """Whether this is an empty folder, or holds an artifact and nothing else."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    entries = list(folder.iterdir())
    ours = (one.name in MAX_BYTES and one.is_file() and not one.is_symlink() for one in entries)
    if not entries or not all(ours) or not (folder / MANIFEST).exists():
        return not entries
    with (folder / MANIFEST).open("rb") as file:  # the first key of canonical JSON
        return b'"artifact_version"' in file.read(64)


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes and syncs a new folder of files."""
    folder.mkdir(parents=True)
    for name, data in contents.items():
        write_new(folder / name, data)
    sync_folder(folder)


def _swap_in(staged: Path, folder: Path) -> None:
    """Renames into place; an older artifact is moved aside first and removed last."""
    aside = folder.parent / f".{folder.name}.{secrets.token_hex(8)}.old"
    replaces = folder.exists()
    if replaces:
        folder.rename(aside)
    try:
        staged.rename(folder)
    except OSError:
        if replaces:
            aside.rename(folder)
        raise
    sync_folder(folder.parent)
    if replaces:
        shutil.rmtree(aside)
