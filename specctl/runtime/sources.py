"""Where a loop's next policy comes from: an artifact folder, or an alias of a registry."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from specctl.artifacts.compatibility import Expectation
from specctl.artifacts.load import Artifact, load_artifact
from specctl.errors import UsageError
from specctl.registry.names import Reference
from specctl.registry.opening import Registry, open_registry
from specctl.registry.pulling import Reader, pull_resolved
from specctl.registry.resolving import Resolved, resolve
from specctl.registry.userdirs import make_cache_home
from specctl.runtime.policy_places import check_is_no_reference, is_meant_as_artifact, place_asked

log = logging.getLogger("specctl.policy")
Stamp = tuple[tuple[str | int, ...], ...]


@dataclass(frozen=True)
class Version:
    """What a source holds now, not loaded yet.

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
        """What is there now; None for nothing. Asked often, so that it loads nothing.

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
    """What tells the files of a folder from those that stood there before; empty for none.

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
        reference: `NAME@ALIAS`.
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
        """See `Source`: asked of the registry anew each time, so that an expiry and a
        revocation are noticed whatever the digest."""
        resolved = resolve(self.registry, self.reference, self.reader.trust)
        resolved.check_signatures()
        return Version(resolved.digest, partial(self._load, resolved))

    def _load(self, resolved: Resolved) -> Artifact:
        return pull_resolved(resolved, self.reader, expect=self.expect).artifact


def source_of(text: str, expect: Expectation) -> Source:
    """What a user names: an artifact folder, there or not yet, or `REGISTRY/NAME@ALIAS`.

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
