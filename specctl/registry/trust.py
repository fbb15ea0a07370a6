"""The user's trust file: trusted keys, their names, roles and ends, and the names to be signed.

Nobody is trusted unless the user says so, and nothing in a registry changes that. The file is
strict JSON in the user's configuration folder; a file that others can write is refused, since they
would decide whom this user trusts.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from specctl.artifacts.files import read_folder, read_plain
from specctl.artifacts.manifest import SIGNATURE, UtcTime, utc_now
from specctl.artifacts.signing import (
    PUBLIC_KEY_BYTES,
    WRITABLE,
    Base64,
    Envelope,
    Statement,
    bad_signature,
    key_id_of,
    parse_envelope,
    parse_statement,
)
from specctl.artifacts.strict_json import parse_strict
from specctl.durable import make_folder, output_errors, replace_file
from specctl.errors import ArtifactError, UsageError, check_choice, reason_of, shown
from specctl.records import Record, canonical_json, describe_violation, require
from specctl.registry.userdirs import config_home

Role = Literal["publisher", "promoter"]
"""Publishers sign artifacts and their publication, promoters sign moves of aliases."""
_GLOB = r"^[a-z0-9._+@:*-]{1,256}$"
Glob = Annotated[str, Field(pattern=_GLOB)]
"""`*` stands for any characters; nothing else is special."""
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{0,256}$")]
MAX_KEYS, MAX_GLOBS, MAX_TRUST_BYTES = 256, 64, 1 << 20
_TIME = TypeAdapter(UtcTime)
_TRUST = "trust that key, if you know whose it is: specctl registry trust add"
_FETCH = "fetch it again: these are not the bytes that were signed"
_SIGN: dict[Role, str] = {
    "publisher": "sign it with --key of a publisher key: specctl registry push, or registry sign "
    "for a folder alone",
    "promoter": "sign it with --key of a promoter key: specctl registry promote or rollback",
}
RENEWAL: dict[Role, str] = {
    "publisher": "push it anew: specctl registry push FOLDER NAME --expires TIME (a folder alone: "
    "registry sign)",
    "promoter": "promote it anew: specctl registry promote NAME ALIAS VERSION --expires TIME",
}


class Revocation(Record):
    """Nothing of a revoked key is accepted, old or new: a thief can write any date."""

    at: UtcTime
    reason: Text


class TrustedKey(Record):
    """A public key, and the names and roles that it may sign for.

    Attributes:
        public_key: raw Ed25519 key of 32 bytes; base64 in JSON.
        not_after: UTC; nothing that it signed later is accepted.
    """

    key_id: Annotated[str, Field(pattern=r"^ed25519:[0-9a-f]{64}$")]
    public_key: Annotated[Base64, Field(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
    comment: Text
    names: Annotated[tuple[Glob, ...], Field(min_length=1, max_length=MAX_GLOBS)]
    roles: Annotated[tuple[Role, ...], Field(min_length=1, max_length=2)]
    not_after: UtcTime | None
    revoked: Revocation | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        require(
            self.key_id == key_id_of(self.public_key), "key_id must be the digest of public_key"
        )
        require(len(set(self.roles)) == len(self.roles), "roles: each once")
        return self

    @classmethod
    def of(
        cls,
        public_key: bytes,
        *,
        names: Sequence[str],
        roles: Sequence[str],
        not_after: str | None = None,
        comment: str = "",
    ) -> TrustedKey:
        """A key by its raw bytes, from the options of the command line.

        Raises:
            UsageError: a role, a name, a time or a comment that a trust file cannot hold.
        """
        for role in roles:
            check_choice("--role", role, get_args(Role))
        try:
            return cls(
                key_id=key_id_of(public_key),
                public_key=public_key,
                comment=comment,
                names=tuple(dict.fromkeys(names)),
                roles=tuple(dict.fromkeys(roles)),  # type: ignore[arg-type]  # judged here
                not_after=not_after,
                revoked=None,
            )
        except ValidationError as error:
            raise UsageError(
                "trusted key",
                expected="each role once; names of [a-z0-9._+@:-] and *",
                found=describe_violation(error),
                fix="correct that",
            ) from error

    def state(self, now: str) -> str:
        """Whether the signatures that it makes now are accepted, in words."""
        if self.revoked is not None:
            return f"revoked: {self.revoked.reason}"
        if self.not_after is not None and self.not_after < now:
            return "expired: trusted for what it signed before"
        return "trusted"


class Trust(Record):
    """Trusted keys, and the names that must be signed; by default neither.

    Attributes:
        trust_version: of the file's form.
        require: globs of the names under which nothing unsigned is accepted.
    """

    trust_version: Literal[1] = 1
    keys: Annotated[tuple[TrustedKey, ...], Field(max_length=MAX_KEYS)] = ()
    require: Annotated[tuple[Glob, ...], Field(max_length=MAX_GLOBS)] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        require(len({key.key_id for key in self.keys}) == len(self.keys), "keys: each once")
        return self

    @classmethod
    def load(cls, path: Path | None = None) -> Trust:
        """The trust of a file, by default the user's own, which may be absent: nobody is trusted.

        Raises:
            UsageError: a file that was named and is absent, that cannot be read, or that others may
                write.
            ArtifactError: E_SCHEMA for another form.
        """
        place = trust_path() if path is None else path
        try:
            data, status = read_plain(place, max_bytes=MAX_TRUST_BYTES, follow=True)
        except OSError as error:
            if path is None and isinstance(error, FileNotFoundError):
                return cls()
            raise UsageError(
                f"trust file {place}",
                expected="a file that can be read",
                found=reason_of(error),
                fix="check the path; `specctl registry trust add` makes one",
            ) from error
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022:
            raise UsageError(
                f"trust file {place}",
                expected="a file that its owner alone can write",
                found=stat.filemode(status.st_mode),
                fix=f"read it, then chmod go-w {place}",
            )
        return cls.parse(data, f"trust file {place}")

    @classmethod
    def parse(cls, data: bytes, what: str = "trust file") -> Trust:
        """The trust in some JSON (E_SCHEMA for any other form: nothing has a default there)."""
        fields = f"the fields {', '.join(cls.model_fields)} of version 1"
        try:
            parse_strict(data)
            found = cls.model_validate_json(data)
            if found.model_fields_set == cls.model_fields.keys():
                return found
            expected, wrong = fields, "fewer"
        except ArtifactError as error:
            expected, wrong = error.expected, error.found
        except ValidationError as error:
            expected, wrong = fields, describe_violation(error)
        fix = "correct or restore it"
        raise ArtifactError("E_SCHEMA", what, expected=expected, found=wrong, fix=fix)

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return canonical_json(self.model_dump(mode="json")).encode() + b"\n"

    def key(self, key_id: str) -> TrustedKey | None:
        """A key by its id."""
        return next((key for key in self.keys if key.key_id == key_id), None)

    def requires(self, name: str) -> bool:
        """Whether nothing unsigned is accepted under a name."""
        return _covers(self.require, name)

    def with_key(self, key: TrustedKey) -> Trust:
        """This trust with one key more; one that is there gets these names, roles and end.

        Raises:
            UsageError: the key was revoked, which is for good.
        """
        known = self.key(key.key_id)
        if known is not None and known.revoked is not None:
            raise UsageError(
                f"key {key.key_id}",
                expected="a key that is not revoked",
                found=f"one revoked {known.revoked.at}",
                fix="make a new key: specctl registry keygen",
            )
        others = tuple(one for one in self.keys if one.key_id != key.key_id)
        return Trust(keys=(*others, key), require=self.require)

    def with_revoked(self, key_id: str, reason: str) -> Trust:
        """This trust without a key, which stays listed, so that nobody adds it again."""
        if self.key(key_id) is None:
            listed = ", ".join(one.key_id[:20] for one in self.keys) or "a listed key"
            fix = "take it from `specctl registry trust list`"
            raise UsageError("key", expected=listed, found=key_id, fix=fix)
        revoked = {"revoked": Revocation(at=utc_now(), reason=shown(reason)[:256])}
        keys = (
            one.model_copy(update=revoked) if one.key_id == key_id else one for one in self.keys
        )
        return Trust(keys=tuple(keys), require=self.require)

    def with_required(self, glob: str) -> Trust:
        """This trust, with signatures required for the names that a glob covers."""
        if not re.fullmatch(_GLOB, glob):
            expected, found = "[a-z0-9._+@:-] and *", ascii(glob)[:80]
            raise UsageError("names", expected=expected, found=found, fix="correct it")
        return Trust(keys=self.keys, require=tuple(dict.fromkeys((*self.require, glob))))

    def verify(
        self, envelope: Envelope, *, name: str, role: Role, created: str, since: str = ""
    ) -> tuple[str, ...]:
        """Ids of the trusted keys that signed an envelope, sorted; at least one (else E_SIG).

        Args:
            created: UTC, the date that the payload bears.
            since: UTC; it was not signed before that, whatever date it bears. Default: not known.
        """
        signed, doubts, cures = list[str](), list[str](), list[str]()
        behind = f", behind entries of {since} and later" if since > created else ""
        late = list[str]()
        for one in envelope.signatures:
            key, cure = self.key(one.key_id), [_TRUST, _SIGN[role]]
            if key is None:
                doubt = "is not trusted"
            elif key.revoked is not None:  # for good, so trusting it is no cure
                doubt, cure = f"was revoked {key.revoked.at} ({key.revoked.reason})", [_SIGN[role]]
            elif role not in key.roles:
                doubt = f"is no {role}"
            elif not _covers(key.names, name):
                doubt = f"may not sign for {name}"
            elif not envelope.is_signed_by(key.public_key):
                doubt, cure = "did not sign these bytes", [_FETCH]
            elif key.not_after is not None and max(created, since) > key.not_after:
                late.append(f"{one.key_id[:20]} expired {key.not_after}, signed {created}{behind}")
                continue
            else:
                signed.append(one.key_id)
                continue
            doubts.append(f"{one.key_id[:20]} {doubt}")
            cures += cure
        if not signed:
            raise _unsigned(name, role, late or doubts, cures)
        return tuple(sorted(signed))

    def accepted(
        self, envelopes: Iterable[bytes], digest: str, *, name: str, now: str
    ) -> dict[bytes, tuple[str, ...]]:
        """Envelopes over an artifact under a name that trusted publishers signed, with the ids of
        their keys; the one with the most keys comes first.

        Raises:
            ArtifactError: E_SIG if none is right: unsigned, of unknown, revoked or expired keys, of
                another manifest or name. E_STALE if those that are right have expired.
        """
        good = dict[bytes, tuple[str, ...]]()
        refusals = list[tuple[bool, ArtifactError]]()
        for data in envelopes:
            is_strange = True
            try:
                found = parse_envelope(data)
                is_strange = not any(self.key(one.key_id) for one in found.signatures)
                stated = parse_statement(data)
                times = stated.predicate
                keys = self.verify(found, name=name, role="publisher", created=times.created)
                _check_statement(stated, digest, name, now)
                good[data] = keys
            except ArtifactError as refusal:
                refusals.append((is_strange, refusal))
        if not good:
            if not refusals:
                raise _unsigned(name, "publisher", [], [])
            # One of a known key says more than those of strangers.
            raise min(refusals, key=lambda one: one[0])[1]
        return dict(sorted(good.items(), key=lambda one: -len(one[1])))


def _check_statement(stated: Statement, digest: str, name: str, now: str) -> None:
    """Refuses a statement that has expired (E_STALE), or of something else (E_SIG)."""
    expires, (found_digest, found_name) = stated.predicate.expires, stated.about
    if expires is not None and expires <= now:
        raise ArtifactError(
            "E_STALE",
            "signed statement",
            expected=f"one that still holds at {now}",
            found=f"one that expired {expires}",
            fix=RENEWAL["publisher"],
        )
    if found_digest != digest:
        raise bad_signature(f"one of {digest}", f"one of {found_digest}")
    if found_name != name:
        raise bad_signature(f"one for the name {name}", f"one for {found_name}")


def trust_path() -> Path:
    """The user's trust file: in `$XDG_CONFIG_HOME/specctl`, else in `~/.config/specctl`."""
    return config_home() / "trust.json"


def edit_trust(path: Path | None, change: Callable[[Trust], Trust]) -> None:
    """Changes a trust file whole or not at all, one process at a time.

    Raises:
        OutputError: it cannot be written.
        UsageError, ArtifactError: see `Trust.load`; or what the change raises.
    """
    place = trust_path() if path is None else path
    with output_errors(place, "trust file", WRITABLE):
        make_folder(place.absolute().parent)
        lock = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        changed = change(Trust.load(place) if place.exists() else Trust())
        with output_errors(place, "trust file", WRITABLE):
            # For its owner alone to write, whatever the umask says.
            replace_file(place, changed.to_bytes(), mode=0o644)
    finally:
        os.close(lock)


def verify_folder(folder: Path, trust: Trust, name: str) -> tuple[str, tuple[str, ...]]:
    """The digest of an artifact's folder that trusted keys signed under a name, and their ids.

    Raises:
        ArtifactError: E_SIG, E_STALE, or a refusal of the loader.
    """
    from specctl.artifacts.load import load_files  # here: it needs torch

    files = read_folder(folder)
    digest = load_files(files, artifact=str(folder)).digest
    envelopes = [files[SIGNATURE]] if SIGNATURE in files else []
    [keys] = trust.accepted(envelopes, digest, name=name, now=utc_now()).values()
    return digest, keys


def check_time_to_come(text: str | None, option: str) -> str | None:
    """A UTC time that is not past (else UsageError); None is none."""
    if text is None:
        return None
    try:
        _TIME.validate_python(text)
    except ValidationError:
        found = ascii(text)[:40]
    else:
        if utc_now() < text:
            return text
        found = f"{text}, which is past"
    expected = "a UTC time to come, e.g. 2027-01-31T12:00:00Z"
    raise UsageError(option, expected=expected, found=found, fix="correct it")


def _unsigned(name: str, role: Role, doubts: Sequence[str], cures: Sequence[str]) -> ArtifactError:
    return bad_signature(
        f"a signature for {name} of a {role} key that is trusted for it",
        "; ".join(doubts) or "no signature",
        "; or ".join(dict.fromkeys(cures)) or _SIGN[role],
    )


def _covers(globs: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
