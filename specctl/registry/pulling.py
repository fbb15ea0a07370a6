"""From a reference to a loaded artifact, and the cache of pulled ones for `--offline`.

Until the loader has accepted the files they are bytes in memory: nothing of a bad artifact is
written. Cached files are recomputed on every read. With each reference the cache keeps the entries
and signatures that it rested on, so that they can be judged again.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from specctl.artifacts.compatibility import Expected
from specctl.artifacts.files import publish_folder, read_folder, write_folder
from specctl.artifacts.manifest import SIGNATURE, UtcTime, digest_of, utc_now
from specctl.artifacts.strict_json import parse_strict
from specctl.durable import beside, output_errors, replace_file
from specctl.errors import ArtifactError, RegistryError, refusals_of
from specctl.records import Record, canonical_json
from specctl.registry.content import check_files, hex_of
from specctl.registry.log import Logged, Move, parse_entry
from specctl.registry.memory import read_own
from specctl.registry.names import Reference, parse_reference, segment_of
from specctl.registry.opening import Registry, open_registry
from specctl.registry.resolving import Resolved, accepted_signatures, check_entry, resolve
from specctl.registry.trust import Trust
from specctl.registry.userdirs import cache_home, make_cache_home, make_private
from specctl.stores import canonical_store

if TYPE_CHECKING:
    from specctl.artifacts.load import Artifact

MAX_NOTE_BYTES = 8 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pulled:
    """An artifact that passed every check.

    Attributes:
        folder: its read-only place in the cache.
        remembered: when the reference was resolved, where it came from the cache; else None.
        accepted: envelopes over it; none where the name requires none.
        resolved: None where it came from the cache.
    """

    artifact: Artifact
    reference: Reference
    folder: Path
    remembered: str | None = None
    accepted: tuple[bytes, ...] = ()
    resolved: Resolved | None = None


class Remembered(Record):
    """The meaning of a reference when it was last pulled, at a time `resolved`."""

    resolved: UtcTime
    entries: tuple[str, ...]  # envelopes of the entries that decided it
    envelopes: tuple[str, ...]  # accepted ones over the artifact; none where none was required


class Cache:
    """Artifacts and references of one user, in folders that are open to nobody else.

    Args:
        root: the folder; None is the user's own.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_home()

    def folder(self, digest: str) -> Path:
        """The place of an artifact, pulled or not."""
        return self.root / "artifacts" / "sha256" / hex_of(digest)

    def get(self, digest: str) -> dict[str, bytes] | None:
        """Files of an artifact, or None where it was never pulled; E_DIGEST where they changed."""
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
                f"not the files that were pulled: {error.field}, {error.problem}",
                hint="remove that folder and pull again",
            ) from None
        return files

    def put(self, digest: str, files: Mapping[str, bytes]) -> Path:
        """Keeps verified files; read-only, whole or not at all."""
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
        """Replaces the meaning of a reference."""
        path = self._note(url, reference)
        with output_errors(path, "artifact cache"):
            make_private(path.parent, self.root)
            data = canonical_json(meant.model_dump(mode="json")).encode()
            replace_file(path, data, mode=0o600)

    def recall(self, url: str, reference: Reference) -> Remembered:
        """The meaning of a reference when it was last pulled: E_OFFLINE where it never was, or
        where the note is a link, writable by others, too long or of another form."""
        try:
            data = read_own(self._note(url, reference), max_bytes=MAX_NOTE_BYTES)
            parse_strict(data)
            return Remembered.model_validate_json(data)
        except FileNotFoundError:
            raise _not_cached(url, reference, "it was never pulled from this registry") from None
        except OSError as error:
            problem = f"the note of it in the cache cannot be used: {error.strerror}"
            raise _not_cached(url, reference, problem) from None
        except (ArtifactError, ValidationError):
            problem = "the note of it in the cache has another form"
            raise _not_cached(url, reference, problem) from None

    def whole(self, url: str, reference: Reference) -> Reference:
        """The reference with all digits of its digest, where one pulled version has them."""
        note = self._note(url, reference)
        found = sorted(note.parent.glob(f"{note.stem}*.json")) if reference.digest else []
        return reference.pinned(f"sha256:{found[0].stem[1:]}") if len(found) == 1 else reference

    def _note(self, url: str, reference: Reference) -> Path:
        folder = self.root / "references" / hex_of(digest_of(url.encode()))
        # No alias begins with an @.
        version = reference.alias or f"@{hex_of(reference.digest or '')}"
        return folder / segment_of(reference.name) / f"{version}.json"


@dataclass(frozen=True)
class Reader:
    """A user: their trust file and their cache."""

    trust: Trust = field(default_factory=Trust.load)
    cache: Cache = field(default_factory=Cache)


def pull(
    registry: Registry, reference: Reference, reader: Reader, *, expect: Expected | None = None
) -> Pulled:
    """The artifact that a reference names now.

    Args:
        expect: the pair that is about to run; None to look at an artifact without running it.

    Raises:
        RegistryError, ArtifactError: see `resolve`; or its files are missing or damaged.
    """
    with refusals_of(f"{registry.url}/{reference}"):
        resolved = resolve(registry, reference, reader.trust)
    if resolved.ignored is not None:
        entry = resolved.ignored.entry
        logger.warning(
            "%s: generation %d moved it to %s without a signature that you trust, and does not "
            "count", reference, entry.generation, entry.action.digest,
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
    # The digest is remembered as a reference of its own: it is one of the name's versions.
    for said in {reference.pinned(digest), reference}:
        deciding = resolved.entries[:1] if said.digest else resolved.entries
        meant = Remembered(
            resolved=utc_now(),
            entries=tuple(one.envelope.decode() for one in deciding),
            envelopes=tuple(data.decode() for data in accepted),
        )
        reader.cache.remember(url, said, meant)
    return Pulled(artifact, reference, folder, accepted=accepted, resolved=resolved)


def pull_offline(
    url: str,
    reference: Reference,
    reader: Reader,
    *,
    expect: Expected | None = None,
) -> Pulled:
    """The artifact that a reference named when it was last pulled, from the cache alone.

    A newer version goes unseen. The user's trust file as it is now counts.

    Raises:
        RegistryError: E_OFFLINE where it was never pulled from this registry under this name.
        ArtifactError: the cached files are damaged, or do not fit; E_SIG.
    """
    from specctl.artifacts.load import load_files

    trust, place = reader.trust, f"{url}/{reference}"
    reference = reader.cache.whole(url, reference)
    meant = reader.cache.recall(url, reference)
    accepted = tuple(text.encode() for text in meant.envelopes)
    with refusals_of(place):
        entries = _entries_of(url, reference, meant)
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


def _entries_of(url: str, reference: Reference, meant: Remembered) -> list[Logged]:
    """The entries of a note, which must be one publication under the name and, for an alias, its
    move to that version (E_OFFLINE)."""
    entries = []
    for text in meant.entries:
        try:
            entry = parse_entry(text.encode())
        except ArtifactError:
            raise _not_cached(url, reference, "the note of it has no entries") from None
        entries.append(Logged(entry, text.encode(), digest_of(text.encode())))
    found = [one.entry for one in entries]
    about = {(one.name, one.registry_id, one.action.digest) for one in found}
    aliases = [one.action.alias if isinstance(one.action, Move) else None for one in found]
    if (
        len(about) != 1
        or found[0].name != reference.name
        or reference.digest not in (None, found[0].action.digest)
        or aliases
        != [None, *([reference.alias] if reference.alias and not reference.number else [])]
    ):
        raise _not_cached(url, reference, "the note of it is about something else")
    return entries


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
    """`pull` or `pull_offline`, by the texts of a place and of a reference."""
    parsed = parse_reference(reference)
    if offline:
        return pull_offline(canonical_store(place), parsed, reader, expect=expect)
    make_cache_home()
    return pull(open_registry(place), parsed, reader, expect=expect)


def copy_out(pulled: Pulled, out: Path) -> Path:
    """Writes a pulled artifact as a folder of the user's own, loaded once more from there.

    One signature goes with it, where there is any. A place that holds something else is refused.
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
