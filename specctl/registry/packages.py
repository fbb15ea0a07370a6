"""What is published: an artifact's files, loaded once, and the envelopes that came with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specctl.artifacts.files import read_folder
from specctl.artifacts.kinds import check_is_artifact
from specctl.artifacts.manifest import MANIFEST, SIGNATURE, digest_of
from specctl.registry.content import check_envelope_of, checked


@dataclass(frozen=True)
class Package:
    """An artifact that was loaded once.

    Attributes:
        files: by name, those of the manifest and the manifest itself.
        envelopes: over the manifest; none of them is believed yet.
    """

    digest: str
    files: Mapping[str, bytes]
    envelopes: tuple[bytes, ...] = ()

    @property
    def size_bytes(self) -> int:
        """What a transfer moves at most."""
        return sum(map(len, self.files.values()))

    @property
    def parts(self) -> frozenset[str]:
        """The digests that a registry must hold for it."""
        return frozenset(map(digest_of, self.files.values()))


def read_package(folder: Path) -> Package:
    """An artifact folder, fit for a registry: what could not be loaded is not published.

    Raises:
        ArtifactError: the loader refuses it, or it changed meanwhile; E_SIG for a signature of
            something else, which `fsck` would find for ever.
    """
    check_is_artifact(folder)
    from specctl.artifacts.loading import load_artifact  # here: it needs torch

    artifact = load_artifact(folder)
    found = read_folder(folder)
    files = {name: data for name, data in found.items() if name != SIGNATURE}
    checked(str(folder), files[MANIFEST], artifact.digest)
    envelopes = (found[SIGNATURE],) if SIGNATURE in found else ()
    for envelope in envelopes:
        check_envelope_of(f"{folder}/{SIGNATURE}", envelope, artifact.digest)
    return Package(artifact.digest, files, envelopes)
