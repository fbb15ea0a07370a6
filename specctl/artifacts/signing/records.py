"""Whom to believe, and for what: the trust record, a strict JSON file or an entry of a registry."""

from __future__ import annotations

import base64
import binascii
import re
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from specctl.artifacts.manifest import UtcTime
from specctl.artifacts.signing.keys import PUBLIC_KEY_BYTES, key_id_of
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError
from specctl.policy.base import Record, require
from specctl.policy.parse import canonical_json, describe_violation

TRUST_VERSION: Final = 1
MAX_KEYS, MAX_GLOBS = 256, 64
Role = Literal["publisher", "promoter", "root"]
"""publisher: artifacts and their publication. promoter: aliases. root: a registry's settings."""
ROLES: tuple[Role, ...] = get_args(Role)
KeyId = Annotated[str, Field(pattern=r"^ed25519:[0-9a-f]{64}$")]
Glob = Annotated[str, Field(pattern=r"^[a-z0-9._+@:*-]{1,256}$")]
"""`*` stands for any characters; nothing else is special."""
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{0,256}$")]
RegistryUrl = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,2048}$")]


class Revocation(Record):
    """From when on nothing of a key is believed, old or new: a thief can write any date."""

    at: UtcTime
    reason: Text


class TrustedKey(Record):
    """A public key, and what it may sign.

    Attributes:
        public_key: raw Ed25519 key, 32 bytes in base64.
        names: globs of the names that it may sign for.
        not_before, not_after: UTC; of what was signed before and after, nothing is believed.
        registries: of a root, the URLs of the registries that it is one for, as the user asks for
            them; None is every registry. It is written only where it is given.
    """

    key_id: KeyId
    public_key: str
    comment: Text
    names: Annotated[tuple[Glob, ...], Field(min_length=1, max_length=MAX_GLOBS)]
    roles: Annotated[tuple[Role, ...], Field(min_length=1)]
    not_before: UtcTime
    not_after: UtcTime | None
    revoked: Revocation | None
    registries: Annotated[tuple[RegistryUrl, ...], Field(min_length=1, max_length=MAX_GLOBS)] | (
        None
    ) = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        require(len(self.raw) == PUBLIC_KEY_BYTES, "public_key: 32 bytes in base64")
        require(self.key_id == key_id_of(self.raw), "key_id must be the digest of public_key")
        require(len(set(self.roles)) == len(self.roles), "roles: each once")
        require(self.registries is None or "root" in self.roles, "registries: only of a root")
        return self

    @model_serializer(mode="wrap")
    def _plain(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Records of all users but those who scope a root stay as they were."""
        tree: dict[str, Any] = write(self)
        if self.registries is None:
            tree.pop("registries", None)
        return tree

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
        not_before: str,
        not_after: str | None = None,
        comment: str = "",
        registries: tuple[str, ...] | None = None,
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
            registries=registries,
        )


class TrustRecord(Record):
    """Trusted keys, and which names must be signed.

    Attributes:
        require: globs of the names of which nothing unsigned is accepted.
        threshold: how many of the keys must have signed.
        generation: of a registry's settings as they are shown, and of what was edited from them:
            it is set again only if no others were set since. No entry holds it; written only where
            it is given.
    """

    trust_version: Literal[1]
    keys: Annotated[tuple[TrustedKey, ...], Field(max_length=MAX_KEYS)]
    require: Annotated[tuple[Glob, ...], Field(max_length=MAX_GLOBS)]
    threshold: Annotated[int, Field(ge=1, le=16)]
    generation: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        require(len({key.key_id for key in self.keys}) == len(self.keys), "keys: each once")
        return self

    @model_serializer(mode="wrap")
    def _plain(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tree: dict[str, Any] = write(self)
        if self.generation is None:
            tree.pop("generation", None)
        return tree

    def key(self, key_id: str) -> TrustedKey | None:
        """A key by its id."""
        return next((key for key in self.keys if key.key_id == key_id), None)


NOBODY = TrustRecord(trust_version=TRUST_VERSION, keys=(), require=(), threshold=1)
"""No key is believed, and no signature is asked for."""


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
        expected, found = f"the fields of version {TRUST_VERSION}", describe_violation(error)
    raise ArtifactError(
        "E_SCHEMA", what, expected=expected, found=found, fix="correct or restore it"
    )


def trust_bytes(record: TrustRecord) -> bytes:
    """Canonical JSON of a trust record."""
    return canonical_json(record.model_dump(mode="json")).encode()


def matches(name: str, globs: tuple[str, ...]) -> bool:
    """Whether one of the globs covers a name."""
    return any(fnmatchcase(name, glob) for glob in globs)


def is_glob(text: str) -> bool:
    """Whether a text may stand among `names` and `require`."""
    return re.fullmatch(r"[a-z0-9._+@:*-]{1,256}", text) is not None
