"""Bundles of OpenSSF's model-signing: what its own CLI verifies, and what it wrote.

Their verifier honours an ignore list that the signer chose, and joins signed names to the folder.
So after it has judged the signature, the signed list is held against the bytes that our own
reader found: every file is listed, nothing else is, and all digests agree.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specctl.artifacts.codec import load_artifact
from specctl.artifacts.files import OF_HUB, read_folder, write_folder
from specctl.artifacts.loading import load_files
from specctl.artifacts.manifest import BUNDLE, SIGNATURES, digest_of
from specctl.artifacts.plain_files import read_plain
from specctl.artifacts.signing.dsse import bad_signature
from specctl.artifacts.signing.key_files import (
    ELLIPTIC,
    WRITABLE,
    check_kind,
    load_private,
    load_public_key,
    passphrase,
    unusable,
    write_key,
)
from specctl.artifacts.strict_json import parse_strict
from specctl.durable import output_errors, replace_file
from specctl.errors import ArtifactError, UsageError

MAX_BUNDLE_BYTES = 1 << 20
CURVES = " (P-256, P-384 or P-521)"


def generate_ec_key(private: Path, public: Path) -> None:
    """Writes a new P-256 pair; model-signing knows no Ed25519.

    Raises:
        OutputError: a file exists, or cannot be written.
    """
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

    key, phrase = generate_private_key(SECP256R1()), passphrase()
    encryption = form.BestAvailableEncryption(phrase) if phrase else form.NoEncryption()
    pem = form.Encoding.PEM
    write_key(private, key.private_bytes(pem, form.PrivateFormat.PKCS8, encryption), mode=0o600)
    public_form = form.PublicFormat.SubjectPublicKeyInfo
    write_key(public, key.public_key().public_bytes(pem, public_form), mode=0o644)


def sign_bundle(folder: Path, key: Path, out: Path | None = None) -> str:
    """Writes the bundle of an artifact, by default `model.sig` in it; returns the digest.

    Raises:
        UsageError: model-signing is not installed, or the key is of no use.
        ArtifactError: an artifact that must not be loaded is not signed either.
        OutputError: the bundle cannot be written.
    """
    signer = _signer(key)
    digest, place = load_artifact(folder).digest, out or folder / BUNDLE
    hashed = _library().hashing.Config()
    # Those that are yet to come too: another signature beside it is no change of the artifact.
    ignored = [folder / name for name in (*SIGNATURES, *OF_HUB)]
    hashed.set_ignored_paths(paths=ignored, ignore_git_paths=False)
    with tempfile.TemporaryDirectory(prefix="specctl-") as staged:
        bundle = Path(staged, BUNDLE)
        signer.set_hashing_config(hashed).sign(folder, bundle)
        with output_errors(place, "bundle", WRITABLE):
            replace_file(place, bundle.read_bytes())
    return digest


def verify_bundle(folder: Path, public_key: Path, bundle: Path | None = None) -> str:
    """The digest of an artifact that the owner of a key signed with model-signing.

    Raises:
        UsageError: model-signing is not installed, or the key cannot be read.
        ArtifactError: E_SIG, or what loading refuses.
    """
    files = read_folder(folder)
    data = _bundle_of(files, folder) if bundle is None else _read_bundle(bundle)
    listed, verifier = _signed_files(data), _verifier(public_key)
    # Signatures sign the others: one of them may be listed, and need not be.
    found = {n: d for n, d in files.items() if n not in SIGNATURES or n in listed}
    _their_verdict(verifier, found, data, public_key)
    _check_listed(listed, found)
    return load_files(files).digest


def _signer(key: Path) -> Any:
    config = _library().signing.Config()
    check_kind(key, load_private(key), ELLIPTIC, more=CURVES)
    try:
        return config.use_elliptic_key_signer(private_key=key, password=passphrase())
    except (ValueError, TypeError) as error:  # a curve that it does not take
        raise unusable(key, str(error), ELLIPTIC + CURVES) from None


def _verifier(public_key: Path) -> Any:
    config = _library().verifying.Config()
    check_kind(public_key, load_public_key(public_key), ELLIPTIC, more=CURVES)
    try:
        return config.use_elliptic_key_verifier(public_key=public_key)
    except (OSError, ValueError, TypeError) as error:
        raise unusable(public_key, str(error), ELLIPTIC + CURVES) from None


def _their_verdict(
    verifier: Any, contents: Mapping[str, bytes], bundle: bytes, public_key: Path
) -> None:
    """Lets model-signing judge a private copy: what it sees is what we have read."""
    with tempfile.TemporaryDirectory(prefix="specctl-") as place:
        folder, signature = Path(place, "artifact"), Path(place, BUNDLE)
        write_folder(folder, contents)
        signature.write_bytes(bundle)
        try:
            verifier.verify(folder, signature)
        except Exception as error:  # whatever a foreign verifier raises for a hostile bundle
            found = str(error) or type(error).__name__
            raise bad_signature(f"a bundle signed by {public_key}", found) from None


def _check_listed(listed: Mapping[str, str], contents: Mapping[str, bytes]) -> None:
    """Refuses a list that leaves out a file, names another, or says other bytes."""
    found = {name: digest_of(data).removeprefix("sha256:") for name, data in contents.items()}
    for name in sorted(found.keys() | listed.keys()):
        if found.get(name) != listed.get(name):
            raise bad_signature(
                f"{name} as signed, {listed.get(name, 'not at all')}", found.get(name, "no file")
            )


def _signed_files(bundle: bytes) -> dict[str, str]:
    """SHA-256 hex of every file of a bundle's payload, by name; whose signature is judged apart."""
    try:
        tree = parse_strict(bundle)
        if not tree["verificationMaterial"]["publicKey"]["hint"]:
            raise bad_signature("a bundle that names its key", "none")
        payload = base64.b64decode(tree["dsseEnvelope"]["payload"], validate=True)
        predicate = parse_strict(payload)["predicate"]
        resources = predicate["resources"]
        listed = {one["name"]: one["digest"] for one in resources if one["algorithm"] == "sha256"}
    except ArtifactError as error:
        raise bad_signature(error.expected, error.found) from None
    except (KeyError, TypeError, ValueError) as error:
        raise bad_signature("a model-signing bundle", f"{type(error).__name__} {error}") from None
    if len(listed) != len(resources):
        raise bad_signature("each file once, by sha256", "others")
    return listed


def _bundle_of(files: Mapping[str, bytes], folder: Path) -> bytes:
    if BUNDLE not in files:
        raise bad_signature(f"a bundle at {folder / BUNDLE}", "none")
    return files[BUNDLE]


def _read_bundle(path: Path) -> bytes:
    try:
        data, _ = read_plain(path, max_bytes=MAX_BUNDLE_BYTES)
    except OSError as error:
        raise bad_signature(f"a bundle at {path}", error.strerror or "none") from None
    if len(data) > MAX_BUNDLE_BYTES:
        raise bad_signature(f"at most {MAX_BUNDLE_BYTES} bytes", "more")
    return data


def _library() -> Any:
    """model_signing; its import takes a second."""
    try:
        import model_signing

        return model_signing
    except ImportError as error:
        raise UsageError(
            "model-signing bundles",
            expected="the packages model-signing and pyopenssl",
            found=str(error),
            fix="pip install 'specctl[sign]'",
        ) from error
