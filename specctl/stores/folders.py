"""Folders below a root, entered one segment at a time: no link on the way is ever followed.

Whoever may write to a shared folder may put a link there. Were it followed, what is deleted or
created by one user, garbage collection for one, would be chosen by another. The root is the
user's own word, so a link may lead to it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specctl.durable import claim_folder, make_folder, share_as

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
Segments = tuple[str, ...]
MAX_DEPTH = 32
"""Segments of a path; nothing of ours has more than a handful."""


class Folders:
    """The folders below a root.

    All methods raise `OSError`; its number is ELOOP for a link in the way, and its `filename` says
    where.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._claimed: set[Segments] = set()

    @contextmanager
    def entered(self, segments: Segments) -> Iterator[int]:
        """The descriptor of a folder that is there; none of the segments is `.` or `..`."""
        handle = self._walk(segments, lambda above, path: self._enter(above, path))
        try:
            yield handle
        finally:
            os.close(handle)

    @contextmanager
    def claimed(self, segments: Segments) -> Iterator[int]:
        """The same, made where it is absent; its name and those above it survive a power loss.

        Each name is synced once for each of these objects, whoever made the folder: that one may
        have died, or failed, before the name was on disk.
        """
        if () not in self._claimed or not self.root.is_dir():
            _claim_root(self.root)
            self._claimed.add(())
        handle = self._walk(segments, self._claim)
        try:
            yield handle
        finally:
            os.close(handle)

    def _walk(self, segments: Segments, step: Callable[[int, Segments], int]) -> int:
        handle = os.open(self.root, _FOLDER)
        for depth in range(1, len(segments) + 1):
            try:
                inner = step(handle, segments[:depth])
            finally:
                os.close(handle)
            handle = inner
        return handle

    def _enter(self, above: int, path: Segments) -> int:
        try:
            return enter(above, path[-1])
        except OSError as error:
            error.filename = str(self.root.joinpath(*path))
            raise

    def _claim(self, above: int, path: Segments) -> int:
        is_synced = path in self._claimed
        try:
            inner = self._enter(above, path)
        except FileNotFoundError:
            is_synced = False
            inner = self._made(above, path)
        try:
            if not is_synced:
                os.fsync(above)
                self._claimed.add(path)
        except BaseException:
            os.close(inner)
            raise
        return inner

    def _made(self, above: int, path: Segments) -> int:
        is_ours = False
        with suppress(FileExistsError):
            os.mkdir(path[-1], dir_fd=above)
            is_ours = True
        inner = self._enter(above, path)
        if is_ours:
            share_as(inner, above)
        return inner


def enter(above: int, name: str) -> int:
    """The descriptor of a folder in another one.

    Raises:
        OSError: ELOOP for a link, ENOTDIR for a file, ENOENT where there is nothing.
    """
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    except NotADirectoryError:
        # Of a link, Linux says the same as of a file.
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def is_empty(above: int, name: str) -> bool:
    """Whether something in a folder is one that has nothing in it, or is gone."""
    try:
        inner = enter(above, name)
    except OSError as error:  # a file, a link, or closed to us: something is there
        return isinstance(error, FileNotFoundError)
    try:
        with os.scandir(inner) as found:
            return next(found, None) is None
    finally:
        os.close(inner)


def below(folder: int, path: str) -> Iterator[tuple[str, os.stat_result]]:
    """All that is below a folder and is none itself, by path; a link is listed, not followed.

    A folder at `MAX_DEPTH` is listed and not entered, too: each level holds one more folder open.

    Args:
        path: of the folder, "" or ending in "/"; each path that is returned begins with it.
    """
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        with suppress(FileNotFoundError):  # removed since it was listed
            is_too_deep = path.count("/") >= MAX_DEPTH
            if is_too_deep or not entry.is_dir(follow_symlinks=False):
                yield path + entry.name, entry.stat(follow_symlinks=False)
                continue
            inner = _entered(folder, entry.name, path)
            try:
                yield from below(inner, f"{path}{entry.name}/")
            finally:
                os.close(inner)


def _entered(above: int, name: str, path: str) -> int:
    try:
        return enter(above, name)
    except OSError as error:
        error.filename = path + name
        raise


def _claim_root(root: Path) -> None:
    make_folder(root.parent)
    is_new = not root.is_dir()
    try:
        claim_folder(root)
    except PermissionError:
        if not root.is_dir():
            raise
        # A folder that we may not read we cannot sync; nor did we make this root in it.
        return
    if is_new:
        _share_root(root)


def _share_root(root: Path) -> None:
    inner, above = os.open(root, _FOLDER), os.open(root.parent, _FOLDER)
    try:
        if os.fstat(inner).st_uid == os.geteuid():  # another was faster, and shares it itself
            share_as(inner, above)
    finally:
        os.close(inner)
        os.close(above)
