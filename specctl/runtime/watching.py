"""A loop whose policy follows a folder, or an alias of a registry, while it decodes.

    with decoder.follow("team/NAME@prod", loop) as watch:
        while loop.busy:
            watch.poll()  # between two rounds
            loop.step()

A watch finds, loads and checks; `poll` only takes over what is ready. In a `with` block it looks
in a thread of its own, so no round waits for a disk, a network or the first load of an artifact;
outside of one `poll` looks by itself. What cannot be loaded or taken over is logged once, and the
loop keeps what it has. A verdict on an artifact's bytes is final. What may pass, such as a store
that is away or a device without memory, is tried again, ever less often.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from specctl.artifacts.compatibility import Expectation
from specctl.artifacts.load import Artifact, load_artifact
from specctl.errors import ArtifactError, SpecctlError, UsageError
from specctl.policy import Policy, check_costs
from specctl.registry.names import Reference
from specctl.registry.opening import Registry, open_registry
from specctl.registry.pulling import Reader, pull_resolved
from specctl.registry.resolving import Resolved, resolve
from specctl.registry.userdirs import make_cache_home
from specctl.runtime.policy_spec import check_is_no_reference, is_meant_as_artifact, place_asked

log = logging.getLogger("specctl.policy")
INTERVAL_S = 5.0
"""Between two looks of the thread, seconds."""
JOIN_LIMIT_S = 10.0
"""Longest wait at the end of a watch for a look that is under way; the thread is a daemon."""
MAX_BACKOFF = 6
"""Doublings of the wait before a failure that may pass is tried again: at most 64 intervals."""
PASSING = frozenset({"E_COST", "E_MISSING", "E_DIGEST", "E_SIZE", "E_FILETYPE", "E_SIG"})
"""Refusals that the machine, a copy that is not finished or a key may be the reason of, and
not the artifact's bytes."""
Stamp = tuple[tuple[str | int, ...], ...]


# --------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class Version:
    """A version that a source holds now, not loaded yet.

    Attributes:
        key: the same for the same bytes, and for no others.
        load: gives the artifact, or raises what `load_artifact` and `pull` raise.
    """

    key: Hashable
    load: Callable[[], Artifact]


class Source(Protocol):
    """Of policies."""

    def __str__(self) -> str:
        """As messages name it."""
        ...

    def newest(self) -> Version | None:
        """The version there now; None for none. Asked often, so it loads nothing.

        Raises:
            SpecctlError: it cannot be asked, or what it names must not be used just now.
        """
        ...


@dataclass(frozen=True)
class FolderSource:
    """An artifact folder that may be replaced, or made, while a loop runs.

    Attributes:
        expect: what the loop runs; artifacts for anything else are refused.
    """

    folder: Path
    expect: Expectation

    def __str__(self) -> str:
        return str(self.folder)

    def newest(self) -> Version | None:
        """See `Source`: a few file stats."""
        stamp = stamp_of(self.folder)
        return Version(stamp, self._load) if stamp else None

    def _load(self) -> Artifact:
        check_is_no_reference(str(self.folder))
        return load_artifact(self.folder, expect=self.expect)


def stamp_of(folder: Path) -> Stamp:
    """An identity of the files of a folder, unlike that of earlier files; empty for none.

    Names, sizes and times alone would not: a link may be moved to a folder that has all of them
    alike. A copy that is not finished has another stamp when it is.
    """
    try:
        files = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    except FileNotFoundError:
        return ()
    except OSError as error:  # there, and not to be read: the loader says why
        return ((error.errno or 0,),)
    return tuple(
        (name, of.st_dev, of.st_ino, of.st_ctime_ns, of.st_mtime_ns, of.st_size)
        for name, of in files
    )


@dataclass(frozen=True)
class AliasSource:
    """An alias of a registry. Moves between two looks are skipped: the newest counts.

    Attributes:
        reference: `NAME@ALIAS`. reader: the keys it trusts, and the cache.
        expect: what the loop runs; artifacts for anything else are refused.

    Raises:
        UsageError: a reference without an alias, which nobody moves.
    """

    registry: Registry
    reference: Reference
    reader: Reader
    expect: Expectation

    def __post_init__(self) -> None:
        if self.reference.alias is None:
            raise UsageError(
                "policy to follow",
                expected="NAME@ALIAS",
                found=str(self.reference),
                fix="name an alias; a digest never changes, so load it once",
            )

    def __str__(self) -> str:
        return str(self.reference)

    def newest(self) -> Version:
        """See `Source`: asked of the registry anew each time, so that a
        revocation is noticed whatever the digest."""
        resolved = resolve(self.registry, self.reference, self.reader.trust)
        resolved.check_signatures()
        return Version(resolved.digest, partial(self._load, resolved))

    def _load(self, resolved: Resolved) -> Artifact:
        return pull_resolved(resolved, self.reader, expect=self.expect).artifact


def source_of(text: str, expect: Expectation) -> Source:
    """The source that a user names: an artifact folder, there or not yet, or `REGISTRY/NAME@ALIAS`.

    The registry is one of the user: that user's trust and cache. Without `REGISTRY/` it
    is the one of `SPECCTL_REGISTRY`.

    Raises:
        UsageError: a folder where only a reference can be meant, or a reference without an alias.
        RegistryError, StoreError: no registry there, or one that cannot be asked.
        OutputError: the user's own folders cannot be written.
    """
    if os.path.isdir(text) or not is_meant_as_artifact(text):
        if not os.path.isdir(text):
            log.warning("no artifact folder %s yet: it is followed from when it is there", text)
        return FolderSource(Path(text), expect)
    place, reference = place_asked(text)
    make_cache_home()
    return AliasSource(open_registry(place), reference, Reader(), expect)


# --------------------------------------------------------------------------- refusals


@dataclass(frozen=True)
class Refusal:
    """The reason why a version was refused, and until when.

    Attributes:
        key: of the version; None where it is not known which one there is.
        num_tries: how often in a row it was tried and failed.
        not_before_s: when it may be tried again, on the monotonic clock; infinite for never.
    """

    key: Hashable
    error: Exception
    num_tries: int
    not_before_s: float

    def stands(self, key: Hashable, now_s: float) -> bool:
        """Whether a version is not to be tried now."""
        return self.key == key and now_s < self.not_before_s


def refusal_of(
    key: Hashable, error: Exception, before: Refusal | None, interval_s: float, now_s: float
) -> Refusal:
    """The consequence of a look, a load or a reload that failed: a bad version that takes long to
    refuse must not be paid for at every round.

    Args:
        before: the last refusal, of this version or of another.
        interval_s: the first wait; each further one is twice as long.
    """
    if isinstance(error, ArtifactError):
        is_final = error.code not in PASSING
    else:
        is_final = isinstance(error, SpecctlError) and error.exit_code == UsageError.exit_code
    num_before = before.num_tries if before is not None and before.key == key else 0
    wait_s = math.inf if is_final else interval_s * 2 ** min(num_before, MAX_BACKOFF)
    return Refusal(key, error, num_before + 1, now_s + wait_s)


# --------------------------------------------------------------------------- the watch


class Player(Protocol):
    """A loop whose policy follows a source.

    Attributes:
        policy: that decides; None before the first.
    """

    @property
    def policy(self) -> Policy | None: ...

    def reload(self, policy: Policy) -> None:
        """Has another policy decide from the next round on; where it raises, the old one stays."""
        ...


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

    def __init__(self, source: Source, loop: Player, *, interval_s: float = INTERVAL_S) -> None:
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
        if is_new:
            try:
                self.loop.reload(found.policy)
            except Exception as error:  # e.g. no memory on the device: the loop is as it was
                self._refuse(self._refusal_of(found.key, error))
                return False
            log.info("policy reloaded: %s %s", self.source, found.digest)
        with self._lock:
            self.digest = found.digest
            if self.last_error is before:  # what a look has refused meanwhile stays
                self.last_error = None
            if self._refusal is not None and self._refusal.key == found.key:
                self._refusal = None
        return is_new

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
            key = version.key  # from here on a failure is this version's
            known, refusal = self._loaded, self._refusal
            if refusal is not None and refusal.stands(key, time.monotonic()):
                return refusal
            if known is None or known.key != key:  # nothing is loaded twice
                artifact = version.load()
                # Whether a lossy policy may take over is the loop's to judge.
                check_costs(artifact.policy.budget)
                known = self._loaded = Found(key, artifact.digest, artifact.policy)
            return known
        except Exception as error:  # whatever it is, requests go on under the old policy
            return self._refusal_of(key, error)

    def _refusal_of(self, key: Hashable, error: Exception) -> Refusal:
        return refusal_of(key, error, self._refusal, self.interval_s, time.monotonic())

    def _refuse(self, refusal: Refusal) -> None:
        """Keeps the old policy, and nothing of what an earlier look had found."""
        error = refusal.error
        with self._lock:
            stood, is_logged = refusal is self._refusal, str(self.last_error) == str(error)
            self._ready, self.last_error = None, error
            if stood:
                return
            self.num_failures += 1
            if refusal.key is not None:
                self._refusal = refusal
        if not is_logged:
            trace = None if isinstance(error, SpecctlError) else error
            text = "policy %s not reloaded, the old one stays: %s"
            log.warning(text, self.source, error, exc_info=trace)
        cause: BaseException | None = error
        while cause is not None:  # frames hold the files of an artifact, many megabytes
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__

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

    def __exit__(self, *_: object) -> None:
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
