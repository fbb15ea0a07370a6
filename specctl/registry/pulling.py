"""From a reference to a loaded artifact, and the cache of pulled ones for `--offline`.

Files stay in memory until the loader has accepted them, so a bad artifact is never written. Digests
of cached files are checked on every read. With each reference the cache keeps the entries and
signatures that decided it, so that they can be judged again.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from specctl.artifacts.compatibility import Expected
from specctl.artifacts.files import publish_folder, read_folder, write_folder
from specctl.artifacts.manifest import SIGNATURE, UtcTime, digest_of, utc_now
from specctl.durable import beside, output_errors
from specctl.errors import ArtifactError, RegistryError, refusals_of
from specctl.records import Record
from specctl.registry.content import check_files, hex_of
from specctl.registry.log import Logged
from specctl.registry.names import Reference, parse_reference, segment_of
from specctl.registry.opening import Registry, open_registry
from specctl.registry.resolving import Resolved, accepted_signatures, check_entry, resolve
from specctl.registry.trust import Trust
from specctl.registry.userdirs import (
    cache_home,
    make_cache_home,
    make_private,
    read_note,
    write_note,
)
from specctl.stores import canonical_store

if TYPE_CHECKING:
    from specctl.artifacts.load import Artifact

MAX_NOTE_BYTES = 8 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pulled:
    """An artifact that passed every check."""

    artifact: Artifact
    reference: Reference  # as it was given
    folder: Path  # in the cache, read-only
    remembered: str | None = None  # offline: the time at which the reference was resolved
    accepted: tuple[bytes, ...] = ()  # envelopes over it; none if the name requires none
    resolved: Resolved | None = None  # None for offline


class Remembered(Record):
    """A reference as it was last resolved."""

    resolved: UtcTime
    entries: Annotated[tuple[str, ...], Field(min_length=1)]  # envelopes of those that decided it
    envelopes: tuple[str, ...]  # accepted ones over the artifact; none if none was required


class Cache:
    """Artifacts and references of one user, in private folders.

    Args:
        root: the folder; None for the user's cache.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_home()

    def folder(self, digest: str) -> Path:
        """The place of an artifact, which may be absent."""
        return self.root / "artifacts" / "sha256" / hex_of(digest)

    def get(self, digest: str) -> dict[str, bytes] | None:
        """Files of an artifact, or None if it was never pulled; E_DIGEST if they changed."""
        folder = self.folder(digest)
        if not folder.is_dir():
            return None
        try:
            files = read_folder(folder)
            check_files(digest, files)
        except ArtifactError as error:
            raise ArtifactError(
                "E_DIGEST",
                f"cache {folder}",
                f"its files changed since they were pulled: {error.field}, {error.problem}",
                hint="remove that folder and pull again",
            ) from None
        return files

    def put(self, digest: str, files: Mapping[str, bytes]) -> Path:
        """Keeps verified files, read-only; atomic."""
        folder = self.folder(digest)
        if folder.is_dir():
            return folder
        staged = beside(folder)
        with output_errors(folder, "artifact cache"):
            try:
                make_private(folder.parent, self.root)
                write_folder(staged, files)
                staged.chmod(0o700)
                for name in files:
                    (staged / name).chmod(0o444)
                try:
                    staged.rename(folder)
                except OSError:  # another process was faster, with the same bytes
                    if not folder.is_dir():
                        raise
            finally:
                shutil.rmtree(staged, ignore_errors=True)
        return folder

    def remember(self, url: str, reference: Reference, meant: Remembered) -> None:
        """Stores a resolution of the reference, replacing an older one."""
        write_note(self._note(url, reference), meant, self.root)

    def recall(self, url: str, reference: Reference) -> Remembered:
        """The last resolution of a reference; E_OFFLINE if it was never pulled, or if its note is
        malformed, too long, a link or writable by others."""
        try:
            return read_note(self._note(url, reference), Remembered, max_bytes=MAX_NOTE_BYTES)
        except FileNotFoundError:
            raise _not_cached(url, reference, "it was never pulled from this registry") from None
        except OSError as error:
            problem = f"its note in the cache cannot be used: {error.strerror}"
            raise _not_cached(url, reference, problem) from None

    def _note(self, url: str, reference: Reference) -> Path:
        folder = self.root / "references" / hex_of(digest_of(url.encode()))
        # No alias begins with an @.
        version = reference.alias or f"@{hex_of(reference.digest or '')}"
        return folder / segment_of(reference.name) / f"{version}.json"


@dataclass(frozen=True)
class Reader:
    """A user's trust file and cache."""

    trust: Trust = field(default_factory=Trust.load)
    cache: Cache = field(default_factory=Cache)


def pull(
    registry: Registry, reference: Reference, reader: Reader, *, expect: Expected | None = None
) -> Pulled:
    """Loads the artifact that a reference names now.

    Args:
        expect: the pair that is about to run; None to load an artifact without running it.

    Raises:
        RegistryError, ArtifactError: see `resolve`; or its files are missing or damaged.
    """
    with refusals_of(f"{registry.url}/{reference}"):
        resolved = resolve(registry, reference, reader.trust)
    if resolved.ignored is not None:
        entry = resolved.ignored.entry
        logger.warning(
            "%s: generation %d moved it to %s without a signature that you trust, so this "
            "does not count", reference, entry.generation, entry.action.digest,
        )  # fmt: skip
    return pull_resolved(resolved, reader, expect=expect)


def pull_resolved(resolved: Resolved, reader: Reader, *, expect: Expected | None = None) -> Pulled:
    """`pull` of a reference that the same reader resolved."""
    from specctl.artifacts.load import load_files

    url, reference, digest = resolved.log.store.url, resolved.reference, resolved.digest
    place = f"{url}/{reference}"
    with refusals_of(place):
        accepted = accepted_signatures(resolved.log, resolved.trust, digest)
        files = reader.cache.get(digest) or resolved.content.fetch(digest)
    artifact = load_files(files, expect=expect, digest=digest, artifact=place)
    folder = reader.cache.put(digest, files)
    meant = Remembered(
        resolved=utc_now(),
        entries=tuple(one.envelope.decode() for one in resolved.entries),
        envelopes=tuple(data.decode() for data in accepted),
    )
    reader.cache.remember(url, reference, meant)
    return Pulled(artifact, reference, folder, accepted=accepted, resolved=resolved)


def pull_offline(
    url: str,
    reference: Reference,
    reader: Reader,
    *,
    expect: Expected | None = None,
) -> Pulled:
    """Loads the artifact that a reference named when it was last pulled, from the cache alone.

    The user's present trust file applies.

    Raises:
        RegistryError: E_OFFLINE if it was never pulled from this registry under this name.
        ArtifactError: the cached files are damaged, or do not fit; E_SIG.
    """
    from specctl.artifacts.load import load_files

    trust, place = reader.trust, f"{url}/{reference}"
    meant = reader.cache.recall(url, reference)
    accepted = tuple(text.encode() for text in meant.envelopes)
    with refusals_of(place):
        entries = [Logged.of(text.encode()) for text in meant.entries]
        digest = entries[-1].entry.action.digest
        for logged in entries:
            check_entry(trust, logged)
        if trust.requires(reference.name):
            trust.accepted(accepted, digest, reference.name)
        files = reader.cache.get(digest)
    if files is None:
        raise _not_cached(url, reference, f"the cache has no files of {digest}")
    artifact = load_files(files, expect=expect, digest=digest, artifact=place)
    folder = reader.cache.folder(digest)
    return Pulled(artifact, reference, folder, remembered=meant.resolved, accepted=accepted)


def _not_cached(url: str, reference: Reference, problem: str) -> RegistryError:
    fix = "pull it once without --offline"
    return RegistryError("E_OFFLINE", f"{url}, {reference}", problem, hint=fix)


def pull_from(
    place: str,
    reference: str,
    reader: Reader,
    *,
    offline: bool = False,
    expect: Expected | None = None,
) -> Pulled:
    """Calls `pull` or `pull_offline` with a place and a reference given as text."""
    parsed = parse_reference(reference)
    if offline:
        return pull_offline(canonical_store(place), parsed, reader, expect=expect)
    make_cache_home()
    return pull(open_registry(place), parsed, reader, expect=expect)


def copy_out(pulled: Pulled, out: Path) -> Path:
    """Writes a pulled artifact, with a signature if there is one, to a folder of the user.

    It is loaded once more from there. A place that holds something else is refused.
    """
    from specctl.artifacts.load import load_artifact

    files = {path.name: path.read_bytes() for path in sorted(pulled.folder.iterdir())}
    signature = next(iter(pulled.accepted), None)
    if signature is None and pulled.resolved is not None:
        signature = pulled.resolved.any_signature()
    if signature is not None:
        files[SIGNATURE] = signature
    digest = pulled.artifact.digest
    publish_folder(out.absolute(), files, lambda folder: load_artifact(folder, digest=digest))
    return out.absolute()
