"""A loop whose policy follows a folder, or an alias of a registry, while it decodes.

    with decoder.follow("team/NAME@prod", loop) as follower:
        while loop.busy:
            follower.poll()  # between two rounds
            loop.step()

A thread looks, loads and checks, and puts what it found into a slot; `poll` takes over what is in
the slot, so no round waits for a disk, a network or the first load of an artifact. What cannot be
loaded is logged and tried again at the next look; what the loop refuses is logged and not offered
again. The loop keeps what it has.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from specctl.artifacts.compatibility import Expectation
from specctl.artifacts.load import Artifact, load_artifact
from specctl.errors import SpecctlError, UsageError
from specctl.policy import Policy, check_costs
from specctl.registry.names import Reference
from specctl.registry.opening import Registry, open_registry
from specctl.registry.pulling import Reader, pull_resolved
from specctl.registry.resolving import Resolved, accepted_signatures, resolve
from specctl.registry.userdirs import make_cache_home
from specctl.runtime.references import check_is_no_reference, is_meant_as_artifact, place_asked

log = logging.getLogger("specctl.policy")
INTERVAL_S = 5.0
"""Between two looks of the thread, seconds."""
JOIN_S = 10.0
"""Longest wait for a look that is under way when following ends; the thread is a daemon."""


# --------------------------------------------------------------------------- sources


class Version(NamedTuple):
    """A version that a source holds now: a key, the same for the same bytes and for no others, and
    what loads it."""

    key: Hashable
    load: Callable[[], Artifact]


@dataclass(frozen=True)
class FolderSource:
    """An artifact folder that may be replaced, or made, while a loop runs."""

    folder: Path
    expect: Expectation  # what the loop runs; artifacts for anything else are refused

    def __str__(self) -> str:
        return str(self.folder)

    def newest(self) -> Version | None:
        """The version there now, by a few file stats; None for none."""
        stamp = stamp_of(self.folder)
        return Version(stamp, self._load) if stamp else None

    def _load(self) -> Artifact:
        check_is_no_reference(str(self.folder))
        return load_artifact(self.folder, expect=self.expect)


def stamp_of(folder: Path) -> tuple[tuple[str | int, ...], ...]:
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
    """An alias of a registry. Moves between two looks are skipped: the newest counts."""

    registry: Registry
    reference: Reference  # `NAME@ALIAS`
    reader: Reader  # the keys it trusts, and the cache
    expect: Expectation  # what the loop runs; artifacts for anything else are refused

    def __post_init__(self) -> None:
        if self.reference.alias is None:
            raise UsageError(
                f"policy to follow: {self.reference} is no NAME@ALIAS; a digest never "
                "changes, so load it once"
            )

    def __str__(self) -> str:
        return str(self.reference)

    def newest(self) -> Version:
        """The version that the alias names now. Entries and signatures are judged each time, so a
        revocation is noticed whatever the digest."""
        resolved = resolve(self.registry, self.reference, self.reader.trust)
        accepted_signatures(resolved.log, resolved.trust, resolved.digest)
        return Version(resolved.digest, partial(self._load, resolved))

    def _load(self, resolved: Resolved) -> Artifact:
        return pull_resolved(resolved, self.reader, expect=self.expect).artifact


def source_of(text: str, expect: Expectation) -> FolderSource | AliasSource:
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


# --------------------------------------------------------------------------- following


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


class Loaded(NamedTuple):
    """A policy that passed every check, the key of its version, and the digest of its artifact."""

    key: Hashable
    digest: str
    policy: Policy


class Follower:
    """Has a loop's policy follow a source; one loop, polled from the thread that decodes.

    Args:
        interval_s: seconds between two looks of the thread.

    Attributes:
        num_failures: looks and reloads that failed.
        digest: of the artifact that the loop plays; None before the first.
    """

    def __init__(
        self, source: FolderSource | AliasSource, loop: Player, *, interval_s: float = INTERVAL_S
    ) -> None:
        self.source, self.loop, self.interval_s = source, loop, interval_s
        self.num_failures = 0
        self.digest: str | None = None
        self._look_error: Exception | None = None
        self._reload_error: Exception | None = None
        self._loaded: Loaded | None = None
        self._slot: Loaded | None = None  # the thread writes it, the loop reads it
        self._decided: Hashable = None  # key of the version that was last taken over or refused
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def last_error(self) -> Exception | None:
        """The reason why the newest version was not taken over; None where it was."""
        return self._look_error or self._reload_error

    def look(self) -> None:
        """Looks once and puts what is there into the slot; without a thread, call it yourself."""
        try:
            version = self.source.newest()
            if version is None:
                return
            if self._loaded is None or self._loaded.key != version.key:
                artifact = version.load()
                check_costs(artifact.policy.budget)
                self._loaded = Loaded(version.key, artifact.digest, artifact.policy)
        except Exception as error:  # whatever it is, requests go on under the old policy
            self._slot, self._look_error = None, self._failed(error)
        else:
            self._slot, self._look_error = self._loaded, None

    def poll(self) -> bool:
        """Takes over what is in the slot, between two rounds; each version once.

        Returns:
            Whether another policy decides from now on.
        """
        found = self._slot
        if found is None or found.key == self._decided:
            return False
        self._decided = found.key
        is_new = found.digest != self.digest and found.policy != self.loop.policy
        if is_new:
            try:
                self.loop.reload(found.policy)
            except Exception as error:  # e.g. no memory on the device: the loop is as it was
                self._reload_error = self._failed(error)
                return False
            log.info("policy reloaded: %s %s", self.source, found.digest)
        self.digest, self._reload_error = found.digest, None
        return is_new

    def _failed(self, error: Exception) -> Exception:
        """Counts a failure and logs it, unless the last one said the same."""
        self.num_failures += 1
        if str(error) != str(self.last_error):
            trace = None if isinstance(error, SpecctlError) else error
            text = "policy %s not reloaded, the old one stays: %s"
            log.warning(text, self.source, error, exc_info=trace)
        return error.with_traceback(None)  # whose frames hold the files of an artifact

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.look()
            stop.wait(self.interval_s)

    def __enter__(self) -> Self:
        """Starts the thread."""
        if self._thread is not None:
            raise UsageError(
                f"the follower of {self.source} is already running; make one for each loop"
            )
        self._stop = threading.Event()  # its own: an earlier thread that hangs stays stopped
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name="specctl-follow", daemon=True
        )
        self._thread.start()
        atexit.register(self._end)  # a thread in the midst of torch would abort the process
        return self

    def __exit__(self, *_: object) -> None:
        """Stops it; a look that is under way is waited for, but not for ever."""
        atexit.unregister(self._end)
        self._end()
        self._thread = None

    def _end(self) -> None:
        assert self._thread is not None
        self._stop.set()
        self._thread.join(JOIN_S)
