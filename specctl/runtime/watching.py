"""Where a loop's next policy comes from while it decodes: a folder, or an alias of a registry.

Both keep what the loop has when the new one cannot be loaded, say why once, and take over between
two rounds.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from specctl.artifacts.compatibility import Expected
from specctl.artifacts.registry.names import Reference
from specctl.artifacts.registry.pulling import Pulled, Reader, pull
from specctl.artifacts.registry.room import Registry
from specctl.errors import SpecctlError
from specctl.runtime.policy_spec import resolve_policy

if TYPE_CHECKING:
    from specctl.runtime.decode import DecodeLoop

log = logging.getLogger("specctl.policy")
INTERVAL_S = 5.0
"""Between two looks at an alias, seconds."""


class PolicyWatch:
    """An artifact folder that may be replaced while a loop runs; `poll` between its rounds.

    Attributes:
        last_error: why the newest files were not loaded; None once a load succeeded.
    """

    def __init__(self, folder: Path, pair: Expected) -> None:
        self.folder, self.pair = folder, pair
        self.last_error: SpecctlError | None = None
        self._seen = self._stamp()

    def poll(self, loop: DecodeLoop) -> bool:
        """Reloads if a file changed; whether another policy decides from now on."""
        stamp = self._stamp()
        if not stamp or stamp == self._seen:
            return False
        self._seen = stamp
        try:
            found = resolve_policy(
                str(self.folder), self.pair, allow_lossy=not loop.policy.lossless
            )
            loop.reload(found.policy)
        except SpecctlError as error:
            self.last_error = error
            log.warning("policy %s not reloaded, the old one stays: %s", self.folder, error)
            return False
        self.last_error = None
        log.info("policy reloaded: %s %s", self.folder, found.artifact_digest)
        return True

    def _stamp(self) -> tuple[tuple[str, int, int], ...]:
        """Names, times and sizes of the files: a copy that is not finished is tried again."""
        try:
            files = [(path.name, path.stat()) for path in sorted(self.folder.iterdir())]
        except OSError:
            return ()
        return tuple((name, found.st_mtime_ns, found.st_size) for name, found in files)


class AliasWatch:
    """An alias of a registry, followed while a loop runs.

    A thread asks the registry, pulls and checks; `poll`, between two rounds, only takes over what
    is ready, so no round waits for a network or a disk. What it takes over is the newest artifact
    that passed: moves in between are skipped.

    Args:
        reference: `NAME@ALIAS`.
        pair: the pair that the loop runs; artifacts of others are refused.
        interval_s: seconds between two looks.

    Attributes:
        last_error: why the newest version was not taken over; None once one was.
        digest: of the artifact that was taken over last; None before the first.
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
        self.registry, self.reference, self.reader, self.pair = registry, reference, reader, pair
        self.interval_s = interval_s
        self.last_error: SpecctlError | None = None
        self.digest: str | None = None
        self._found: Pulled | None = None
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="specctl-alias", daemon=True)

    def look(self) -> None:
        """Asks the registry once; for the thread, or for who wants no thread."""
        try:
            found = pull(self.registry, self.reference, self.reader, expect=self.pair)
        except SpecctlError as error:
            self._refuse(error)
            return
        with self._lock:
            self._found = found

    def poll(self, loop: DecodeLoop) -> bool:
        """Takes over what is ready; whether another policy decides from now on."""
        with self._lock:
            found, self._found = self._found, None
        if found is None:
            return False
        digest = found.artifact.digest
        if digest == self.digest:
            self.last_error = None
            return False
        try:
            loop.reload(found.artifact.policy)
        except SpecctlError as error:
            self._refuse(error)
            return False
        self.digest, self.last_error = digest, None
        log.info("policy reloaded: %s %s", self.reference, digest)
        return True

    def _refuse(self, error: SpecctlError) -> None:
        known = str(self.last_error) == str(error)
        self.last_error = error
        if not known:
            log.warning("policy %s not reloaded, the old one stays: %s", self.reference, error)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except Exception:  # a thread that ended in silence would freeze the policy for good
                log.exception("looking at %s failed, the old policy stays", self.reference)
            self._stop.wait(self.interval_s)

    def __enter__(self) -> Self:
        """Starts the thread."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops it; a look that is under way is waited for."""
        self._stop.set()
        self._thread.join()
