"""The verdict on signatures: whether enough believed keys signed this, for this, in time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from urllib.parse import unquote

from specctl.artifacts.manifest import utc_now
from specctl.artifacts.signing.dsse import Envelope, bad_signature, pae, parse_envelope
from specctl.artifacts.signing.keys import is_signature
from specctl.artifacts.signing.records import NOBODY, Role, TrustedKey, TrustRecord, matches
from specctl.artifacts.signing.refusals import (
    FORGED,
    STRANGER,
    UNSIGNED,
    Doubt,
    stale,
    too_few,
    unbelieved,
)
from specctl.artifacts.signing.statement import STATEMENT_TYPE, check_statement
from specctl.artifacts.signing.times import out_of_time, times_of
from specctl.errors import ArtifactError

MAX_ENVELOPES = 1024
"""Of one artifact that name a known key; more are not looked at. As many as a registry reads: any
smaller number would let whoever may add signatures hide a good one behind forged ones."""


@dataclass(frozen=True)
class Verified:
    """What believed keys signed.

    Attributes:
        key_ids: of those keys, sorted.
    """

    payload: bytes
    key_ids: tuple[str, ...]


@dataclass(frozen=True)
class Trust:
    """Whom this machine believes. The default believes nobody and asks for no signature.

    Attributes:
        within: of a delegated key, by its id, globs of the names that the roots which delegated
            it are trusted for: it is believed for no other.
    """

    record: TrustRecord = NOBODY
    within: tuple[tuple[str, tuple[str, ...]], ...] = ()

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
        return replace(self, record=self.record.model_copy(update={"keys": keys}))

    @property
    def has_root(self) -> bool:
        """Whether settings count by a signature alone; a revoked root still asks for one."""
        return any("root" in key.roles for key in self.record.keys)

    def has_root_of(self, name: str) -> bool:
        """Whether a root of ours is trusted for a name."""
        return any("root" in key.roles and matches(name, key.names) for key in self.record.keys)

    def is_for(self, verified: Verified, name: str) -> bool:
        """Whether one of the keys that signed something is trusted for a name."""
        return matches(name, self._names_of(verified))

    def requires(self, name: str) -> bool:
        """Whether nothing unsigned is accepted under a name."""
        return matches(name, self.record.require)

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
        """What an envelope holds, if enough believed keys signed it.

        Args:
            payload_type: the only one that is accepted. The payload is a JSON object with `created`
                and `expires`, at its top or in `predicate`.
            name: what it is signed for. role: what its keys must be allowed to do.
            since: UTC; it was not signed before that, whatever date it bears. Default: not known.

        Raises:
            ArtifactError: E_SIG, or E_STALE for a payload past its expiry.
            UsageError: cryptography is not installed.
        """
        found, at = parse_envelope(envelope), now or utc_now()
        return self._enough([self._judge(found, payload_type, name, role, at, since)], role)

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
        """Those envelopes that `verify_artifact` believes, with what it raises; the one that most
        believed keys signed comes first."""
        return self._artifact(envelopes, manifest_digest, name, now)[1]

    def with_delegated(self, record: TrustRecord, verified: Verified | None) -> Trust:
        """This trust and what a registry's settings add to it.

        Revocations and requirements of a record always count: they only tighten. Its keys count
        where one of our own roots signed it, for names that this root is trusted for, and never as
        roots: no chain of roots is followed, so a new root is added by hand. That the newest
        record does not loosen what older ones said, where no root signs, is for the caller to see
        to: it adds them all.

        Args:
            verified: the record's own verification with role root; None if it is not signed so.
        """
        ours, theirs = self.record, record
        keys = [_revoked_by(key, theirs.key(key.key_id)) for key in ours.keys]
        within = self.within
        if verified is not None:
            new = [key for key in theirs.keys if ours.key(key.key_id) is None]
            keys += [limited for key in new for limited in _without_root(key)]
            within += tuple((key.key_id, self._names_of(verified)) for key in new)
        merged = {
            "keys": tuple(keys),
            "require": tuple(dict.fromkeys((*ours.require, *theirs.require))),
            "threshold": max(ours.threshold, theirs.threshold),
        }
        return Trust(ours.model_copy(update=merged), within)

    def _names_of(self, verified: Verified) -> tuple[str, ...]:
        """Globs of all names that the keys which signed something are trusted for."""
        keys = [key for key in self.record.keys if key.key_id in verified.key_ids]
        return tuple(glob for key in keys for glob in key.names)

    def _is_within(self, key_id: str, name: str) -> bool:
        """Whether who delegated a key could; our own keys are nobody's."""
        return all(matches(name, globs) for known, globs in self.within if known == key_id)

    def _artifact(
        self, envelopes: Iterable[bytes], manifest_digest: str, name: str, now: str
    ) -> tuple[Verified, tuple[bytes, ...]]:
        """The verdict on an artifact's envelopes, and which of them it rests on."""
        good: dict[bytes, Verified] = {}
        refusals: list[ArtifactError] = []
        strangers: list[ArtifactError] = []
        for data, found in islice(self._of_known_keys(envelopes, name, strangers), MAX_ENVELOPES):
            try:
                verified = self._judge(found, STATEMENT_TYPE, name, "publisher", now)
                check_statement(verified.payload, manifest_digest, name)
                good[data] = verified
            except ArtifactError as refusal:
                refusals.append(refusal)
        if not good:
            raise next(iter([*refusals, *strangers]), unbelieved(name, "publisher", [UNSIGNED]))
        best = sorted(good, key=lambda data: -len(good[data].key_ids))
        return self._enough(list(good.values()), "publisher"), tuple(best)

    def _of_known_keys(
        self, envelopes: Iterable[bytes], name: str, strangers: list[ArtifactError]
    ) -> Iterator[tuple[bytes, Envelope]]:
        """Envelopes that name a key of the record. The first refusal of another is noted."""
        known = {key.key_id for key in self.record.keys}
        for data in envelopes:
            try:
                found = parse_envelope(data)
                if known.isdisjoint(one.key_id for one in found.signatures):
                    _, doubts = self._signers(found, name, "publisher")
                    raise unbelieved(name, "publisher", doubts)
            except ArtifactError as refusal:
                strangers[:] = strangers or [refusal]
            else:
                yield data, found

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
            raise unbelieved(name, role, doubts)
        times = times_of(envelope.payload)  # looked into only once a believed key signed it
        late = {key.key_id: why for key in signed if (why := out_of_time(key, times, since))}
        in_time = [key.key_id for key in signed if key.key_id not in late]
        if not in_time:
            late_ones = [Doubt(f"{key_id[:20]} {why}") for key_id, why in late.items()]
            raise unbelieved(name, role, late_ones)
        if times.expires is not None and times.expires <= now:
            raise stale(role, times.expires, now)
        return Verified(envelope.payload, tuple(sorted(in_time)))

    def _signers(
        self, envelope: Envelope, name: str, role: Role
    ) -> tuple[list[TrustedKey], list[Doubt]]:
        """Keys whose signature is right, and why the others do not count."""
        data = pae(envelope.payload_type, envelope.payload)
        signed, doubts = [], []
        for one in envelope.signatures:
            key = self.record.key(one.key_id)
            doubt = STRANGER if key is None else self._doubt(key, name, role)
            if doubt is None and key is not None:
                doubt = None if is_signature(key.raw, one.signature, data) else FORGED
            if doubt is not None:
                doubts.append(replace(doubt, why=f"{one.key_id[:20]} {doubt.why}"))
            elif key is not None:
                signed.append(key)
        return signed, doubts

    def _doubt(self, key: TrustedKey, name: str, role: Role) -> Doubt | None:
        """Why a known key is not believed in this, whatever it signed."""
        if key.revoked is not None:  # for good: nothing is left to decide about it
            return Doubt(f"was revoked {key.revoked.at} ({key.revoked.reason})")
        if role not in key.roles:
            return Doubt(f"is no {role}", ("sign", "trust"))
        if not matches(name, key.names):
            return Doubt(f"may not sign for {name}", ("sign", "trust"))
        if not self._is_within(key.key_id, name):
            return Doubt(f"may not sign for {name}: the root behind it is not trusted for that")
        return None

    def _enough(self, verified: list[Verified], role: Role) -> Verified:
        keys = {key_id for one in verified for key_id in one.key_ids}
        if len(keys) < self.record.threshold:
            raise too_few(role, self.record.threshold, len(keys))
        return Verified(verified[0].payload, tuple(sorted(keys)))


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
    """A folder by its real path, of OCI the log's: another way to it is no way around its root."""
    content, mark, log = url.rpartition("?log=")
    folder = unquote(log) if mark else log
    return content + mark + (os.path.realpath(folder) if os.path.isabs(folder) else log)
