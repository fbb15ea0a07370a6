"""What a user pulled: read-only folders by digest, and what each reference meant when last asked.

`--offline` works from here, and says so. Digests are recomputed on every read.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from specctl.artifacts.facts import Digest, UtcTime
from specctl.artifacts.files import read_folder, write_folder
from specctl.artifacts.manifest import digest_of
from specctl.artifacts.registry.content import check_files
from specctl.artifacts.registry.layout import Nonce, hex_of
from specctl.artifacts.registry.names import Reference, log_segment
from specctl.artifacts.userdirs import cache_home
from specctl.durable import output_errors
from specctl.errors import ArtifactError, RegistryError
from specctl.policy.base import Record
from specctl.policy.parse import canonical_json


class Remembered(Record):
    """What a reference meant, in which registry, at what time."""

    digest: Digest
    registry_id: Nonce
    resolved: UtcTime


class Cache:
    """Artifacts and references of one user.

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
                write_folder(staged, files)
                for name in files:
                    (staged / name).chmod(0o444)
                _rename_new(staged, folder)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
        return folder

    def remember(self, url: str, reference: Reference, meant: Remembered) -> None:
        """Replaces what a reference meant."""
        path = self._note(url, reference)
        staged = path.parent / f".{secrets.token_hex(8)}.tmp"
        with output_errors(path, "artifact cache"):
            path.parent.mkdir(parents=True, exist_ok=True)
            staged.write_text(canonical_json(meant.model_dump(mode="json")))
            os.replace(staged, path)

    def recall(self, url: str, reference: Reference) -> Remembered:
        """What a reference meant when it was last resolved.

        Raises:
            RegistryError: E_OFFLINE where it never was.
        """
        try:
            return Remembered.model_validate_json(self._note(url, reference).read_bytes())
        except (OSError, ValidationError):
            raise RegistryError(
                "E_OFFLINE",
                f"{url}, {reference}",
                expected="a reference that was pulled before",
                found="none in the cache",
                fix="pull it once without --offline",
            ) from None

    def _note(self, url: str, reference: Reference) -> Path:
        folder = self.root / "references" / hex_of(digest_of(url.encode()))
        return folder / log_segment(reference.name) / f"{reference.alias}.json"


def _rename_new(staged: Path, folder: Path) -> None:
    """Gives a folder its name; another process that was faster wrote the same bytes."""
    try:
        staged.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _damaged(folder: Path, error: Exception) -> ArtifactError:
    found = error.found if isinstance(error, ArtifactError) else "no config.json"
    return ArtifactError(
        "E_DIGEST",
        f"cache {folder}",
        expected="the files that were pulled",
        found=found,
        fix="remove that folder and pull again",
    )
