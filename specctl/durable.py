"""Atomic, durable files, and descriptors opened without following links.

A failed write, sync or link is never retried on the same file. After a failed fsync the kernel
may drop the dirty pages and report success to the next call, so a retry could acknowledge
bytes that no longer exist. POSIX only: links, folder syncs.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specctl.errors import OutputError, reason_of

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
TRY_AGAIN = "free space or correct permissions, then try again"
READ_AGAIN = "correct permissions or check the disk, then try again"
RESUME = "free space or correct permissions, then go on with --resume"
"""Hint of commands that have the option."""
ELSEWHERE = "choose another --out"


@contextmanager
def output_errors(path: Path, what: str, fix: str = TRY_AGAIN) -> Iterator[None]:
    """Turns the operating system's refusals into `OutputError` naming `path`."""
    try:
        yield
    except OSError as error:
        problem = f"{what} {path} cannot be written: {reason_of(error)}"
        raise OutputError(problem, hint=fix) from error


def open_unfollowed(path: Path | str, *, dir_fd: int | None = None) -> int:
    """Opens a file for reading without following a link; the caller checks its status.

    Args:
        dir_fd: descriptor of the folder that a relative path begins at.

    Raises:
        OSError: it is a link (ELOOP) or a socket (ENXIO), or cannot be read. Pipes open at once.
    """
    return os.open(path, _READ, dir_fd=dir_fd)


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Makes the names inside a folder survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Creates a folder and its parents durably; existing ones are kept."""
    if path.is_dir():
        return
    make_folder(path.parent)
    claim_folder(path)


def claim_folder(path: Path) -> None:
    """Creates a folder unless it exists, and syncs its name.

    An existing one is synced too, since its creator may have died before doing so.
    """
    with suppress(FileExistsError):
        path.mkdir()
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    sync_folder(path.parent)


def share_as(handle: int, folder: int) -> None:
    """Gives a new file or folder the group rights of its folder, whatever the umask.

    Only if the folder has the setgid bit, which marks a folder shared by its group. The group may
    read files, never write them.
    """
    shared, made = os.fstat(folder).st_mode, os.fstat(handle).st_mode
    rights = shared & (stat.S_IRWXG if stat.S_ISDIR(made) else stat.S_IRGRP)
    if shared & stat.S_ISGID and rights & ~made:
        os.fchmod(handle, stat.S_IMODE(made) | rights)


def write_new(path: Path, content: bytes, *, dir_fd: int | None = None, mode: int = 0o666) -> None:
    """Writes and syncs a file that must not exist yet.

    Args:
        dir_fd: descriptor of the folder that a relative path begins at; see `share_as`.
        mode: permissions, less what the umask takes.
    """
    with os.fdopen(os.open(path, _CREATE, mode, dir_fd=dir_fd), "wb") as stream:
        if dir_fd is not None:
            share_as(stream.fileno(), dir_fd)
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def beside(path: Path) -> Path:
    """A unique temporary name in the folder of `path`."""
    return path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"


def replace_file(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Writes or replaces a file atomically. For files of one writer.

    Args:
        mode: permissions, less what the umask takes.
    """
    staged = beside(path)
    try:
        write_new(staged, content, mode=mode)
        staged.replace(path)
        sync_folder(path.absolute().parent)
    finally:
        staged.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Syncs a closed file; a new descriptor will do, since dirty pages belong to the file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path) -> None:
    """Gives a synced file its final name, never replacing another, and syncs the folder.

    An existing file of equal content is a success, so publishing twice is harmless.
    """
    try:
        os.link(temporary, final)  # `rename` would replace a file
    except FileExistsError:
        if file_sha256(temporary) != file_sha256(final):
            raise
    sync_folder(final.parent)
    temporary.unlink()


# --------------------------------------------------------------------------- results


def prepare_folder(folder: Path, what: str = "results folder") -> None:
    """Creates a folder if it is missing and checks that it can be written."""
    with output_errors(folder, what, ELSEWHERE):
        folder.mkdir(parents=True, exist_ok=True)
        _probe(folder / "probe")


def check_place(path: Path, what: str) -> None:
    """Rejects a file that cannot be written, before minutes of work."""
    with output_errors(path, what, ELSEWHERE):
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        _probe(path)


def write_whole(path: Path, content: bytes, what: str) -> None:
    """Writes or replaces a file of results atomically."""
    with output_errors(path, what, ELSEWHERE):
        replace_file(path, content)


def check_folder(folder: Path, what: str) -> None:
    """Rejects a folder that cannot be written or made, without making it."""
    above = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    with output_errors(folder, what, ELSEWHERE):
        _probe(above / folder.name)


def _probe(path: Path) -> None:
    probe = beside(path)
    probe.touch(exist_ok=False)
    probe.unlink()
