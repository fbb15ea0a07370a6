"""A folder as a store. POSIX: `link` is the exclusive creation, also between many processes.

Another user of a shared folder could put a link there, and so choose the file that is read or
created. Folders are therefore entered one segment at a time, and no link below the root is
followed. The root is the user's own choice and may be a link.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from specctl.durable import (
    READ_AGAIN,
    TRY_AGAIN,
    claim_folder,
    make_folder,
    open_unfollowed,
    share_as,
    sync_file,
    write_new,
)
from specctl.errors import StoreError, reason_of
from specctl.stores.interface import (
    StoredObject,
    UnreadableError,
    absent,
    check_key,
    taken,
    too_large,
)

TEMPORARY = "tmp"
MAX_DEPTH = 32
"""Segments of a path; specctl's keys have fewer than ten."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
Segments = tuple[str, ...]


class LocalStore:
    """Objects as files below the folder `root`, which is created with the first object.

    `tmp/` in it holds unfinished files, which are never read.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self._claimed: set[Segments] = set()

    def put_new(self, key: str, data: bytes) -> None:
        """See `ObjectStore`. A file gets its name once its bytes are on disk."""
        check_key(key)
        temporary = secrets.token_hex(16)
        with self._errors(key), self._folder((TEMPORARY,), create=True) as staging:
            try:
                write_new(Path(temporary), data, dir_fd=staging)
                self._link(temporary, key, staging)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=staging)

    def put_file(self, key: str, path: Path) -> None:
        """See `ObjectStore`. The file must be on the folder's file system."""
        check_key(key)
        with self._errors(key):
            sync_file(path)
            self._link(path, key, None)

    def _link(self, source: Path | str, key: str, source_folder: int | None) -> None:
        """Gives a synced file a key, which must be free, and syncs the folder."""
        *segments, name = key.split("/")
        with self._folder(tuple(segments), create=True) as folder:
            try:
                os.link(
                    source,
                    name,
                    src_dir_fd=source_folder,
                    dst_dir_fd=folder,
                    follow_symlinks=False,
                )
            except FileExistsError:
                # The process that linked the name may have died before it synced the folder.
                os.fsync(folder)
                raise taken(self.url, key) from None
            os.fsync(folder)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore`. Links and devices are refused."""
        *segments, name = check_key(key).split("/")
        try:
            with self._folder(tuple(segments)) as folder:
                try:
                    handle = open_unfollowed(name, dir_fd=folder)
                except OSError as error:
                    if error.errno not in (errno.ELOOP, errno.EACCES, errno.ENXIO):
                        raise
                    error.filename = str(self.root / key)
                    failed = self._failed(key, error, writes=False)
                    raise UnreadableError(failed.message, hint=failed.hint) from None
            with os.fdopen(handle, "rb") as file:
                return _read_regular(file, self.url, key, max_bytes)
        except (FileNotFoundError, NotADirectoryError):
            raise absent(self.url, key) from None
        except OSError as error:
            raise self._failed(key, error, writes=False) from None

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """See `ObjectStore`. A link is listed as an object that cannot be read."""
        segments = tuple(check_key(prefix.rstrip("/")).split("/")) if prefix else ()
        found: list[StoredObject] = []
        with (
            self._errors(prefix, writes=False),
            suppress(FileNotFoundError, NotADirectoryError),
            self._folder(segments) as folder,
        ):
            path = "".join(f"{segment}/" for segment in segments)
            found = [
                StoredObject(key, size_bytes)
                for key, size_bytes in _below(folder, path)
                if not key.startswith(f"{TEMPORARY}/")
            ]
        yield from sorted(found, key=lambda one: one.key)

    def children(self, prefix: str) -> list[str]:
        """See `ObjectStore`. Empty folders are left by writers that died."""
        segments = tuple(check_key(prefix).split("/")) if prefix else ()
        with (
            self._errors(prefix, writes=False),
            suppress(FileNotFoundError, NotADirectoryError),
            self._folder(segments) as folder,
        ):
            return sorted(name for name in os.listdir(folder) if not _is_empty(folder, name))
        return []

    def clear_temporary(self, older_than_s: float) -> list[str]:
        """Removes unfinished files of writers that died; returns their names.

        Args:
            older_than_s: age below which a writer may still be alive, seconds.
        """
        removed: list[str] = []
        with (
            self._errors(TEMPORARY),
            suppress(FileNotFoundError),
            self._folder((TEMPORARY,)) as folder,
        ):
            for name in sorted(os.listdir(folder)):
                with suppress(FileNotFoundError):  # removed by its writer meanwhile
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if time.time() - status.st_mtime > older_than_s:
                        os.unlink(name, dir_fd=folder)
                        removed.append(name)
        return removed

    @contextmanager
    def _folder(self, segments: Segments, *, create: bool = False) -> Iterator[int]:
        """The descriptor of a folder below the root; none of the segments is `.` or `..`.

        Args:
            create: make absent folders, with durable names. Each store object syncs each name once,
                since another process that made the folder may have died before it did.

        Raises:
            OSError: ELOOP for a link in the path, with its path as `filename`.
        """
        if create and (() not in self._claimed or not self.root.is_dir()):
            self._claim_root()
        handle = os.open(self.root, _FOLDER)
        try:
            for depth in range(1, len(segments) + 1):
                inner = self._enter(handle, segments[:depth], create=create)
                os.close(handle)
                handle = inner
            yield handle
        finally:
            os.close(handle)

    def _enter(self, above: int, path: Segments, *, create: bool) -> int:
        is_synced = not create or path in self._claimed
        is_new = False
        try:
            inner = enter(above, path[-1])
        except OSError as error:
            if not (create and isinstance(error, FileNotFoundError)):
                error.filename = str(self.root.joinpath(*path))
                raise
            is_synced = False
            with suppress(FileExistsError):
                os.mkdir(path[-1], dir_fd=above)
                is_new = True
            inner = enter(above, path[-1])
        try:
            if is_new:
                share_as(inner, above)
            if not is_synced:
                os.fsync(above)
                self._claimed.add(path)
        except BaseException:
            os.close(inner)
            raise
        return inner

    def _claim_root(self) -> None:
        make_folder(self.root.parent)
        is_new = not self.root.is_dir()
        try:
            claim_folder(self.root)
        except PermissionError:
            if not self.root.is_dir():
                raise
            is_new = False  # the parent cannot be synced, and nothing was written there
        self._claimed.add(())
        if not is_new:
            return
        inner, above = os.open(self.root, _FOLDER), os.open(self.root.parent, _FOLDER)
        try:
            if os.fstat(inner).st_uid == os.geteuid():  # else another user made it meanwhile
                share_as(inner, above)
        finally:
            os.close(inner)
            os.close(above)

    @contextmanager
    def _errors(self, key: str, *, writes: bool = True) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(key, error, writes=writes) from error

    def _failed(self, key: str, error: OSError, *, writes: bool) -> StoreError:
        place = f"{self.url}, {key}"
        if error.errno == errno.ELOOP:
            return UnreadableError(
                f"{place}: {error.filename} is a link, and links are not followed",
                hint="find out who made it and remove it; specctl creates no links",
            )
        if error.errno == errno.EACCES and "/" in str(error.filename):  # not a file in `tmp/`
            return UnreadableError(
                f"{place}: {error.filename} is closed to this user: {error.strerror}",
                hint="let its owner open it: chmod, or the setgid bit (docs/operators.md)",
            )
        word, fix = ("written", TRY_AGAIN) if writes else ("read", READ_AGAIN)
        return StoreError(f"{place}: cannot be {word}: {reason_of(error)}", hint=fix)


def enter(above: int, name: str) -> int:
    """The descriptor of a folder in another one.

    Raises:
        OSError: ELOOP for a link, ENOTDIR for a file, ENOENT where there is nothing.
    """
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    except NotADirectoryError:
        # Linux reports a link like a file.
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def _is_empty(above: int, name: str) -> bool:
    """Whether an entry of a folder is an empty folder, or is gone."""
    try:
        inner = enter(above, name)
    except OSError as error:  # a file, a link, or a closed folder
        return isinstance(error, FileNotFoundError)
    try:
        with os.scandir(inner) as found:
            return next(found, None) is None
    finally:
        os.close(inner)


def _below(folder: int, path: str) -> Iterator[tuple[str, int]]:
    """Path and size of everything below a folder except folders; links are not followed.

    A folder at `MAX_DEPTH` is listed, not entered: each level keeps a descriptor open.

    Args:
        path: of the folder, "" or ending in "/"; the prefix of each returned path.
    """
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        with suppress(FileNotFoundError):  # removed since it was listed
            is_too_deep = path.count("/") >= MAX_DEPTH
            if is_too_deep or not entry.is_dir(follow_symlinks=False):
                yield path + entry.name, entry.stat(follow_symlinks=False).st_size
                continue
            try:
                inner = enter(folder, entry.name)
            except OSError as error:
                error.filename = path + entry.name
                raise
            try:
                yield from _below(inner, f"{path}{entry.name}/")
            finally:
                os.close(inner)


def _read_regular(file: BinaryIO, url: str, key: str, max_bytes: int) -> bytes:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError(
            f"{url}, {key}: not a regular file ({stat.filemode(status.st_mode)})",
            hint="remove it; specctl creates no such files",
        )
    # `read(max_bytes)` would allocate all of it at once.
    data = file.read(min(max_bytes, status.st_size) + 1)
    if len(data) > max_bytes:
        raise too_large(url, key, max_bytes, status.st_size)
    return data
