"""The user's trust file: public keys, the names that each may sign for, and revocations.

Only the user adds keys; nothing in a registry does. A name that a key of the file matches, even a
revoked one, must be signed by a matching key that is not revoked. Other names need no signature.
The file is strict JSON in the user's configuration folder; a file that others can write is refused.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from specctl.artifacts.files import read_folder, read_plain
from specctl.artifacts.manifest import SIGNATURE, UtcTime, utc_now
from specctl.artifacts.signing import (
    PUBLIC_KEY_BYTES,
    WRITABLE,
    Base64,
    Envelope,
    bad_signature,
    key_id_of,
    parse_envelope,
    parse_statement,
)
from specctl.artifacts.strict_json import parse_strict
from specctl.durable import make_folder, output_errors, replace_file
from specctl.errors import ArtifactError, RecordError, UsageError, reason_of, shown
from specctl.records import Record, canonical_json, describe_violation, require
from specctl.registry.userdirs import config_home

Glob = Annotated[str, Field(pattern=r"^[a-z0-9._+@:*-]{1,256}$")]
"""`*` stands for any characters; nothing else is special."""
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{0,256}$")]
MAX_KEYS, MAX_GLOBS, MAX_TRUST_BYTES = 256, 64, 1 << 20
_TRUST = "trust that key, if you know its owner: specctl registry trust add KEY.pub --name NAME"
_FETCH = "fetch it again: the signed bytes were others"
_SIGN = (
    "sign it with --key of a trusted key: specctl registry push, promote or rollback, or registry "
    "sign for a folder alone"
)


class Revocation(Record):
    """Time and reason of a revocation. Old signatures of the key are refused too: a thief can
    backdate."""

    at: UtcTime
    reason: Text


class TrustedKey(Record):
    """A raw public key, base64 in JSON, and the names that it may sign for."""

    key_id: Annotated[str, Field(pattern=r"^ed25519:[0-9a-f]{64}$")]
    public_key: Annotated[Base64, Field(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
    comment: Text
    names: Annotated[tuple[Glob, ...], Field(min_length=1, max_length=MAX_GLOBS)]
    revoked: Revocation | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        require(
            self.key_id == key_id_of(self.public_key), "key_id must be the digest of public_key"
        )
        return self

    @classmethod
    def of(cls, public_key: bytes, *, names: Sequence[str], comment: str = "") -> TrustedKey:
        """A key by its raw bytes, from the options of the command line.

        Raises:
            UsageError: a name or a comment that a trust file cannot hold.
        """
        try:
            return cls(
                key_id=key_id_of(public_key),
                public_key=public_key,
                comment=comment,
                names=tuple(dict.fromkeys(names)),
                revoked=None,
            )
        except RecordError as error:
            raise UsageError(
                "a trusted key takes names of [a-z0-9._+@:-] and *, and a comment of one line: "
                f"{error.message}"
            ) from error

    @property
    def state(self) -> str:
        """`trusted`, or `revoked` with the reason."""
        return "trusted" if self.revoked is None else f"revoked: {self.revoked.reason}"

    def may_sign_for(self, name: str) -> bool:
        """Whether a pattern of the key, revoked or not, matches a name."""
        return any(fnmatchcase(name, glob) for glob in self.names)


class Trust(Record):
    """The keys of a trust file; by default none."""

    trust_version: Literal[1] = 1  # of the file's format
    keys: Annotated[tuple[TrustedKey, ...], Field(max_length=MAX_KEYS)] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        require(len({key.key_id for key in self.keys}) == len(self.keys), "keys: each once")
        return self

    @classmethod
    def load(cls, path: Path | None = None) -> Trust:
        """Reads a trust file, by default the user's own; if that is absent, no key is trusted.

        Raises:
            UsageError: a named file is absent, or a file cannot be read or can be written by
                others.
            ArtifactError: E_SCHEMA for an invalid file.
        """
        place = trust_path() if path is None else path
        try:
            data, status = read_plain(place, max_bytes=MAX_TRUST_BYTES, follow=True)
        except OSError as error:
            if path is None and isinstance(error, FileNotFoundError):
                return cls()
            raise UsageError(
                f"trust file {place} cannot be read: {reason_of(error)}",
                hint="check the path; `specctl registry trust add` makes one",
            ) from error
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022:
            raise UsageError(
                f"trust file {place} must be a regular file that only its owner can write, and is "
                f"{stat.filemode(status.st_mode)}",
                hint=f"read it, then chmod go-w {place}",
            )
        return cls.parse(data, f"trust file {place}")

    @classmethod
    def parse(cls, data: bytes, what: str = "trust file") -> Trust:
        """Parses a trust file (E_SCHEMA); its fields have no defaults."""
        try:
            parse_strict(data)
            found = cls.model_validate_json(data)
            if found.model_fields_set == cls.model_fields.keys():
                return found
            problem = f"version 1 has the fields {', '.join(cls.model_fields)}, none left out"
        except ArtifactError as error:
            problem = error.problem
        except ValidationError as error:
            problem = f"not a trust file of version 1: {describe_violation(error)}"
        raise ArtifactError("E_SCHEMA", what, problem, hint="correct or restore it")

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return canonical_json(self.model_dump(mode="json")).encode() + b"\n"

    def key(self, key_id: str) -> TrustedKey | None:
        """A key by its id."""
        return next((key for key in self.keys if key.key_id == key_id), None)

    def only_key(self, start: str) -> TrustedKey:
        """The key whose id begins so.

        Raises:
            UsageError: there is none, or several.
        """
        fitting = [key for key in self.keys if key.key_id.startswith(start)]
        if len(fitting) != 1:
            found = f"{len(fitting)} keys" if fitting else "no key"
            raise UsageError(
                f"the trust file has {found} with an id that begins {start}",
                hint="`specctl registry trust list --json` has the whole ids",
            )
        return fitting[0]

    def requires(self, name: str) -> bool:
        """Whether a name must be signed: a key, revoked or not, matches it."""
        return any(key.may_sign_for(name) for key in self.keys)

    def with_key(self, key: TrustedKey) -> Trust:
        """Adds a key, or replaces the names of a known one.

        Raises:
            UsageError: the key was revoked.
        """
        known = self.key(key.key_id)
        if known is not None and known.revoked is not None:
            raise UsageError(
                f"key {key.key_id} was revoked for good, {known.revoked.at}",
                hint="make a new key: specctl registry keygen",
            )
        others = tuple(one for one in self.keys if one.key_id != key.key_id)
        return Trust(keys=(*others, key))

    def with_revoked(self, key_id: str, reason: str) -> Trust:
        """Revokes a key; it stays listed, so that it cannot be added again. See `only_key`."""
        revoked = {"revoked": Revocation(at=utc_now(), reason=shown(reason)[:256])}
        change = {self.only_key(key_id).key_id: revoked}
        return Trust(keys=tuple(one.model_copy(update=change.get(one.key_id)) for one in self.keys))

    @property
    def before_revocations(self) -> Trust:
        """The keys as if none was revoked, to find the entry that a revocation refuses; nothing is
        accepted by it."""
        return Trust(keys=tuple(one.model_copy(update={"revoked": None}) for one in self.keys))

    def verify(self, envelope: Envelope, name: str) -> str:
        """The id of the key that signed an envelope, trusted for a name (else E_SIG)."""
        key_id = envelope.key_id
        if key_id is None:
            raise _unsigned(name)
        key, short = self.key(key_id), key_id[:20]
        if key is None:
            raise _unsigned(name, f"{short} is not trusted", _TRUST)
        if key.revoked is not None:  # for good, so the hint is not `trust add`
            raise _unsigned(name, f"{short} was revoked {key.revoked.at} ({key.revoked.reason})")
        if not key.may_sign_for(name):
            raise _unsigned(name, f"{short} may not sign for {name}", _TRUST)
        if not envelope.is_signed_by(key.public_key):
            raise bad_signature(f"{short} did not sign these bytes, for {name}", _FETCH)
        return key_id

    def accepted(self, envelopes: Iterable[bytes], digest: str, name: str) -> list[bytes]:
        """The envelopes of an artifact under a name that trusted keys signed.

        E_SIG without any: unsigned, by unknown or revoked keys, or for another manifest or name.
        """
        good, refusals = list[bytes](), list[tuple[bool, ArtifactError]]()
        for data in envelopes:
            is_known = False
            try:
                envelope = parse_envelope(data)
                is_known = envelope.key_id is not None and self.key(envelope.key_id) is not None
                self.verify(envelope, name)
                if (about := parse_statement(data).about) != (digest, name):
                    raise _unsigned(name, f"it is of {' for '.join(about)}, not {digest}")
                good.append(data)
            except ArtifactError as refusal:
                refusals.append((is_known, refusal))
        if good:
            return good
        if not refusals:
            raise _unsigned(name)
        # A refusal about a known key is more useful than one about an unknown key.
        raise max(refusals, key=lambda one: one[0])[1]


def trust_path() -> Path:
    """The user's trust file: in `$XDG_CONFIG_HOME/specctl`, else in `~/.config/specctl`."""
    return config_home() / "trust.json"


def edit_trust(path: Path | None, change: Callable[[Trust], Trust]) -> Trust:
    """Changes a trust file whole or not at all, one process at a time; see `Trust.load`.

    Returns:
        The trust before the change.

    Raises:
        OutputError: it cannot be written.
    """
    place = trust_path() if path is None else path
    with output_errors(place, "trust file", WRITABLE):
        make_folder(place.absolute().parent)
        lock = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = Trust.load(place) if place.exists() else Trust()
        changed = change(before)
        with output_errors(place, "trust file", WRITABLE):
            # Only its owner may write, whatever the umask.
            replace_file(place, changed.to_bytes(), mode=0o644)
        return before
    finally:
        os.close(lock)


def verify_folder(folder: Path, trust: Trust, name: str) -> tuple[str, str]:
    """Digest of an artifact folder, and id of the trusted key that signed it under a name.

    Raises:
        ArtifactError: E_SIG, or a refusal of the loader.
    """
    from specctl.artifacts.load import load_files  # here: it needs torch

    files = read_folder(folder)
    digest = load_files(files, artifact=str(folder)).digest
    envelopes = [files[SIGNATURE]] if SIGNATURE in files else []
    [envelope] = trust.accepted(envelopes, digest, name)
    return digest, trust.verify(parse_envelope(envelope), name)


class UntrustedError(ArtifactError):
    """What a trust file does not accept, though it is whole (E_SIG)."""


def _unsigned(name: str, found: str = "there is none", fix: str = "") -> UntrustedError:
    problem = f"{name} needs a signature by a key that is trusted for it, but {found}"
    return UntrustedError(
        "E_SIG", "signature", problem, hint=f"{fix}; or {_SIGN}" if fix else _SIGN
    )
