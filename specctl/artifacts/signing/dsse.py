"""DSSE v1: bytes, the type that they are of, and who signed both.

What is signed is the pre-authentication encoding of type and payload, so bytes signed as one type
are never a signature of another. The envelope names no algorithm: the key decides. Reading is
strict (github.com/secure-systems-lab/dsse allows more: URL-safe base64, unknown fields).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import Field, ValidationError

from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError
from specctl.policy.base import Record
from specctl.policy.parse import canonical_json, describe_violation

MAX_ENVELOPE_BYTES = 1 << 20
"""A trust record with hundreds of keys has a tenth of that."""
MAX_SIGNATURES = 16
_TYPE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.+/_-]{0,127}")


@dataclass(frozen=True)
class Signature:
    """What a key made of the pre-authentication encoding; unverified until `Trust` says so."""

    key_id: str
    signature: bytes


@dataclass(frozen=True)
class Envelope:
    """A payload, its media type, and any number of signatures."""

    payload_type: str
    payload: bytes
    signatures: tuple[Signature, ...]


class Signs(Protocol):
    """A key that can sign; `SigningKey` is one."""

    @property
    def key_id(self) -> str: ...
    def sign_bytes(self, data: bytes) -> bytes: ...


class _SignatureJson(Record):
    keyid: str = Field(min_length=1, max_length=128)
    sig: str


class _EnvelopeJson(Record):
    payload: str
    payloadType: str  # noqa: N815  the field's name in the standard
    signatures: tuple[_SignatureJson, ...] = Field(max_length=MAX_SIGNATURES)


def pae(payload_type: str, payload: bytes) -> bytes:
    """The pre-authentication encoding: the bytes that a signature is of."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def envelope_bytes(
    payload_type: str, payload: bytes, signatures: Iterable[Signature] = ()
) -> bytes:
    """An envelope as canonical JSON; without signatures it vouches for nothing."""
    signed = [{"keyid": one.key_id, "sig": _encode(one.signature)} for one in signatures]
    tree = {"payload": _encode(payload), "payloadType": payload_type, "signatures": signed}
    return canonical_json(tree).encode()


def add_signature(data: bytes, key: Signs) -> bytes:
    """The envelope with one more signature over the same payload.

    Raises:
        ArtifactError: E_SIG for bytes that are not an envelope.
    """
    found = parse_envelope(data)
    made = Signature(key.key_id, key.sign_bytes(pae(found.payload_type, found.payload)))
    others = [one for one in found.signatures if one.key_id != key.key_id]
    return envelope_bytes(found.payload_type, found.payload, [*others, made])


def parse_envelope(data: bytes) -> Envelope:
    """The envelope of some bytes; its signatures are not verified here.

    Raises:
        ArtifactError: E_SIG for anything but strict JSON of the three fields, standard base64 in
            its one form, at most `MAX_SIGNATURES` signatures of different keys.
    """
    if len(data) > MAX_ENVELOPE_BYTES:
        raise bad_signature(f"at most {MAX_ENVELOPE_BYTES} bytes", f"{len(data)}")
    found = _parse_json(data)
    if not _TYPE.fullmatch(found.payloadType):
        raise bad_signature("a media type", repr(found.payloadType))
    keys = [one.keyid for one in found.signatures]
    if len(set(keys)) < len(keys):
        raise bad_signature("one signature of each key", "two of one key")
    signatures = tuple(Signature(one.keyid, _decode(one.sig)) for one in found.signatures)
    return Envelope(found.payloadType, _decode(found.payload), signatures)


def _parse_json(data: bytes) -> _EnvelopeJson:
    try:
        parse_strict(data)
        return _EnvelopeJson.model_validate_json(data)
    except ArtifactError as error:
        raise bad_signature(error.expected, error.found) from None
    except ValidationError as error:
        fields = "payload, payloadType and signatures"
        raise bad_signature(fields, describe_violation(error)) from None


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise bad_signature("standard base64", "other characters or padding") from None
    if _encode(data) != text:  # bits behind the end: two texts of one value
        raise bad_signature("base64 in its one form", "bits behind the end")
    return data


def bad_signature(expected: str, found: Any, fix: str = "do not load it") -> ArtifactError:
    """The refusal of a signature (E_SIG)."""
    return ArtifactError("E_SIG", "signature", expected=expected, found=str(found), fix=fix)
