"""The user's trust file: which keys are believed, for which names and roles, and until when.

Nobody is believed unless the user says so. The file is strict JSON in the user's configuration
folder; a file that others can write is refused, since they would decide whom this user believes.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from specctl.artifacts.describe import Description
from specctl.artifacts.files import read_folder
from specctl.artifacts.manifest import SIGNATURE, UtcTime, utc_now
from specctl.artifacts.signing import (
    PUBLIC_KEY_BYTES,
    STATEMENT_TYPE,
    WRITABLE,
    Envelope,
    bad_signature,
    check_statement,
    is_signature,
    key_id_of,
    pae,
    parse_envelope,
)
from specctl.artifacts.strict_json import parse_strict
from specctl.durable import make_folder, output_errors, replace_file
from specctl.errors import ArtifactError, UsageError
from specctl.plain_text import shown
from specctl.records import Record, canonical_json, describe_violation, require
from specctl.registry.userdirs import config_home

Role = Literal["publisher", "promoter"]
Glob = Annotated[str, Field(pattern=r"^[a-z0-9._+@:*-]{1,256}$")]
"""`*` stands for any characters; nothing else is special."""
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{0,256}$")]
MAX_KEYS, MAX_GLOBS, MAX_TRUST_BYTES = 256, 64, 1 << 20
MAX_ENVELOPES = 1024
"""Of one artifact that name a known key; as many as a registry reads, so that nobody who may add
signatures hides a good one behind forged ones."""
EVER = "1970-01-01T00:00:00Z"
_SIGN: dict[Role, str] = {
    "publisher": "sign it with --key of a publisher key: specctl registry push, or registry sign "
    "for a folder alone",
    "promoter": "sign it with --key of a promoter key: specctl registry promote or rollback",
}
_TRUST = "believe that key, if you know whose it is: specctl registry trust add"
_FETCH = "fetch it again: these are not the bytes that were signed"
_TIME = TypeAdapter(UtcTime)


class Revocation(Record):
    """Nothing of a revoked key is believed, old or new: a thief can write any date."""

    at: UtcTime
    reason: Text


class TrustedKey(Record):
    """A public key, and what it may sign.

    Attributes:
        public_key: raw Ed25519 key, 32 bytes in base64.
        names: globs of the names that it may sign for.
        not_before, not_after: UTC; of what was signed before and after, nothing is believed.
    """

    key_id: Annotated[str, Field(pattern=r"^ed25519:[0-9a-f]{64}$")]
    public_key: str
    comment: Text
    names: Annotated[tuple[Glob, ...], Field(min_length=1, max_length=MAX_GLOBS)]
    roles: Annotated[tuple[Role, ...], Field(min_length=1, max_length=2)]
    not_before: UtcTime
    not_after: UtcTime | None
    revoked: Revocation | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        require(len(self.raw) == PUBLIC_KEY_BYTES, "public_key: 32 bytes in base64")
        require(self.key_id == key_id_of(self.raw), "key_id must be the digest of public_key")
        require(len(set(self.roles)) == len(self.roles), "roles: each once")
        return self

    @property
    def raw(self) -> bytes:
        """The key's 32 bytes."""
        try:
            return base64.b64decode(self.public_key, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("public_key: standard base64") from None

    @classmethod
    def of(
        cls,
        public_key: bytes,
        *,
        names: tuple[str, ...],
        roles: tuple[Role, ...],
        not_before: str = EVER,
        not_after: str | None = None,
        comment: str = "",
    ) -> TrustedKey:
        """A key by its raw bytes."""
        return cls(
            key_id=key_id_of(public_key),
            public_key=base64.b64encode(public_key).decode(),
            comment=comment,
            names=names,
            roles=roles,
            not_before=not_before,
            not_after=not_after,
            revoked=None,
        )


class TrustRecord(Record):
    """Trusted keys, and which names must be signed.

    Attributes:
        require: globs of the names of which nothing unsigned is accepted.
        threshold: how many of the keys must have signed.
    """

    trust_version: Literal[1]
    keys: Annotated[tuple[TrustedKey, ...], Field(max_length=MAX_KEYS)]
    require: Annotated[tuple[Glob, ...], Field(max_length=MAX_GLOBS)]
    threshold: Annotated[int, Field(ge=1, le=16)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        require(len({key.key_id for key in self.keys}) == len(self.keys), "keys: each once")
        return self

    def key(self, key_id: str) -> TrustedKey | None:
        """A key by its id."""
        return next((key for key in self.keys if key.key_id == key_id), None)


NOBODY = TrustRecord(trust_version=1, keys=(), require=(), threshold=1)
"""No key is believed, and no signature is asked for."""


class _Times(Record):
    created: UtcTime
    expires: UtcTime | None


@dataclass(frozen=True)
class Verified:
    """A payload that believed keys signed; `key_ids` of those keys, sorted."""

    payload: bytes
    key_ids: tuple[str, ...]


@dataclass(frozen=True)
class Trust:
    """The keys that this machine believes; by default none, and no signature is asked for."""

    record: TrustRecord = NOBODY

    @classmethod
    def load(cls, path: Path | None = None) -> Trust:
        """The trust of a file, by default the user's own; see `read_trust`."""
        return cls(read_trust(path))

    def requires(self, name: str) -> bool:
        """Whether nothing unsigned is accepted under a name."""
        return _matches(name, self.record.require)

    def verify(
        self,
        envelope: bytes,
        payload_type: str,
        *,
        name: str,
        role: Role,
        now: str | None = None,
        since: str = "",
    ) -> Verified:
        """The payload of an envelope that enough believed keys signed.

        Args:
            payload_type: the only one that is accepted. The payload is a JSON object with `created`
                and `expires`, at its top or in `predicate`.
            name: what it is signed for. role: what its keys must be allowed to do.
            since: UTC; it was not signed before that, whatever date it bears. Default: not known.

        Raises:
            ArtifactError: E_SIG, or E_STALE for a payload past its expiry.
            UsageError: cryptography is not installed.
        """
        found = parse_envelope(envelope)
        judged = self._judge(found, payload_type, name, role, now or utc_now(), since)
        return self._enough([judged], role)

    def verify_artifact(
        self,
        envelopes: Iterable[bytes],
        manifest_digest: str,
        *,
        name: str,
        now: str | None = None,
    ) -> Verified:
        """The same of an artifact's statements, which may stand in envelopes of their own.

        Raises:
            ArtifactError: E_SIG if too few are right: unsigned, of unknown, revoked or expired
                keys, of another manifest, of another name. E_STALE if what is right has expired.
        """
        good = self._statements(envelopes, manifest_digest, name, now or utc_now())
        return self._enough(list(good.values()), "publisher")

    def believed_envelopes(
        self, envelopes: Iterable[bytes], manifest_digest: str, *, name: str, now: str
    ) -> tuple[bytes, ...]:
        """The envelopes that `verify_artifact` believes, with its refusals; the one that most
        believed keys signed comes first."""
        good = self._statements(envelopes, manifest_digest, name, now)
        self._enough(list(good.values()), "publisher")
        return tuple(sorted(good, key=lambda data: -len(good[data].key_ids)))

    def _statements(
        self, envelopes: Iterable[bytes], manifest_digest: str, name: str, now: str
    ) -> dict[bytes, Verified]:
        """Each envelope with a believed statement of the artifact; the best refusal if none has."""
        good: dict[bytes, Verified] = {}
        of_known, of_others = list[ArtifactError](), list[ArtifactError]()
        known = {key.key_id for key in self.record.keys}
        num_known = 0
        for data in envelopes:
            refusals = of_others
            try:
                envelope = parse_envelope(data)
                if not known.isdisjoint(one.key_id for one in envelope.signatures):
                    refusals, num_known = of_known, num_known + 1
                if num_known > MAX_ENVELOPES:
                    break
                verified = self._judge(envelope, STATEMENT_TYPE, name, "publisher", now)
                check_statement(verified.payload, manifest_digest, name)
                good[data] = verified
            except ArtifactError as refusal:
                refusals.append(refusal)
        if not good:
            raise next(iter([*of_known, *of_others]), _unbelieved(name, "publisher", []))
        return good

    def _judge(
        self,
        envelope: Envelope,
        payload_type: str,
        name: str,
        role: Role,
        now: str,
        since: str = "",
    ) -> Verified:
        """The believed keys of one envelope, at least one."""
        if envelope.payload_type != payload_type:
            raise bad_signature(f"one of {payload_type}", f"one of {envelope.payload_type}")
        signed, doubts = self._signers(envelope, name, role)
        if not signed:
            raise _unbelieved(name, role, doubts)
        times = _times_of(envelope.payload)  # looked into only once a believed key signed it
        late = {key.key_id: why for key in signed if (why := _out_of_time(key, times, since))}
        in_time = [key.key_id for key in signed if key.key_id not in late]
        if not in_time:
            doubts = [_Doubt(f"{key_id[:20]} {why}") for key_id, why in late.items()]
            raise _unbelieved(name, role, doubts)
        if times.expires is not None and times.expires <= now:
            raise ArtifactError(
                "E_STALE",
                "signed statement",
                expected=f"one that still holds at {now}",
                found=f"one that expired {times.expires}",
                fix=renewal(role),
            )
        return Verified(envelope.payload, tuple(sorted(in_time)))

    def _signers(
        self, envelope: Envelope, name: str, role: Role
    ) -> tuple[list[TrustedKey], list[_Doubt]]:
        """Keys whose signature is right, and why the others do not count."""
        data = pae(envelope.payload_type, envelope.payload)
        signed, doubts = [], []
        for one in envelope.signatures:
            key, why = self.record.key(one.key_id), ""
            cures: tuple[str, ...] = (_SIGN[role],)
            if key is None:
                why, cures = "is not trusted", (_SIGN[role], _TRUST)
            elif key.revoked is not None:  # for good: nothing is left to decide about it
                why = f"was revoked {key.revoked.at} ({key.revoked.reason})"
            elif role not in key.roles:
                why, cures = f"is no {role}", (_SIGN[role], _TRUST)
            elif not _matches(name, key.names):
                why, cures = f"may not sign for {name}", (_SIGN[role], _TRUST)
            elif not is_signature(key.raw, one.signature, data):
                why, cures = "did not sign these bytes", (_FETCH,)
            else:
                signed.append(key)
                continue
            doubts.append(_Doubt(f"{one.key_id[:20]} {why}", cures))
        return signed, doubts

    def _enough(self, verified: list[Verified], role: Role) -> Verified:
        keys = {key_id for one in verified for key_id in one.key_ids}
        if len(keys) < self.record.threshold:
            fix = f"let another {role} sign it too, or give --key once for each key that must sign"
            raise bad_signature(f"{self.record.threshold} believed keys", len(keys), fix)
        return Verified(verified[0].payload, tuple(sorted(keys)))


@dataclass(frozen=True)
class _Doubt:
    """Why one signature does not count, and what would mend that."""

    why: str
    cures: tuple[str, ...] = ()


def _unbelieved(name: str, role: Role, doubts: Sequence[_Doubt]) -> ArtifactError:
    cures = dict.fromkeys(cure for doubt in doubts for cure in doubt.cures or (_SIGN[role],))
    return bad_signature(
        f"a signature for {name} of a {role} key that is trusted for it",
        "; ".join(doubt.why for doubt in doubts) or "no signature",
        "; or ".join(cures) or _SIGN[role],
    )


def renewal(role: Role) -> str:
    """How what expired is made anew, by the role of its signer."""
    if role == "publisher":
        return "push it anew: specctl registry push FOLDER NAME --expires TIME (a folder alone: "
        "registry sign)"
    return "promote it anew: specctl registry promote NAME ALIAS VERSION --expires TIME"


def _times_of(payload: bytes) -> _Times:
    """`created` and `expires` of a payload, at its top or in its predicate (E_SIG without them)."""
    try:
        tree = parse_strict(payload)
        holder = tree.get("predicate", tree) if isinstance(tree, dict) else tree
        stated = holder if isinstance(holder, dict) else {}
        return _Times.model_validate({name: stated.get(name) for name in _Times.model_fields})
    except ArtifactError as error:
        raise bad_signature(error.expected, error.found) from None
    except ValidationError as error:
        expected = "a payload with created and expires"
        raise bad_signature(expected, describe_violation(error)) from None


def _out_of_time(key: TrustedKey, times: _Times, since: str) -> str | None:
    """Why a key could not sign something when it was signed; None if it could."""
    if times.created < key.not_before:
        return f"was not valid before {key.not_before}, signed {times.created}"
    if key.not_after is not None and max(times.created, since) > key.not_after:
        behind = f", behind entries of {since} and later" if since > times.created else ""
        return f"expired {key.not_after}, signed {times.created}{behind}"
    return None


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def verify_folder(
    folder: Path, trust: Trust, name: str, *, now: str | None = None
) -> tuple[str, Verified]:
    """The digest of an artifact that believed keys signed under a name, and which keys.

    Raises:
        ArtifactError: E_SIG, E_STALE, or what loading refuses.
    """
    from specctl.artifacts.load import load_files  # here: it needs torch

    files = read_folder(folder)
    digest = load_files(files, artifact=str(folder)).digest
    envelopes = [files[SIGNATURE]] if SIGNATURE in files else []
    return digest, trust.verify_artifact(envelopes, digest, name=name, now=now)


# ------------------------------------------------------------------ the file


def trust_path() -> Path:
    """The user's trust file: in `$XDG_CONFIG_HOME/specctl`, else in `~/.config/specctl`."""
    return config_home() / "trust.json"


def parse_trust(data: bytes, what: str = "trust record") -> TrustRecord:
    """The trust record of some JSON.

    Raises:
        ArtifactError: E_SCHEMA for anything else, duplicate keys and unknown fields included.
    """
    try:
        parse_strict(data)
        return TrustRecord.model_validate_json(data)
    except ArtifactError as error:
        expected, found = error.expected, error.found
    except ValidationError as error:
        expected, found = "the fields of trust version 1", describe_violation(error)
    fix = "correct or restore it"
    raise ArtifactError("E_SCHEMA", what, expected=expected, found=found, fix=fix)


def trust_bytes(record: TrustRecord) -> bytes:
    """Canonical JSON of a trust record."""
    return canonical_json(record.model_dump(mode="json")).encode()


def read_trust(path: Path | None = None) -> TrustRecord:
    """A trust file; the user's own may be missing, which is to believe nobody.

    Raises:
        UsageError: a file that was named and is missing, that cannot be read, or that others may
            write: they would decide whom this user believes.
        ArtifactError: E_SCHEMA for another form.
    """
    place = trust_path() if path is None else path
    try:
        # A pipe must not be waited for.
        with os.fdopen(os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode) or mode & 0o022:
                raise UsageError(
                    f"trust file {place}",
                    expected="a file that its owner alone can write",
                    found=stat.filemode(mode),
                    fix=f"look at what it says, then chmod go-w {place}",
                )
            data = file.read(MAX_TRUST_BYTES)
    except OSError as error:
        if path is None and isinstance(error, FileNotFoundError):
            return NOBODY
        raise UsageError(
            f"trust file {place}",
            expected="a file that can be read",
            found=error.strerror or type(error).__name__,
            fix="check the path; `specctl registry trust add` makes one",
        ) from error
    return parse_trust(data, f"trust file {place}")


@dataclass
class TrustEdit:
    """A trust record that is being changed; its `record` at the end is written."""

    record: TrustRecord

    def add(self, key: TrustedKey) -> None:
        """Trusts a key; one that is there already gets these names, roles and times.

        Raises:
            UsageError: the key was revoked, which is for good.
        """
        known = self.record.key(key.key_id)
        if known is not None and known.revoked is not None:
            raise UsageError(
                f"key {key.key_id}",
                expected="a key that is not revoked",
                found=f"one revoked {known.revoked.at}",
                fix="make a new key: specctl registry keygen",
            )
        others = tuple(one for one in self.record.keys if one.key_id != key.key_id)
        self._set(keys=(*others, key))

    def revoke(self, key_id: str, reason: str) -> None:
        """Never believes a key again; it stays listed, so that nobody adds it anew."""
        revocation = Revocation(at=utc_now(), reason=shown(reason)[:256])
        revoked = self._known(key_id).model_copy(update={"revoked": revocation})
        keys = tuple(revoked if key.key_id == key_id else key for key in self.record.keys)
        self._set(keys=keys)

    def remove(self, key_id: str) -> None:
        """Forgets a key."""
        self._known(key_id)
        self._set(keys=tuple(key for key in self.record.keys if key.key_id != key_id))

    def require(self, glob: str) -> None:
        """Asks for signatures under the names that a glob covers.

        Raises:
            UsageError: a glob that covers no name.
        """
        if not re.fullmatch(r"[a-z0-9._+@:*-]{1,256}", glob):
            raise UsageError(
                "names", expected="[a-z0-9._+@:-] and *", found=ascii(glob)[:80], fix="correct it"
            )
        self._set(require=tuple(dict.fromkeys((*self.record.require, glob))))

    def _known(self, key_id: str) -> TrustedKey:
        key = self.record.key(key_id)
        if key is None:
            listed = ", ".join(one.key_id[:20] for one in self.record.keys)
            raise UsageError(
                "key", expected=listed or "a listed key", found=key_id, fix="registry trust list"
            )
        return key

    def _set(self, **changed: Any) -> None:
        tree = dict(iter(self.record)) | changed  # `keys` is a field: a plain dict() would call it
        self.record = TrustRecord.model_validate(tree)


@contextmanager
def edit_trust(path: Path | None = None) -> Iterator[TrustEdit]:
    """Changes a trust file whole or not at all, one process at a time.

    Raises:
        OutputError: it cannot be written.
        ArtifactError: E_SCHEMA for a file of another form.
    """
    place = trust_path() if path is None else path
    with output_errors(place, "trust file", WRITABLE):
        make_folder(place.absolute().parent)
        lock = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        edit = TrustEdit(read_trust(place) if place.exists() else NOBODY)
        yield edit
        with output_errors(place, "trust file", WRITABLE):
            # For its owner alone to write, whatever the umask says.
            replace_file(place, trust_bytes(edit.record) + b"\n", mode=0o644)
    finally:
        os.close(lock)


# ------------------------------------------------------------------ words of the command line


def check_time(text: str | None, option: str, *, to_come: bool = True) -> str | None:
    """A UTC time; None is none.

    Args:
        to_come: refuse one that is past.

    Raises:
        UsageError: another form, or a past time.
    """
    if text is None:
        return None
    try:
        _TIME.validate_python(text)
    except ValidationError:
        found = ascii(text)[:40]
    else:
        if not to_come or utc_now() < text:
            return text
        found = f"{text}, which is past"
    expected = f"a UTC time{' to come' if to_come else ''}, e.g. 2027-01-31T12:00:00Z"
    raise UsageError(option, expected=expected, found=found, fix="correct it")


def trusted_key(
    public_key: bytes,
    *,
    names: Sequence[str],
    roles: Sequence[str],
    not_before: str | None = None,
    not_after: str | None = None,
    comment: str = "",
) -> TrustedKey:
    """A key to trust, from the options of the command line.

    Args:
        not_before: None believes what it signed before it was added, too.

    Raises:
        UsageError: a role, a name, a time or a comment that a trust record cannot hold.
    """
    since = check_time(not_before, "--not-before", to_come=False)
    until = check_time(not_after, "--not-after")
    if since is not None and until is not None and until <= since:
        raise UsageError(
            "--not-after",
            expected=f"a time after --not-before, {since}",
            found=until,
            fix="correct one of them: such a key is never believed",
        )
    try:
        return TrustedKey.of(
            public_key,
            names=tuple(dict.fromkeys(names)),
            roles=tuple(dict.fromkeys(roles)),  # type: ignore[arg-type]  # judged by the record
            not_before=since or EVER,
            not_after=until,
            comment=comment,
        )
    except ValidationError as error:
        raise UsageError(
            "trusted key",
            expected="roles publisher, promoter; names of [a-z0-9._+@:-] and *",
            found=describe_violation(error),
            fix="correct that",
        ) from error


def describe_trust(record: TrustRecord) -> Description:
    """The keys as a table, and the names that must be signed."""
    facts = (
        ("signatures required for", ", ".join(record.require) or "nothing"),
        ("keys that must have signed", str(record.threshold)),
    )
    now, rows = utc_now(), []
    for key in record.keys:
        if key.revoked is not None:
            state = f"revoked: {key.revoked.reason}"
        elif now < key.not_before:
            state = f"not before {key.not_before}"
        elif key.not_after is not None and key.not_after < now:
            state = "expired: believed for what it signed before"
        else:
            state = "believed"
        listed = (", ".join(key.roles), ", ".join(key.names), key.not_after or "open")
        rows.append(tuple(shown(cell) for cell in (key.key_id, *listed, state, key.comment)))
    columns = ("key", "roles", "names", "until", "state", "comment")
    return Description("trust", facts, columns, tuple(rows))
