"""From a reference to a loaded artifact: resolve, fetch, load, and only then remember.

Until the loader has passed the files they are bytes in memory: of a bad artifact nothing is
written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specctl.artifacts.compatibility import Expected
from specctl.artifacts.loading import Artifact, load_files
from specctl.artifacts.signing import Trust
from specctl.errors import RegistryError, refusals_of
from specctl.registry.cache import Cache, Remembered
from specctl.registry.content import OnBytes
from specctl.registry.entries import Logged
from specctl.registry.floors import Floors
from specctl.registry.names import Reference
from specctl.registry.recalling import check_remembered
from specctl.registry.resolving import Resolved, resolve
from specctl.registry.room import Clock, Registry


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
        believed: envelopes over it that were; none where the name requires none.
        resolved: what the reference was found to be; None where the registry was not asked.
    """

    artifact: Artifact
    reference: Reference
    folder: Path
    remembered: str | None = None
    believed: tuple[bytes, ...] = ()
    resolved: Resolved | None = None


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
    with refusals_of(f"{registry.url}/{reference}"):
        resolved = resolve(registry, reference, reader.trust, reader.floors)
    return pull_resolved(resolved, reader, expect=expect, on_bytes=on_bytes)


def pull_resolved(
    resolved: Resolved,
    reader: Reader,
    *,
    expect: Expected | None = None,
    on_bytes: OnBytes = lambda _: None,
) -> Pulled:
    """`pull` of what was resolved by the same reader.

    Raises:
        RegistryError, ArtifactError: see `pull`.
    """
    name = f"{resolved.registry.url}/{resolved.reference}"
    with refusals_of(name):
        believed = resolved.check_signatures()
        files = reader.cache.get(resolved.digest)
        if files is None:
            files = resolved.registry.content.fetch(resolved.digest, on_bytes)
    artifact = load_files(files, expect=expect, digest=resolved.digest, artifact=name)
    folder = reader.cache.put(resolved.digest, files)
    resolved.confirm(reader.floors)
    _remember(resolved, believed, reader.cache)
    return Pulled(artifact, resolved.reference, folder, believed=believed, resolved=resolved)


def _remember(resolved: Resolved, believed: tuple[bytes, ...], cache: Cache) -> None:
    """Notes what the reference meant, and that its digest is one of the name."""
    registry, reference = resolved.registry, resolved.reference
    pinned = reference.pinned(resolved.digest)
    for said, entries in ((pinned, resolved.entries[:1]), (reference, resolved.entries)):
        meant = Remembered(
            digest=resolved.digest,
            name=reference.name,
            registry_id=registry.marker.registry_id,
            resolved=registry.clock.utc(),
            entries=_texts(entries),
            settings=_texts(resolved.settings),
            envelopes=tuple(data.decode() for data in believed),
        )
        cache.remember(registry.url, said, meant)
        if said == reference:
            return


def _texts(entries: tuple[Logged, ...]) -> tuple[str, ...]:
    return tuple(logged.envelope.decode() for logged in entries)


def pull_offline(
    url: str,
    reference: Reference,
    reader: Reader,
    *,
    expect: Expected | None = None,
    clock: Clock | None = None,
) -> Pulled:
    """What a reference meant when it was last pulled, from the cache alone.

    The registry is not asked, so a newer version or a revocation in its settings goes unseen. The
    user's own trust as it is now, and what expired since, count.

    Raises:
        RegistryError: E_OFFLINE where it was never pulled from this registry under this name.
        ArtifactError: the cached files are damaged, or do not fit; E_SIG, E_STALE.
    """
    meant, name = reader.cache.recall(url, reference), f"{url}/{reference}"
    with refusals_of(name):
        check_remembered(url, reference, meant, reader.trust, (clock or Clock()).utc())
        files = reader.cache.get(meant.digest)
    if files is None:
        raise RegistryError(
            "E_OFFLINE",
            f"{url}, {reference}",
            expected=f"{meant.digest} in the cache",
            found="nothing",
            fix="pull it once without --offline",
        )
    artifact = load_files(files, expect=expect, digest=meant.digest, artifact=name)
    return Pulled(
        artifact,
        reference,
        reader.cache.folder(meant.digest),
        remembered=meant.resolved,
        believed=tuple(text.encode() for text in meant.envelopes),
    )
