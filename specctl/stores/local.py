"""A folder as a store. POSIX: `link` is the exclusive creation, also between many processes."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specctl.durable import (
    claim_folder,
    make_folder,
    publish_link,
    sync_file,
    sync_folder,
    write_new,
)
from specctl.errors import StoreError
from specctl.stores.interface import KeyTakenError, StoredObject, absent, taken, too_large
from specctl.stores.keys import check_key

TEMPORARY = "tmp"
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LocalStore:
    """Objects as files below a folder, which is created with the first object.

    Args:
        root: the folder; `tmp/` in it holds unfinished files, which are never read.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self._claimed: set[Path] = set()

    def put_new(self, key: str, data: bytes) -> None:
        """See `ObjectStore`. A file has its name only when its bytes are on disk."""
        final = self.root / check_key(key)
        temporary = self.root / TEMPORARY / secrets.token_hex(16)
        with _store_errors(self.url, key):
            make_folder(temporary.parent)
            self._claim(final.parent)
            try:
                write_new(temporary, data)
                publish_link(temporary, final)
            except FileExistsError:
                raise _taken_for_good(self.url, key, final) from None
            finally:
                temporary.unlink(missing_ok=True)

    def _claim(self, folder: Path) -> None:
        """Makes a folder's own name survive, and all names up to the root, whoever made them."""
        if folder in self._claimed and folder.is_dir():
            return
        if folder == self.root:
            _claim_root(folder)
        else:
            self._claim(folder.parent)
            claim_folder(folder)
        self._claimed.add(folder)

    def put_file(self, key: str, path: Path) -> None:
        """See `ObjectStore`. The file must be on the folder's file system."""
        final = self.root / check_key(key)
        with _store_errors(self.url, key):
            self._claim(final.parent)
            sync_file(path)
            try:
                publish_link(path, final)
            except FileExistsError:
                raise _taken_for_good(self.url, key, final) from None

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore`. Links and devices are refused."""
        try:
            handle = os.open(self.root / check_key(key), _READ_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            raise absent(self.url, key) from None
        except OSError as error:
            raise _failed(self.url, key, error) from None
        with os.fdopen(handle, "rb") as file:
            return _read_regular(file, self.url, key, max_bytes)

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """See `ObjectStore`."""
        folder = self.root / check_key(prefix.rstrip("/")) if prefix else self.root
        for path in sorted(_files_below(folder)):
            key = path.relative_to(self.root).as_posix()
            if key.split("/", 1)[0] == TEMPORARY:
                continue
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue  # removed since it was listed
            yield StoredObject(key, status.st_size, status.st_mtime)

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        with _store_errors(self.url, key):
            (self.root / check_key(key)).unlink(missing_ok=True)

    def clear_temporary(self, older_than_s: float) -> list[str]:
        """Removes unfinished files of writers that died; returns their names.

        Args:
            older_than_s: age below which a writer may still be alive, seconds.
        """
        import time

        removed, folder = [], self.root / TEMPORARY
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            with suppress(FileNotFoundError):  # its writer lives, and has just removed it
                if time.time() - path.lstat().st_mtime > older_than_s:
                    path.unlink()
                    removed.append(path.name)
        return removed


def _claim_root(root: Path) -> None:
    make_folder(root.parent)
    try:
        claim_folder(root)
    except PermissionError:
        if not root.is_dir():
            raise
        # A folder that we may not read we cannot sync; nor did we make this root in it.


def _read_regular(file: object, url: str, key: str, max_bytes: int) -> bytes:
    status = os.fstat(file.fileno())  # type: ignore[attr-defined]
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(
            f"{url}, {key}",
            expected="a regular file",
            found=stat.filemode(status.st_mode),
            fix="remove it; nothing of ours creates such files",
        )
    data: bytes = file.read(max_bytes + 1)  # type: ignore[attr-defined]
    if len(data) > max_bytes:
        raise too_large(url, key, max_bytes, status.st_size)
    return data


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent) / name


@contextmanager
def _store_errors(url: str, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _failed(url, key, error) from error


def _failed(url: str, key: str, error: OSError) -> StoreError:
    return StoreError(
        f"{url}, {key}",
        expected="a folder that can be read and written",
        found=error.strerror or type(error).__name__,
        fix="free space or correct permissions, then try again",
    )


def _taken_for_good(url: str, key: str, path: Path) -> KeyTakenError:
    """The error of a taken key, once its name survives a power loss.

    Whoever finds their own bytes there counts them as stored; the one who linked the name may have
    died, or failed, before the folder was synced.
    """
    sync_folder(path.parent)
    return taken(url, key)
