"""Where a loop's next policy comes from while it decodes: a folder, or an alias of a registry.

A watch finds, loads and checks; `poll`, between two rounds, only takes over what is ready. Used as
a context manager it looks in a thread of its own, so no round waits for a disk, a network or the
first load of an artifact; without one, `poll` looks by itself. What cannot be loaded is told once,
and the loop keeps what it has. A verdict on an artifact's bytes is final: it is looked at again
when it has changed. What may pass, a store that is away or a child that was killed, is tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from specctl.artifacts.compatibility import Expected
from specctl.artifacts.loading import load_artifact
from specctl.artifacts.registry.names import Reference
from specctl.artifacts.registry.pulling import Reader, pull_resolved
from specctl.artifacts.registry.resolving import Resolved, resolve
from specctl.artifacts.registry.room import Registry
from specctl.errors import ArtifactError, SpecctlError, UsageError
from specctl.policy import Policy
from specctl.policy.build import check_costs

if TYPE_CHECKING:
    from specctl.runtime.decode import DecodeLoop

log = logging.getLogger("specctl.policy")
INTERVAL_S = 5.0
"""Between two looks of the thread, seconds."""
JOIN_LIMIT_S = 10.0
"""How long the end of a watch waits for a look that is under way; the thread is a daemon."""
MAX_BACKOFF = 6
"""Doublings of the wait before a failure that may pass is tried again: at most 64 intervals."""
PASSING = frozenset({"E_COST", "E_ONNX_LOAD", "E_MISSING", "E_DIGEST", "E_SIZE", "E_FILETYPE"})
"""Refusals that the machine, or a copy that is not finished, may be the reason of."""


def is_settled(error: Exception) -> bool:
    """Whether a refusal is of the artifact's own bytes, and so will be the same again."""
    if isinstance(error, ArtifactError):
        return error.code not in PASSING
    return isinstance(error, SpecctlError) and error.exit_code == UsageError.exit_code


Stamp = tuple[tuple[str, int, int], ...]


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
        num_failures: looks and reloads that failed.
        digest: of the artifact that was taken over last; None before the first.
    """

    def __init__(self, name: str, *, interval_s: float = INTERVAL_S) -> None:
        self.name, self.interval_s = name, interval_s
        self.last_error: Exception | None = None
        self.num_failures = 0
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
        except Exception as error:  # whatever it is, requests go on under the old policy
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
        except Exception as error:  # e.g. no memory on the device: the loop is as it was
            self._refuse(error)
            return False
        self.digest, self.last_error = found.digest, None
        log.info("policy reloaded: %s %s", self.name, found.digest)
        return True

    def _refuse(self, error: Exception) -> None:
        """Keeps the old policy, and nothing of what an earlier look had found."""
        known = str(self.last_error) == str(error)
        with self._lock:
            self._ready = None
        self.last_error = error
        self.num_failures += 1
        if not known:
            trace = None if isinstance(error, SpecctlError) else error
            log.warning(
                "policy %s not reloaded, the old one stays: %s", self.name, error, exc_info=trace
            )

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
        """Stops it; a look that is under way is waited for, but not for ever."""
        assert self._thread is not None
        self._stop.set()
        self._thread.join(JOIN_LIMIT_S)
        if self._thread.is_alive():
            log.warning("a look at %s did not end in %g s; left to itself", self.name, JOIN_LIMIT_S)


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
        self._retries, self._not_before_s = 0, 0.0

    def find(self) -> Found | None:
        """See `Watch`: loads when a file changed, and again while a failure may pass."""
        stamp = self._stamp()
        if not stamp or stamp == self._seen or time.monotonic() < self._not_before_s:
            return None
        try:
            artifact = load_artifact(self.folder, expect=self.pair)
            # Whether a lossy policy may take over is the loop's to judge.
            check_costs(artifact.policy.budget)
        except Exception as error:
            self._put_off(None if is_settled(error) else stamp, stamp)
            raise
        self._put_off(None, stamp)
        return Found(artifact.digest, artifact.policy)

    def _put_off(self, retried: Stamp | None, stamp: Stamp) -> None:
        """Notes a verdict on the files, or when they are to be tried again: a bad one that takes
        long must not be paid for at every round."""
        if retried is None:
            self._seen, self._retries, self._not_before_s = stamp, 0, 0.0
            return
        wait_s = self.interval_s * 2 ** min(self._retries, MAX_BACKOFF)
        self._retries, self._not_before_s = self._retries + 1, time.monotonic() + wait_s

    def _stamp(self) -> Stamp:
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
        self._found: Found | None = None
        self._refused: tuple[str, Exception] | None = None

    def find(self) -> Found | None:
        """See `Watch`: resolves anew each time, so that an expiry or a revocation is noticed.

        What an alias points to is named by its digest, so it is loaded once, and refused once.
        """
        resolved = resolve(self.registry, self.reference, self.reader.trust, self.reader.floors)
        if self._refused is not None and self._refused[0] == resolved.digest:
            raise self._refused[1]
        if self._found is not None and self._found.digest == resolved.digest:
            resolved.check_signatures()
            resolved.confirm(self.reader.floors)
            return self._found
        self._found = self._load(resolved)
        return self._found

    def _load(self, resolved: Resolved) -> Found:
        resolved.check_signatures()  # a verdict that is not of the bytes: it may be another later
        try:
            artifact = pull_resolved(resolved, self.reader, expect=self.pair).artifact
        except Exception as error:
            self._refused = (resolved.digest, error) if is_settled(error) else None
            raise
        self._refused = None
        return Found(artifact.digest, artifact.policy)
