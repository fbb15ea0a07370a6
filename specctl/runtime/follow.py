"""A loop whose policy follows a folder, or an alias of a registry, while it decodes.

    with decoder.follow("team/NAME@prod", loop) as follower:
        while loop.busy:
            follower.poll()  # between two rounds
            loop.step()

A thread looks, loads and checks, and puts the new policy into a slot; `poll` reloads the loop from
the slot, so no round waits for a disk, a network or an artifact. Failed loads are logged and tried
again at the next look. A policy that the loop refuses is logged once. On any failure the old policy
stays.
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
from specctl.runtime.references import (
    check_is_no_reference,
    is_meant_as_artifact,
    registry_and_reference,
)

log = logging.getLogger("specctl.policy")
INTERVAL_S = 5.0
"""Seconds between two looks of the thread."""
JOIN_S = 10.0
"""Longest wait, at the end, for a look in progress; the thread is a daemon."""


# --------------------------------------------------------------------------- sources


class Version(NamedTuple):
    """A version of a source's artifact."""

    key: Hashable  # equal for equal bytes only
    load: Callable[[], Artifact]


@dataclass(frozen=True)
class FolderSource:
    """An artifact folder that may be made or replaced while a loop runs."""

    folder: Path
    expect: Expectation  # requirements of the loop

    def __str__(self) -> str:
        return str(self.folder)

    def newest(self) -> Version | None:
        """The present version, by file stats; None without a folder."""
        stamp = stamp_of(self.folder)
        return Version(stamp, self._load) if stamp else None

    def _load(self) -> Artifact:
        check_is_no_reference(str(self.folder))
        return load_artifact(self.folder, expect=self.expect)


def stamp_of(folder: Path) -> tuple[tuple[str | int, ...], ...]:
    """An identity of a folder's files; empty without a folder.

    Inodes are part of it, as a link may move to a folder with equal names, sizes and times. A copy
    in progress changes its stamp until it is finished.
    """
    try:
        files = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    except FileNotFoundError:
        return ()
    except OSError as error:  # unreadable: the loader reports why
        return ((error.errno or 0,),)
    return tuple(
        (name, of.st_dev, of.st_ino, of.st_ctime_ns, of.st_mtime_ns, of.st_size)
        for name, of in files
    )


@dataclass(frozen=True)
class AliasSource:
    """An alias of a registry."""

    registry: Registry
    reference: Reference  # `NAME@ALIAS`
    reader: Reader  # trusted keys and cache
    expect: Expectation  # requirements of the loop

    def __post_init__(self) -> None:
        if self.reference.alias is None:
            raise UsageError(
                f"policy to follow: {self.reference} is not NAME@ALIAS; a digest never "
                "changes, so load it once"
            )

    def __str__(self) -> str:
        return str(self.reference)

    def newest(self) -> Version:
        """The alias's present version. Entries and signatures are checked every time, so that a
        revocation counts even if the digest stays."""
        resolved = resolve(self.registry, self.reference, self.reader.trust)
        accepted_signatures(resolved.log, resolved.trust, resolved.digest)
        return Version(resolved.digest, partial(self._load, resolved))

    def _load(self, resolved: Resolved) -> Artifact:
        return pull_resolved(resolved, self.reader, expect=self.expect).artifact


def source_of(text: str, expect: Expectation) -> FolderSource | AliasSource:
    """The source of a user's text: an artifact folder, which may appear later, or
    `REGISTRY/NAME@ALIAS`; `SPECCTL_REGISTRY` replaces a missing `REGISTRY/`.

    Raises:
        UsageError: a folder that looks like a reference, or a reference without an alias.
        RegistryError, StoreError: the registry is missing or cannot be read.
        OutputError: the user's own folders cannot be written.
    """
    if os.path.isdir(text) or not is_meant_as_artifact(text):
        if not os.path.isdir(text):
            log.warning("artifact folder %s does not exist yet; waiting for it", text)
        return FolderSource(Path(text), expect)
    place, reference = registry_and_reference(text)
    make_cache_home()
    return AliasSource(open_registry(place), reference, Reader(), expect)


# --------------------------------------------------------------------------- following


class Reloadable(Protocol):
    """A loop whose policy can change between rounds."""

    @property
    def policy(self) -> Policy | None:
        """The present policy; None before the first."""
        ...

    def reload(self, policy: Policy) -> None:
        """Changes the policy, or raises and keeps the old one."""
        ...


class Loaded(NamedTuple):
    """A policy that passed every check."""

    key: Hashable  # of its version
    digest: str  # of its artifact
    policy: Policy


class Follower:
    """Has the policy of one loop follow a source; polled from the decoding thread.

    Args:
        interval_s: seconds between two looks of the thread.

    Attributes:
        num_failures: looks and reloads that failed.
        digest: of the loop's artifact; None before the first.
    """

    def __init__(
        self,
        source: FolderSource | AliasSource,
        loop: Reloadable,
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.source, self.loop, self.interval_s = source, loop, interval_s
        self.num_failures = 0
        self.digest: str | None = None
        self._look_error: Exception | None = None
        self._reload_error: Exception | None = None
        self._loaded: Loaded | None = None
        self._slot: Loaded | None = None  # written by the thread, read by the loop
        self._decided: Hashable = None  # key of the last version reloaded or refused
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def last_error(self) -> Exception | None:
        """The reason why the newest version was not reloaded; None if it was."""
        return self._look_error or self._reload_error

    def look(self) -> None:
        """Looks once and fills the slot; call it yourself if no thread runs."""
        try:
            version = self.source.newest()
            if version is None:
                return
            if self._loaded is None or self._loaded.key != version.key:
                artifact = version.load()
                check_costs(artifact.policy.budget)
                self._loaded = Loaded(version.key, artifact.digest, artifact.policy)
        except Exception as error:  # requests continue under the old policy
            self._slot, self._look_error = None, self._failed(error)
        else:
            self._slot, self._look_error = self._loaded, None

    def poll(self) -> bool:
        """Reloads the loop from the slot, between two rounds, once a version.

        Returns:
            Whether the policy changed.
        """
        found = self._slot
        if found is None or found.key == self._decided:
            return False
        self._decided = found.key
        is_new = found.digest != self.digest and found.policy != self.loop.policy
        if is_new:
            try:
                self.loop.reload(found.policy)
            except Exception as error:  # e.g. out of memory: the loop is unchanged
                self._reload_error = self._failed(error)
                return False
            log.info("policy reloaded: %s %s", self.source, found.digest)
        self.digest, self._reload_error = found.digest, None
        return is_new

    def _failed(self, error: Exception) -> Exception:
        """Counts a failure and logs it, unless it repeats the last one."""
        self.num_failures += 1
        if str(error) != str(self.last_error):
            trace = None if isinstance(error, SpecctlError) else error
            text = "policy %s not reloaded, the old one stays: %s"
            log.warning(text, self.source, error, exc_info=trace)
        return error.with_traceback(None)  # its frames hold the artifact's files

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.look()
            stop.wait(self.interval_s)

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise UsageError(
                f"the follower of {self.source} is already running; make one for each loop"
            )
        self._stop = threading.Event()  # a new one: an earlier thread that hangs stays stopped
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name="specctl-follow", daemon=True
        )
        self._thread.start()
        atexit.register(self._end)  # a thread inside torch would abort the process
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the thread, after at most `JOIN_S`."""
        atexit.unregister(self._end)
        self._end()
        self._thread = None

    def _end(self) -> None:
        assert self._thread is not None
        self._stop.set()
        self._thread.join(JOIN_S)
