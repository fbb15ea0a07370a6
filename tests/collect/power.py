"""A power loss after any operation: what is on disk then, as far as a file system promises.

Only two things are promised: the bytes of a file that was synced, and the names in a folder that
was synced. Everything later may have reached the disk or not, in any order; so every subset of the
names that were changed since is a state in which the machine may come up again.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

MAX_SUBSETS = 64


@dataclass(frozen=True)
class Event:
    """kind: bytes, name, gone, folder, synced or ack."""

    kind: str
    path: str = ""
    inode: int = 0
    content: bytes | None = b""


@dataclass
class Recorder:
    """Everything that happened below a folder, in order.

    Args:
        lies: syncs that are not done: `file`, `folder` or none; for mutants.
    """

    root: Path
    lies: str = ""
    events: list[Event] = field(default_factory=list)

    def ack(self, prompt: str) -> None:
        self.events.append(Event("ack", prompt))

    @contextmanager
    def installed(self) -> Iterator[None]:
        calls = {"fsync": self._fsync, "link": self._link, "mkdir": self._mkdir}
        with ExitStack() as patches:
            for name, call in {**calls, "unlink": self._unlink}.items():
                patches.enter_context(patch.object(os, name, self._around(getattr(os, name), call)))
            yield

    def _around(self, real: Callable[..., Any], note: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            note(*args, **kwargs)
            return result

        return call

    def _fsync(self, descriptor: int) -> None:
        path = path_of(descriptor)
        if os.path.isdir(path):
            if self.lies != "folder":
                self.events.append(Event("synced", self._inside(path)))
        elif self.lies != "file":
            content = Path(path).read_bytes()
            self.events.append(Event("bytes", "", os.fstat(descriptor).st_ino, content))

    def _link(
        self,
        source: Any,
        target: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        inode = os.stat(source, dir_fd=src_dir_fd, follow_symlinks=follow_symlinks).st_ino
        self.events.append(Event("name", self._inside(target, dst_dir_fd), inode))

    def _mkdir(self, path: Any, *_: Any, dir_fd: int | None = None) -> None:
        self.events.append(Event("folder", self._inside(path, dir_fd)))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.events.append(Event("gone", self._inside(path, dir_fd)))

    def _inside(self, path: Any, dir_fd: int | None = None) -> str:
        above = os.getcwd() if dir_fd is None else path_of(dir_fd)
        return os.path.relpath(os.path.join(above, path), self.root)


def path_of(descriptor: int) -> str:
    """Where an open file or folder is."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


@dataclass(frozen=True)
class State:
    """What may be on disk: acked prompts, folders, and the bytes of every name."""

    acked: frozenset[str]
    folders: frozenset[str]
    files: dict[str, bytes]

    def write(self, root: Path) -> None:
        root.mkdir(parents=True)
        for folder in sorted(self.folders):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            if (root / name).parent.is_dir():  # else its folder's own name is lost
                (root / name).write_bytes(content)


def states(events: list[Event]) -> Iterator[State]:
    """Every state after every event; of many pending names, `MAX_SUBSETS` subsets."""
    for end in range(len(events) + 1):
        yield from _states_at(events[:end])


def _states_at(events: list[Event]) -> Iterator[State]:
    content = {event.inode: event.content or b"" for event in events if event.kind == "bytes"}
    acked = frozenset(event.path for event in events if event.kind == "ack")
    sure, pending = _names(events)
    subsets = itertools.chain.from_iterable(
        itertools.combinations(pending, size) for size in range(len(pending) + 1)
    )
    for subset in itertools.islice(subsets, MAX_SUBSETS):
        chosen = set(map(id, (*sure, *subset)))
        files: dict[str, bytes] = {}
        folders = set()
        for event in (event for event in events if id(event) in chosen):
            if event.kind == "folder":
                folders.add(event.path)
            elif event.kind == "name":
                files[event.path] = content.get(event.inode, b"")  # never synced: nothing of it
            else:
                files.pop(event.path, None)
        reachable = {folder for folder in folders if _is_reachable(folder, folders)}
        yield State(acked, frozenset(reachable), files)


def _names(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """Changes of names that are on disk, and those that may be."""
    sure: list[Event] = []
    pending: list[Event] = []
    for event in events:
        if event.kind in ("name", "gone", "folder"):
            pending.append(event)
        elif event.kind == "synced":
            done = [one for one in pending if (os.path.dirname(one.path) or ".") == event.path]
            sure += done
            pending = [one for one in pending if one not in done]
    return sure, pending


def _is_reachable(folder: str, folders: set[str]) -> bool:
    above = os.path.dirname(folder)
    return not above or (above in folders and _is_reachable(above, folders))
