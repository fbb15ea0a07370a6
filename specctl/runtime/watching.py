"""A loop whose policy follows a folder, or an alias of a registry, while it decodes.

    with decoder.follow("team/NAME@prod", loop) as watch:
        while loop.busy:
            watch.poll()  # between two rounds
            loop.step()

A watch finds, loads and checks; `poll` only takes over what is ready. In a `with` block it looks
in a thread of its own, so no round waits for a disk, a network or the first load of an artifact;
outside of one `poll` looks by itself. What cannot be loaded or taken over is told once, and the
loop keeps what it has. A verdict on an artifact's bytes is final. What may pass, a store that is
away, a child that was killed or a device without memory, is tried again, ever less often.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import traceback
from collections.abc import Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from specctl.errors import SpecctlError, UsageError
from specctl.policy import Policy, check_costs
from specctl.runtime.refusals import Refusal, refusal_of
from specctl.runtime.sources import Source, Version

if TYPE_CHECKING:
    from specctl.runtime.decode import DecodeLoop

log = logging.getLogger("specctl.policy")
INTERVAL_S = 5.0
"""Between two looks of the thread, seconds."""
JOIN_LIMIT_S = 10.0
"""How long the end of a watch waits for a look that is under way; the thread is a daemon."""


@dataclass(frozen=True)
class Found:
    """A policy that passed every check.

    Attributes:
        key: of the version that it is; see `Version`.
        digest: of the artifact.
    """

    key: Hashable
    digest: str
    policy: Policy


class Watch:
    """Has a loop's policy follow a source; one loop, from the thread that decodes.

    The first look takes over what is there, unless the loop plays it already.

    Args:
        interval_s: seconds between two looks of the thread.

    Attributes:
        last_error: why the newest version was not taken over; None once one was.
        num_failures: looks, loads and reloads that failed; a refusal that stands is one.
        digest: of the artifact that the loop was found or made to play last; None before.
    """

    def __init__(self, source: Source, loop: DecodeLoop, *, interval_s: float = INTERVAL_S) -> None:
        self.source, self.loop, self.interval_s = source, loop, interval_s
        self.last_error: Exception | None = None
        self.num_failures = 0
        self.digest: str | None = None
        self._ready: Found | None = None
        self._loaded: Found | None = None
        self._refusal: Refusal | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def poll(self) -> bool:
        """Takes over what is ready, between two rounds.

        Returns:
            Whether another policy decides from now on.
        """
        if self._thread is None or not self._thread.is_alive():
            self.look()
        with self._lock:
            found, self._ready = self._ready, None
            before = self.last_error
        if found is None:
            return False
        is_new = found.digest != self.digest and found.policy != self.loop.policy
        if is_new and not self._reload(found):
            return False
        self._settle(found, before)
        return is_new

    def _reload(self, found: Found) -> bool:
        try:
            self.loop.reload(found.policy)
        except Exception as error:  # e.g. no memory on the device: the loop is as it was
            self._refuse(self._refusal_of(found.key, error))
            return False
        log.info("policy reloaded: %s %s", self.source, found.digest)
        return True

    def _settle(self, found: Found, before: Exception | None) -> None:
        """Notes what the loop plays; what a look has refused meanwhile stays."""
        with self._lock:
            self.digest = found.digest
            if self.last_error is before:
                self.last_error = None
            if self._refusal is not None and self._refusal.key == found.key:
                self._refusal = None

    def look(self) -> None:
        """Finds once, for the next `poll`; for who would rather look than have a thread do it."""
        self._look(threading.Event())

    def _look(self, stop: threading.Event) -> None:
        outcome = self._find()
        if stop.is_set():
            return  # it took longer than the watch: another look may have found more since
        if isinstance(outcome, Refusal):
            self._refuse(outcome)
            return
        with self._lock:
            self._ready = outcome

    def _find(self) -> Found | Refusal | None:
        key: Hashable = None
        try:
            version = self.source.newest()
            if version is None:
                return None
            known = self._known(version)
            key = version.key  # from here on a failure is this version's
            return self._standing(key) or known or self._load(version)
        except Exception as error:  # whatever it is, requests go on under the old policy
            return self._refusal_of(key, error)

    def _standing(self, key: Hashable) -> Refusal | None:
        """Why a version is not tried now."""
        refusal = self._refusal
        stands = refusal is not None and refusal.stands(key, time.monotonic())
        return refusal if stands else None

    def _refusal_of(self, key: Hashable, error: Exception) -> Refusal:
        return refusal_of(key, error, self._refusal, self.interval_s, time.monotonic())

    def _known(self, version: Version) -> Found | None:
        """What was loaded last, if it still is what there is: nothing is loaded twice."""
        if self._loaded is None or self._loaded.key != version.key:
            return None
        return self._loaded

    def _load(self, version: Version) -> Found:
        artifact = version.load()
        # Whether a lossy policy may take over is the loop's to judge.
        check_costs(artifact.policy.budget)
        self._loaded = Found(version.key, artifact.digest, artifact.policy)
        return self._loaded

    def _refuse(self, refusal: Refusal) -> None:
        """Keeps the old policy, and nothing of what an earlier look had found."""
        error = refusal.error
        with self._lock:
            stood, is_told = refusal is self._refusal, str(self.last_error) == str(error)
            self._ready, self.last_error = None, error
            if stood:
                return
            self.num_failures += 1
            if refusal.key is not None:
                self._refusal = refusal
        if not is_told:
            self._tell(error)
        _let_go(error)

    def _tell(self, error: Exception) -> None:
        trace = None if isinstance(error, SpecctlError) else error
        text = "policy %s not reloaded, the old one stays: %s"
        log.warning(text, self.source, error, exc_info=trace)

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._look(stop)
            stop.wait(self.interval_s)

    def __enter__(self) -> Self:
        """Starts the thread.

        Raises:
            UsageError: it runs already.
        """
        if self._thread is not None:
            raise UsageError(
                f"watch of {self.source}",
                expected="one `with` block at a time",
                found="another one, not left yet",
                fix="poll in that one, or make a watch for each loop",
            )
        self._stop = threading.Event()  # its own: an earlier thread that hangs stays stopped
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name="specctl-watch", daemon=True
        )
        self._thread.start()
        atexit.register(self._end)  # where nobody leaves the block
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops it; a look that is under way is waited for, but not for ever."""
        atexit.unregister(self._end)
        self._end()
        self._thread = None

    def _end(self) -> None:
        """Also at the end of the process, which a thread in the midst of torch would abort."""
        assert self._thread is not None
        self._stop.set()
        self._thread.join(JOIN_LIMIT_S)
        if self._thread.is_alive():
            log.warning(
                "a look at %s did not end in %g s; left to itself", self.source, JOIN_LIMIT_S
            )


def _let_go(error: BaseException | None) -> None:
    """Of what the frames of a failure hold: the files of an artifact are many megabytes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
