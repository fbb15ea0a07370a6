"""The signature in an artifact's folder: `signature.dsse.json`, beside what it vouches for."""

from __future__ import annotations

from pathlib import Path

from specctl.artifacts.files import read_folder
from specctl.artifacts.load import load_files
from specctl.artifacts.manifest import SIGNATURE
from specctl.artifacts.signing.dsse import add_signature
from specctl.artifacts.signing.key_files import WRITABLE
from specctl.artifacts.signing.keys import SigningKey
from specctl.artifacts.signing.statement import sign_artifact, speaks_of
from specctl.artifacts.signing.trust import Trust, Verified
from specctl.durable import output_errors, replace_file


def sign_folder(folder: Path, key: SigningKey, name: str, *, expires: str | None = None) -> str:
    """Signs an artifact under a name; returns its digest.

    A signature that is there for the same artifact and name is kept beside the new one, under
    its own times; any other is replaced.

    Args:
        expires: UTC; None is never.

    Raises:
        ArtifactError: an artifact that must not be loaded is not signed either.
        OutputError: the signature cannot be written.
    """
    files, place = read_folder(folder), folder / SIGNATURE
    digest, found = load_files(files).digest, files.get(SIGNATURE)
    if found is not None and expires is None and speaks_of(found, digest, name):
        made = add_signature(found, key)
    else:
        made = sign_artifact(key, digest, name, expires=expires)
    with output_errors(place, "signature", WRITABLE):
        replace_file(place, made)
    return digest


def verify_folder(
    folder: Path, trust: Trust, name: str, *, now: str | None = None
) -> tuple[str, Verified]:
    """The digest of an artifact that believed keys signed under a name, and which keys.

    Raises:
        ArtifactError: E_SIG, E_STALE, or what loading refuses.
    """
    files = read_folder(folder)
    digest = load_files(files).digest
    envelopes = [files[SIGNATURE]] if SIGNATURE in files else []
    return digest, trust.verify_artifact(envelopes, digest, name=name, now=now)
