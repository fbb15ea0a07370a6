"""Where a loop's next policy comes from while it decodes: a folder, or an alias of a registry.

A watch finds, loads and checks; `poll`, between two rounds, only takes over what is ready. Used as
a context manager it looks in a thread of its own, so no round waits for a disk, a network or the
first load of an artifact; without one, `poll` looks by itself. What cannot be loaded is told once,
and the loop keeps what it has.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from specctl.artifacts.compatibility import Expected
from specctl.artifacts.registry.names import Reference
from specctl.artifacts.registry.pulling import Reader, pull
from specctl.artifacts.registry.room import Registry
from specctl.errors import SpecctlError
from specctl.policy import Policy
from specctl.runtime.policy_spec import resolve_policy

if TYPE_CHECKING:
    from specctl.runtime.decode import DecodeLoop

log = logging.getLogger("specctl.policy")
INTERVAL_S = 5.0
"""Between two looks of the thread, seconds."""


@dataclass(frozen=True)
class Found:
    """A policy that passed every check, and the artifact that it is."""

    digest: str | None
    policy: Policy


class Watch(ABC):
    """What both kinds share.

    Args:
        name: of the source, in messages.
        interval_s: seconds between two looks of the thread.

    Attributes:
        last_error: why the newest version was not taken over; None once one was.
        digest: of the artifact that was taken over last; None before the first.
    """

    def __init__(self, name: str, *, interval_s: float = INTERVAL_S) -> None:
        self.name, self.interval_s = name, interval_s
        self.last_error: SpecctlError | None = None
        self.digest: str | None = None
        self._ready: Found | None = None
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def find(self) -> Found | None:
        """The newest version; None where nothing is new.

        Raises:
            SpecctlError: it must not be loaded.
        """

    def look(self) -> None:
        """Finds once, for the next `poll`."""
        try:
            found = self.find()
        except SpecctlError as error:
            self._refuse(error)
            return
        if found is not None:
            with self._lock:
                self._ready = found

    def poll(self, loop: DecodeLoop) -> bool:
        """Takes over what is ready; whether another policy decides from now on."""
        if self._thread is None:
            self.look()
        with self._lock:
            found, self._ready = self._ready, None
        if found is None:
            return False
        if found.digest is not None and found.digest == self.digest:
            self.last_error = None
            return False
        return self._take(found, loop)

    def _take(self, found: Found, loop: DecodeLoop) -> bool:
        try:
            loop.reload(found.policy)
        except SpecctlError as error:
            self._refuse(error)
            return False
        self.digest, self.last_error = found.digest, None
        log.info("policy reloaded: %s %s", self.name, found.digest)
        return True

    def _refuse(self, error: SpecctlError) -> None:
        known = str(self.last_error) == str(error)
        self.last_error = error
        if not known:
            log.warning("policy %s not reloaded, the old one stays: %s", self.name, error)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except Exception:  # a thread that ended in silence would freeze the policy for good
                log.exception("looking at %s failed, the old policy stays", self.name)
            self._stop.wait(self.interval_s)

    def __enter__(self) -> Self:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="specctl-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops it; a look that is under way is waited for."""
        assert self._thread is not None
        self._stop.set()
        self._thread.join()


class PolicyWatch(Watch):
    """An artifact folder that may be replaced while a loop runs.

    Args:
        folder: there or not, for now.
        pair: what the loop runs; artifacts of others are refused.
    """

    def __init__(self, folder: Path, pair: Expected, *, interval_s: float = INTERVAL_S) -> None:
        super().__init__(str(folder), interval_s=interval_s)
        self.folder, self.pair = folder, pair
        self._seen = self._stamp()

    def find(self) -> Found | None:
        """See `Watch`: loads when a file changed."""
        stamp = self._stamp()
        if not stamp or stamp == self._seen:
            return None
        self._seen = stamp
        # Whether a lossy policy may take over is the loop's to judge.
        found = resolve_policy(str(self.folder), self.pair, allow_lossy=True)
        return Found(found.artifact_digest, found.policy)

    def _stamp(self) -> tuple[tuple[str, int, int], ...]:
        """Names, times and sizes of the files: a copy that is not finished is tried again."""
        try:
            files = [(path.name, path.stat()) for path in sorted(self.folder.iterdir())]
        except OSError:
            return ()
        return tuple((name, found.st_mtime_ns, found.st_size) for name, found in files)


class AliasWatch(Watch):
    """An alias of a registry. Moves between two looks are skipped: the newest counts.

    Args:
        reference: `NAME@ALIAS`.
        pair: what the loop runs; artifacts of others are refused.
    """

    def __init__(
        self,
        registry: Registry,
        reference: Reference,
        reader: Reader,
        pair: Expected,
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        super().__init__(str(reference), interval_s=interval_s)
        self.registry, self.reference, self.reader, self.pair = registry, reference, reader, pair

    def find(self) -> Found | None:
        """See `Watch`: resolves, pulls and checks anew each time, so an expiry is noticed too."""
        artifact = pull(self.registry, self.reference, self.reader, expect=self.pair).artifact
        return Found(artifact.digest, artifact.policy)
