"""From a reference to a loaded artifact: resolve, fetch, load, and only then remember.

Until the loader has passed the files they are bytes in memory: of a bad artifact nothing is
written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specctl.artifacts.compatibility import Expected
from specctl.artifacts.loading import Artifact, load_files
from specctl.artifacts.registry.cache import Cache, Remembered
from specctl.artifacts.registry.content import OnBytes
from specctl.artifacts.registry.floors import Floors
from specctl.artifacts.registry.names import Reference
from specctl.artifacts.registry.resolving import resolve
from specctl.artifacts.registry.room import Registry
from specctl.artifacts.signing import Trust
from specctl.errors import RegistryError


@dataclass(frozen=True)
class Reader:
    """What a user brings to every registry: whom to trust, what was seen, what was pulled."""

    trust: Trust = field(default_factory=Trust.load)
    floors: Floors = field(default_factory=Floors)
    cache: Cache = field(default_factory=Cache)


@dataclass(frozen=True)
class Pulled:
    """An artifact that passed every check.

    Attributes:
        folder: its read-only place in the cache.
        remembered: when the reference was resolved, where the registry was not asked; else None.
    """

    artifact: Artifact
    reference: Reference
    folder: Path
    remembered: str | None = None


def pull(
    registry: Registry,
    reference: Reference,
    reader: Reader,
    *,
    expect: Expected | None = None,
    on_bytes: OnBytes = lambda _: None,
) -> Pulled:
    """The artifact that a reference means now; floors are raised when it passed every check.

    Args:
        expect: what is about to run; None to look at an artifact without running it.

    Raises:
        RegistryError, ArtifactError: see `resolve`, `Content.fetch` and `load_files`.
    """
    resolved = resolve(registry, reference, reader.trust, reader.floors)
    resolved.check_signatures()
    files = reader.cache.get(resolved.digest)
    if files is None:
        files = registry.content.fetch(resolved.digest, on_bytes)
    artifact = load_files(files, expect=expect, digest=resolved.digest)
    folder = reader.cache.put(resolved.digest, files)
    resolved.confirm(reader.floors)
    if reference.alias is not None:
        now, identity = registry.clock.utc(), registry.marker.registry_id
        meant = Remembered(digest=resolved.digest, registry_id=identity, resolved=now)
        reader.cache.remember(registry.url, reference, meant)
    return Pulled(artifact, reference, folder)


def pull_offline(
    url: str, reference: Reference, reader: Reader, *, expect: Expected | None = None
) -> Pulled:
    """What a reference meant when it was last pulled, from the cache alone.

    Its registry is not asked, so a newer version, an expiry or a revocation goes unseen.

    Raises:
        RegistryError: E_OFFLINE where it was never pulled.
        ArtifactError: the cached files are damaged, or do not fit.
    """
    digest, when = reference.digest, "now, by its digest"
    if digest is None:
        meant = reader.cache.recall(url, reference)
        digest, when = meant.digest, meant.resolved
    files = reader.cache.get(digest)
    if files is None:
        raise RegistryError(
            "E_OFFLINE",
            f"{url}, {reference}",
            expected=f"{digest} in the cache",
            found="nothing",
            fix="pull it once without --offline",
        )
    artifact = load_files(files, expect=expect, digest=digest)
    return Pulled(artifact, reference, reader.cache.folder(digest), remembered=when)
