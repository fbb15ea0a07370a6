"""The folder on disk: read without trusting it, written whole or not at all. POSIX only."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from specctl.artifacts.manifest import (
    CARD,
    MANIFEST,
    REPORT_JSON,
    REPORT_PNG,
    SELFTEST,
    SIGNATURE,
    TENSORS,
    TWIN,
)
from specctl.durable import beside, open_unfollowed, sync_folder, write_new
from specctl.errors import ArtifactError, OutputError, refusals_of

MIB = 1 << 20
MAX_BYTES = {
    MANIFEST: MIB,
    TENSORS: 8 * MIB,
    TWIN: 16 * MIB,
    CARD: MIB,
    REPORT_JSON: 2 * MIB,
    REPORT_PNG: 16 * MIB,
    SELFTEST: MIB,
    SIGNATURE: MIB,
}
"""The files of the format and the most bytes that each may have."""
OF_HUB = {".cache": stat.S_ISDIR, ".gitattributes": stat.S_ISREG}
"""What downloads into a folder and repositories of the hub have besides, and what it must be."""
FOREIGN = {
    "a pickle": (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
    "a zip archive (.pt, .npz)": (b"PK\x03\x04", b"PK\x05\x06"),
    "compressed bytes (joblib, .gz, .zst)": (
        *(b"\x1f\x8b", b"x\x9c", b"(\xb5/\xfd", b"BZh", b"\xfd7zXZ\x00", b'\x04"M\x18'),
        b"7z\xbc\xaf\x27\x1c",
    ),
    "HDF5": (b"\x89HDF",),
}
"""First bytes of formats that run code when read, or that grow when unpacked. Those without, such
as pickles of protocol 0 and 1, are refused for what they are not."""
TAR, TAR_AT = b"ustar", 257

_PLAIN = re.compile(r"[a-z0-9._-]+")
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_UNSAFE = re.compile(r"[\x00-\x1f\x7f/\\:%]|^\.*$")
T = TypeVar("T")


def check_name(name: str) -> None:
    """Refuses a name that is not a plain file of the format.

    Raises:
        ArtifactError: E_PATH for what could leave the folder or name a device, E_NAME for
            characters that look alike, E_EXTRA for a plain name that the format does not know.
    """
    found = ascii(name)
    if _UNSAFE.search(name) or _DEVICE.fullmatch(name) or len(os.fsencode(name)) > 255:
        raise ArtifactError("E_PATH", "file name", expected="a plain file name", found=found)
    if name != CARD and not _PLAIN.fullmatch(name):
        raise ArtifactError("E_NAME", "file name", expected="[a-z0-9._-]", found=found)
    if name not in MAX_BYTES:
        known = ", ".join(MAX_BYTES)
        raise ArtifactError("E_EXTRA", "files", expected=f"only {known}", found=found)


def check_names(names: Iterable[str]) -> None:
    """Refuses names as `check_name` does, the first of them."""
    for name in names:
        check_name(name)


def check_sizes(contents: Mapping[str, bytes]) -> None:
    """Refuses sizes as `read_folder` does, of files that are in memory already (E_SIZE)."""
    for name, data in contents.items():
        if len(data) > MAX_BYTES[name]:
            raise _too_large(name, f"{len(data)}")


def check_format(name: str, data: bytes) -> None:
    """Refuses files of another format under a name of ours (E_FORMAT)."""
    found = _foreign(data)
    if found is not None:
        raise ArtifactError("E_FORMAT", name, expected="the format of its name", found=found)


def _foreign(data: bytes) -> str | None:
    if data.startswith(TAR, TAR_AT):
        return "a tar archive"
    return next((name for name, heads in FOREIGN.items() if data.startswith(heads)), None)


def read_folder(folder: Path) -> dict[str, bytes]:
    """Every file of an artifact folder, by name, within the caps.

    All are opened relative to one handle, so that a swapped path cannot mix two folders. What
    Hugging Face's tools leave beside them (`OF_HUB`) is passed over and never opened.

    Raises:
        ArtifactError: E_MISSING, E_PATH, E_NAME, E_EXTRA, E_FILETYPE or E_SIZE.
    """
    with refusals_of(str(folder)), _opened(folder) as handle:
        names = sorted(name for name in os.listdir(handle) if not _is_of_hub(name, handle))
        check_names(names)
        return {name: _read_file(name, handle) for name in names}


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # or a path that no file can have
        raise _missing("files", error) from None
    try:
        yield handle
    except OSError as error:  # a disk that fails, a share that went away while it was read
        raise _missing("files", error) from None
    finally:
        os.close(handle)


def _is_of_hub(name: str, folder: int) -> bool:
    if name not in OF_HUB:
        return False
    try:
        return OF_HUB[name](os.lstat(name, dir_fd=folder).st_mode)
    except OSError:  # gone by now: refused by its name
        return False


def _read_file(name: str, folder: int) -> bytes:
    cap = MAX_BYTES[name]
    with os.fdopen(_open_regular(name, folder), "rb") as file:
        data = file.read(cap + 1)
    if len(data) > cap:
        raise _too_large(name, "more")
    return data


def _too_large(name: str, found: str) -> ArtifactError:
    wanted = f"at most {MAX_BYTES[name]} bytes"
    return ArtifactError("E_SIZE", name, expected=wanted, found=found)


def _open_regular(name: str, folder: int) -> int:
    try:
        handle = open_unfollowed(name, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
            raise _not_a_file(name, os.strerror(error.errno)) from None
        raise _missing(name, error) from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(handle)
        kind = stat.filemode(status.st_mode)
        raise _not_a_file(name, f"{kind} with {status.st_nlink} links")
    return handle


def _not_a_file(name: str, found: str) -> ArtifactError:
    return ArtifactError(
        "E_FILETYPE",
        name,
        expected="a regular file with one link",
        found=found,
        fix="copy the artifact with links followed (Hugging Face: download with local_dir)",
    )


def _missing(field: str, error: OSError | ValueError) -> ArtifactError:
    found = getattr(error, "strerror", None) or str(error)
    return ArtifactError(
        "E_MISSING", field, expected="a readable artifact", found=found, fix="check the path"
    )


def publish_folder(folder: Path, contents: Mapping[str, bytes], verify: Callable[[Path], T]) -> T:
    """Writes a folder beside its place, verifies it there, then renames it into place.

    Args:
        verify: called on the written folder; what it raises stops the publication.

    Returns:
        What `verify` gave.

    Raises:
        OutputError: a place that cannot be written, or that holds something else.
    """
    refuse_foreign(folder)
    staged = beside(folder)
    try:
        write_folder(staged, contents)
        verified = verify(staged)
        _swap_in(staged, folder)
    except OSError as error:
        raise OutputError(
            f"artifact {folder}",
            expected="a place that can be written",
            found=error.strerror or str(error),
            fix="choose another output folder",
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return verified


def refuse_foreign(folder: Path) -> None:
    """Raises `OutputError` if the place holds anything but an artifact or an empty folder."""
    if not os.path.lexists(folder) or _is_replaceable(folder):
        return
    raise OutputError(
        f"artifact {folder}",
        expected="a new place, an empty folder or an artifact to replace",
        found="something else",
        fix="choose another output folder; nothing was touched",
    )


def _is_replaceable(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    entries = {entry.name: entry for entry in folder.iterdir()}
    if not entries:
        return True
    if MANIFEST not in entries or not all(_is_ours(entry) for entry in entries.values()):
        return False
    return b'"artifact_version"' in _head(entries[MANIFEST])


def _is_ours(entry: Path) -> bool:
    return entry.name in MAX_BYTES and entry.is_file() and not entry.is_symlink()


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(64)  # canonical JSON: the first key of ours is `artifact_version`


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes a new folder of files, each of them and its name synced."""
    folder.mkdir(parents=True)
    for name, data in contents.items():
        write_new(folder / name, data)
    sync_folder(folder)


def _swap_in(staged: Path, folder: Path) -> None:
    """Renames into place; an older artifact is set aside first and removed last."""
    if not folder.exists():
        staged.rename(folder)
        sync_folder(folder.parent)
        return
    aside = folder.parent / f".{folder.name}.{secrets.token_hex(8)}.old"
    folder.rename(aside)
    try:
        staged.rename(folder)
    except OSError:
        aside.rename(folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(aside)
