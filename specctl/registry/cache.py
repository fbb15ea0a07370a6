"""What a user pulled: read-only folders by digest, and what each reference meant when last asked.

`--offline` works from here, and says so. Digests are recomputed on every read; of a reference the
entries and signatures that it rested on are kept too, so that they can be judged again.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from specctl.artifacts.facts import Digest, UtcTime
from specctl.artifacts.files import read_folder, write_folder
from specctl.artifacts.manifest import digest_of
from specctl.artifacts.plain_files import read_plain
from specctl.artifacts.strict_json import parse_strict
from specctl.artifacts.userdirs import cache_home
from specctl.durable import output_errors
from specctl.errors import ArtifactError, RegistryError
from specctl.policy.base import Record
from specctl.policy.parse import canonical_json
from specctl.registry.content import check_files
from specctl.registry.layout import Nonce, hex_of
from specctl.registry.names import Reference, log_segment

log = logging.getLogger("specctl.artifacts")
MAX_NOTE_BYTES = 8 << 20
"""Of what is kept of one reference. Histories of settings that are longer are not kept."""
_OTHERS_CAN_WRITE = 0o022


class Remembered(Record):
    """What a reference meant, in which registry, at what time, and what that rested on.

    Attributes:
        name: of the reference.
        entries, settings: envelopes of the deciding entries and of the settings, as they stood.
        envelopes: the artifact's own that were believed; none where none was asked for.
    """

    digest: Digest
    name: str
    registry_id: Nonce
    resolved: UtcTime
    entries: tuple[str, ...]
    settings: tuple[str, ...]
    envelopes: tuple[str, ...]


class Cache:
    """Artifacts and references of one user, in folders that are open to nobody else.

    Args:
        root: the folder that keeps them; None is the user's own.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_home()

    def folder(self, digest: str) -> Path:
        """Where an artifact is, or would be."""
        return self.root / "artifacts" / "sha256" / hex_of(digest)

    def get(self, digest: str) -> dict[str, bytes] | None:
        """Files of an artifact, or None where it was never pulled.

        Raises:
            ArtifactError: what is there is not what it was.
        """
        folder = self.folder(digest)
        if not folder.is_dir():
            return None
        try:
            files = read_folder(folder)
            check_files(digest, files)
        except (ArtifactError, KeyError) as error:
            raise _damaged(folder, error) from None
        return files

    def put(self, digest: str, files: Mapping[str, bytes]) -> Path:
        """Keeps files whose digests were checked; read-only, whole or not at all."""
        folder = self.folder(digest)
        if folder.is_dir():
            return folder
        staged = folder.parent / f".{secrets.token_hex(8)}.tmp"
        with output_errors(folder, "artifact cache"):
            try:
                self._make_private(folder.parent)
                write_folder(staged, files)
                staged.chmod(0o700)
                for name in files:
                    (staged / name).chmod(0o444)
                _rename_new(staged, folder)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
        return folder

    def remember(self, url: str, reference: Reference, meant: Remembered) -> None:
        """Replaces what a reference meant; what is too long to be read back is said, not kept."""
        path, data = self._note(url, reference), canonical_json(meant.model_dump(mode="json"))
        if len(data) > MAX_NOTE_BYTES:
            log.warning("%s is not kept for --offline: its settings are too long", reference)
            return
        staged = path.parent / f".{secrets.token_hex(8)}.tmp"
        with output_errors(path, "artifact cache"):
            self._make_private(path.parent)
            staged.write_text(data)
            staged.chmod(0o600)
            os.replace(staged, path)

    def recall(self, url: str, reference: Reference) -> Remembered:
        """What a reference meant when it was last resolved.

        Raises:
            RegistryError: E_OFFLINE where it never was, or where what says so is a link, another
                user's, open to others, too long or no such note.
        """
        try:
            data, status = read_plain(self._note(url, reference), max_bytes=MAX_NOTE_BYTES)
        except FileNotFoundError:
            raise _never_pulled(url, reference, "nothing") from None
        except OSError as error:
            raise _never_pulled(url, reference, error.strerror or "none") from None
        if status.st_uid != os.getuid() or status.st_mode & _OTHERS_CAN_WRITE:
            raise _never_pulled(url, reference, "a note that others could write")
        if len(data) > MAX_NOTE_BYTES:
            raise _never_pulled(url, reference, f"more than {MAX_NOTE_BYTES} bytes")
        try:
            parse_strict(data)
            return Remembered.model_validate_json(data)
        except (ArtifactError, ValidationError):
            raise _never_pulled(url, reference, "a note of another form") from None

    def _note(self, url: str, reference: Reference) -> Path:
        folder = self.root / "references" / hex_of(digest_of(url.encode()))
        # No alias begins with an @.
        said = reference.alias or f"@{hex_of(reference.digest or '')}"
        return folder / log_segment(reference.name) / f"{said}.json"

    def _make_private(self, folder: Path) -> None:
        """Makes a folder of the cache, and closes those on the way that are open to others."""
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder, *folder.parents):
            if place.lstat().st_mode & 0o077:
                place.chmod(0o700)
            if place == self.root:
                return


def _rename_new(staged: Path, folder: Path) -> None:
    """Gives a folder its name; another process that was faster wrote the same bytes."""
    try:
        staged.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _never_pulled(url: str, reference: Reference, found: str) -> RegistryError:
    return RegistryError(
        "E_OFFLINE",
        f"{url}, {reference}",
        expected="a reference of this registry that was pulled before",
        found=f"{found}, in the cache",
        fix="pull it once without --offline",
    )


def _damaged(folder: Path, error: Exception) -> ArtifactError:
    found = error.found if isinstance(error, ArtifactError) else "no config.json"
    return ArtifactError(
        "E_DIGEST",
        f"cache {folder}",
        expected="the files that were pulled",
        found=found,
        fix="remove that folder and pull again",
    )
