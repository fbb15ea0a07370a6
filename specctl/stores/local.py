"""A folder as a store. POSIX: `link` is the exclusive creation, also between many processes."""

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

from specctl.durable import READ_AGAIN, TRY_AGAIN, open_unfollowed, sync_file, write_new
from specctl.errors import StoreError
from specctl.stores.folders import Folders, Segments, below, is_empty
from specctl.stores.interface import StoredObject, UnreadableError, absent, taken, too_large
from specctl.stores.keys import check_key

TEMPORARY = "tmp"


class LocalStore:
    """Objects as files below a folder, which is created with the first object.

    No link below the root is followed, neither to read nor to write nor to delete.

    Args:
        root: the folder; `tmp/` in it holds unfinished files, which are never read.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self._folders = Folders(self.root)

    def put_new(self, key: str, data: bytes) -> None:
        """See `ObjectStore`. A file has its name only when its bytes are on disk."""
        check_key(key)
        temporary = secrets.token_hex(16)
        with (
            _store_errors(self.url, key),
            self._folders.claimed((TEMPORARY,)) as staging,
        ):
            try:
                write_new(Path(temporary), data, dir_fd=staging)
                self._link(temporary, key, staging)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=staging)

    def put_file(self, key: str, path: Path) -> None:
        """See `ObjectStore`. The file must be on the folder's file system."""
        check_key(key)
        with _store_errors(self.url, key):
            sync_file(path)
            self._link(path, key, None)

    def _link(self, source: Path | str, key: str, source_folder: int | None) -> None:
        """Gives a synced file a key, which must be free, and syncs the folder."""
        segments, name = _split(key)
        with self._folders.claimed(segments) as folder:
            try:
                os.link(
                    source,
                    name,
                    src_dir_fd=source_folder,
                    dst_dir_fd=folder,
                    follow_symlinks=False,
                )
            except FileExistsError:
                # Whoever finds their own bytes there counts them as stored; the one who linked
                # the name may have died, or failed, before the folder was synced.
                os.fsync(folder)
                raise taken(self.url, key) from None
            os.fsync(folder)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore`. Links and devices are refused."""
        segments, name = _split(check_key(key))
        try:
            with self._folders.entered(segments) as folder:
                handle = self._opened(folder, name, key)
            with os.fdopen(handle, "rb") as file:
                return _read_regular(file, self.url, key, max_bytes)
        except (FileNotFoundError, NotADirectoryError):
            raise absent(self.url, key) from None
        except OSError as error:
            raise _failed(self.url, key, error, writes=False) from None

    def _opened(self, folder: int, name: str, key: str) -> int:
        try:
            return open_unfollowed(name, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EACCES, errno.ENXIO):
                raise
            error.filename = str(self.root / key)
            failed = _failed(self.url, key, error, writes=False)
            raise UnreadableError(
                failed.what, expected=failed.expected, found=failed.found, fix=failed.fix
            ) from None

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """See `ObjectStore`. A link is listed as an object, which cannot be read."""
        segments = tuple(check_key(prefix.rstrip("/")).split("/")) if prefix else ()
        found: list[StoredObject] = []
        with (
            _store_errors(self.url, prefix, writes=False),
            suppress(FileNotFoundError, NotADirectoryError),
            self._folders.entered(segments) as folder,
        ):
            path = "".join(f"{segment}/" for segment in segments)
            found = [
                StoredObject(key, status.st_size, status.st_mtime)
                for key, status in below(folder, path)
                if not key.startswith(f"{TEMPORARY}/")
            ]
        yield from sorted(found, key=lambda one: one.key)

    def children(self, prefix: str) -> list[str]:
        """See `ObjectStore`. A folder may be empty where its maker died."""
        segments = tuple(check_key(prefix).split("/")) if prefix else ()
        with (
            _store_errors(self.url, prefix, writes=False),
            suppress(FileNotFoundError, NotADirectoryError),
            self._folders.entered(segments) as folder,
        ):
            return sorted(name for name in os.listdir(folder) if not is_empty(folder, name))
        return []

    def top(self) -> list[str]:
        """Names in the root, of folders too, sorted; for those who check everything."""
        with (
            _store_errors(self.url, "", writes=False),
            suppress(FileNotFoundError),
            self._folders.entered(()) as folder,
        ):
            return sorted(os.listdir(folder))
        return []

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        segments, name = _split(check_key(key))
        with (
            _store_errors(self.url, key),
            suppress(FileNotFoundError),
            self._folders.entered(segments) as folder,
        ):
            os.unlink(name, dir_fd=folder)

    def clear_temporary(self, older_than_s: float) -> list[str]:
        """Removes unfinished files of writers that died; returns their names.

        Args:
            older_than_s: age below which a writer may still be alive, seconds.
        """
        removed: list[str] = []
        with (
            _store_errors(self.url, TEMPORARY),
            suppress(FileNotFoundError),
            self._folders.entered((TEMPORARY,)) as folder,
        ):
            for name in sorted(os.listdir(folder)):
                with suppress(FileNotFoundError):  # its writer lives, and has just removed it
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if time.time() - status.st_mtime > older_than_s:
                        os.unlink(name, dir_fd=folder)
                        removed.append(name)
        return removed


def _split(key: str) -> tuple[Segments, str]:
    *segments, name = key.split("/")
    return tuple(segments), name


def _read_regular(file: BinaryIO, url: str, key: str, max_bytes: int) -> bytes:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError(
            f"{url}, {key}",
            expected="a regular file",
            found=stat.filemode(status.st_mode),
            fix="remove it; nothing of ours creates such files",
        )
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise too_large(url, key, max_bytes, status.st_size)
    return data


@contextmanager
def _store_errors(url: str, key: str, *, writes: bool = True) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _failed(url, key, error, writes=writes) from error


def _failed(url: str, key: str, error: OSError, *, writes: bool) -> StoreError:
    if error.errno == errno.ELOOP:
        return UnreadableError(
            f"{url}, {key}",
            expected="plain files and folders, none of them a link",
            found=f"the link {error.filename}",
            fix="find out who made it and remove it; nothing of ours creates links",
        )
    if error.errno == errno.EACCES and "/" in str(error.filename):  # else an unfinished file
        return UnreadableError(
            f"{url}, {key}",
            expected="files and folders that are open to all who use them",
            found=f"{error.strerror}, {error.filename}",
            fix="let its owner open it: chmod, or the setgid bit (docs/operators.md)",
        )
    return StoreError(
        f"{url}, {key}",
        expected=f"a folder that can be {'written' if writes else 'read'}",
        found=error.strerror or type(error).__name__,
        fix=TRY_AGAIN if writes else READ_AGAIN,
    )
