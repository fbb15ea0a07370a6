"""The verdict on signatures: whether enough believed keys signed this, for this, in time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from specctl.artifacts.facts import UtcTime, utc_now
from specctl.artifacts.signing.dsse import Envelope, bad_signature, pae, parse_envelope
from specctl.artifacts.signing.keys import is_signature
from specctl.artifacts.signing.records import NOBODY, Role, TrustedKey, TrustRecord, matches
from specctl.artifacts.signing.statement import STATEMENT_TYPE, check_statement
from specctl.artifacts.strict_json import parse_strict, shown
from specctl.errors import ArtifactError
from specctl.policy.base import Record
from specctl.policy.parse import describe_violation

MAX_ENVELOPES = 64
"""Of one artifact; more are not looked at."""


@dataclass(frozen=True)
class Verified:
    """What believed keys signed.

    Attributes:
        key_ids: of those keys, sorted.
    """

    payload: bytes
    key_ids: tuple[str, ...]


class _Times(Record):
    created: UtcTime
    expires: UtcTime | None


@dataclass(frozen=True)
class Trust:
    """Whom this machine believes. The default believes nobody and asks for no signature."""

    record: TrustRecord = NOBODY

    @classmethod
    def load(cls, path: Path | None = None) -> Trust:
        """That of a trust file, by default the user's own; a user without one believes nobody.

        Raises:
            UsageError: a file that was named and cannot be read.
            ArtifactError: E_SCHEMA for a file of another form.
        """
        from specctl.artifacts.signing.trust_file import read_trust

        return cls(read_trust(path))

    def at(self, url: str) -> Trust:
        """What of this holds in the registry of a URL: roots of other registries are none here."""
        keys = tuple(_at(key, url) for key in self.record.keys)
        return Trust(self.record.model_copy(update={"keys": keys}))

    @property
    def has_root(self) -> bool:
        """Whether settings count by a signature alone; a revoked root still asks for one."""
        return any("root" in key.roles for key in self.record.keys)

    def requires(self, name: str) -> bool:
        """Whether nothing unsigned is accepted under a name."""
        return matches(name, self.record.require)

    def verify(
        self, envelope: bytes, payload_type: str, *, name: str, role: Role, now: str | None = None
    ) -> Verified:
        """What an envelope holds, if enough believed keys signed it.

        Args:
            payload_type: the only one that is accepted. The payload is a JSON object with `created`
                and `expires`, at its top or in `predicate`.
            name: what it is signed for. role: what its keys must be allowed to do.

        Raises:
            ArtifactError: E_SIG, or E_STALE for a payload past its expiry.
            UsageError: cryptography is not installed.
        """
        found = parse_envelope(envelope)
        return self._enough([self._judge(found, payload_type, name, role, now or utc_now())])

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
        return self._artifact(envelopes, manifest_digest, name, now or utc_now())[0]

    def believed_envelopes(
        self, envelopes: Iterable[bytes], manifest_digest: str, *, name: str, now: str
    ) -> tuple[bytes, ...]:
        """Those envelopes that `verify_artifact` believes, with what it raises."""
        return self._artifact(envelopes, manifest_digest, name, now)[1]

    def with_delegated(self, record: TrustRecord, verified: Verified | None) -> Trust:
        """This trust and what a registry's settings add to it.

        Revocations and requirements of a record always count: they only tighten. Its keys count
        where one of our own roots signed it, and never as roots: no chain of roots is followed,
        so a new root is added by hand. That the newest record does not loosen what older ones
        said, where no root signs, is for the caller to see to: it adds them all.

        Args:
            verified: the record's own verification with role root; None if it is not signed so.
        """
        ours, theirs = self.record, record
        keys = [_revoked_by(key, theirs.key(key.key_id)) for key in ours.keys]
        if verified is not None:
            new = [key for key in theirs.keys if ours.key(key.key_id) is None]
            keys += [limited for key in new for limited in _without_root(key)]
        merged = {
            "keys": tuple(keys),
            "require": tuple(dict.fromkeys((*ours.require, *theirs.require))),
            "threshold": max(ours.threshold, theirs.threshold),
        }
        return Trust(ours.model_copy(update=merged))

    def _artifact(
        self, envelopes: Iterable[bytes], manifest_digest: str, name: str, now: str
    ) -> tuple[Verified, tuple[bytes, ...]]:
        """The verdict on an artifact's envelopes, and which of them it rests on."""
        good: dict[bytes, Verified] = {}
        refusals = []
        for data in islice(envelopes, MAX_ENVELOPES):
            try:
                found = parse_envelope(data)
                verified = self._judge(found, STATEMENT_TYPE, name, "publisher", now)
                check_statement(verified.payload, manifest_digest, name)
                good[data] = verified
            except ArtifactError as refusal:
                refusals.append(refusal)
        if not good:
            raise refusals[0] if refusals else _unbelieved(name, ["no signature"])
        return self._enough(list(good.values())), tuple(good)

    def _judge(
        self, envelope: Envelope, payload_type: str, name: str, role: Role, now: str
    ) -> Verified:
        """The believed keys of one envelope, at least one."""
        if envelope.payload_type != payload_type:
            raise bad_signature(f"one of {payload_type}", f"one of {envelope.payload_type}")
        signed, refusals = self._signers(envelope, name, role)
        if not signed:
            raise _unbelieved(name, refusals or ["no signature"])
        times = _times(envelope.payload)  # looked into only once a believed key signed it
        late = {key.key_id: why for key in signed if (why := _out_of_time(key, times))}
        in_time = [key.key_id for key in signed if key.key_id not in late]
        if not in_time:
            raise _unbelieved(name, [f"{key_id[:20]} {why}" for key_id, why in late.items()])
        if times.expires is not None and times.expires <= now:
            raise _stale(times.expires, now)
        return Verified(envelope.payload, tuple(sorted(in_time)))

    def _signers(
        self, envelope: Envelope, name: str, role: Role
    ) -> tuple[list[TrustedKey], list[str]]:
        """Keys whose signature is right, and why the others do not count."""
        data = pae(envelope.payload_type, envelope.payload)
        signed, refusals = [], []
        for one in envelope.signatures:
            key = self.record.key(one.key_id)
            why = _refusal(key, name, role)
            if key is not None and why is None and not is_signature(key.raw, one.signature, data):
                why = "did not sign these bytes"
            if key is None or why is not None:
                refusals.append(f"{one.key_id[:20]} {why}")
            else:
                signed.append(key)
        return signed, refusals

    def _enough(self, verified: list[Verified]) -> Verified:
        keys = {key_id for one in verified for key_id in one.key_ids}
        if len(keys) < self.record.threshold:
            fix = "let another publisher sign it too, or sign it first: specctl registry sign"
            raise bad_signature(f"{self.record.threshold} believed keys", str(len(keys)), fix)
        return Verified(verified[0].payload, tuple(sorted(keys)))


def _refusal(key: TrustedKey | None, name: str, role: Role) -> str | None:
    """Why a key is not believed in this, whatever it signed."""
    if key is None:
        return "is not trusted"
    if key.revoked is not None:
        return f"was revoked {key.revoked.at} ({key.revoked.reason})"
    if role not in key.roles:
        return f"is no {role}"
    return None if matches(name, key.names) else f"may not sign for {name}"


def _out_of_time(key: TrustedKey, times: _Times) -> str | None:
    if times.created < key.not_before:
        return f"was not valid before {key.not_before}, signed {times.created}"
    if key.not_after is not None and times.created > key.not_after:
        return f"expired {key.not_after}, signed {times.created}"
    return None


def _times(payload: bytes) -> _Times:
    """`created` and `expires` of a payload, at its top or in its predicate."""
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


def _revoked_by(ours: TrustedKey, theirs: TrustedKey | None) -> TrustedKey:
    if ours.revoked is not None or theirs is None or theirs.revoked is None:
        return ours
    return ours.model_copy(update={"revoked": theirs.revoked})


def _without_root(key: TrustedKey) -> list[TrustedKey]:
    roles = tuple(role for role in key.roles if role != "root")
    return [key.model_copy(update={"roles": roles, "registries": None})] if roles else []


def _at(key: TrustedKey, url: str) -> TrustedKey:
    """A key without its root role outside of its registries. It stays listed, maybe for nothing:
    what is known of it, a revocation above all, is not to be said anew by a delegation."""
    if key.registries is None or _place(url) in map(_place, key.registries):
        return key
    roles = tuple(role for role in key.roles if role != "root")
    return key.model_copy(update={"roles": roles, "registries": None})


def _place(url: str) -> str:
    """A folder by its real path: another way to it is no way around its root."""
    return os.path.realpath(url) if os.path.isabs(url) else url


def _unbelieved(name: str, refusals: list[str]) -> ArtifactError:
    return bad_signature(
        f"a signature for {name} of a key that is trusted for it",
        "; ".join(refusals),
        "fetch it again, or decide about the key: specctl registry trust add",
    )


def _stale(expires: str, now: str) -> ArtifactError:
    return ArtifactError(
        "E_STALE",
        "signed statement",
        expected=f"one that still holds at {now}",
        found=f"one that expired {shown(expires)}",
        fix="let a publisher sign it again",
    )
