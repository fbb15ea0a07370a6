"""What a signature of an artifact says: this manifest, under this name, from then until then.

An in-toto statement (v1) with one subject: the name in the registry and the digest of
`config.json`, which lists all other files. A signature that was moved to another manifest, or
to another name, therefore speaks of something else.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from specctl.artifacts.manifest import Name, UtcTime, utc_now
from specctl.artifacts.signing.dsse import (
    Signature,
    Signs,
    bad_signature,
    envelope_bytes,
    pae,
    parse_envelope,
)
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError
from specctl.policy.base import Record
from specctl.policy.parse import canonical_json, describe_violation

STATEMENT_TYPE = "application/vnd.in-toto+json"
PREDICATE_TYPE = "urn:specctl:artifact:v1"
_FORMAT = "https://in-toto.io/Statement/v1"


class Sha256(Record):
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Subject(Record):
    """What is spoken of: a name, and the manifest that it may stand for."""

    name: Name
    digest: Sha256


class Validity(Record):
    """When it was said (UTC), until when it holds, and by which version of specctl."""

    created: UtcTime
    expires: UtcTime | None
    specctl_version: Name


class Statement(Record):
    """The signed payload."""

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: Annotated[tuple[Subject, ...], Field(min_length=1, max_length=1)]
    predicate_type: Literal["urn:specctl:artifact:v1"] = Field(alias="predicateType")
    predicate: Validity


def sign_artifact(
    key: Signs,
    manifest_digest: str,
    name: str,
    *,
    created: str | None = None,
    expires: str | None = None,
) -> bytes:
    """An envelope that vouches for a manifest under a name.

    Args:
        manifest_digest: identity of the artifact, `sha256:<hex>`.
        created, expires: UTC; None is now, and never.
    """
    payload = statement_bytes(manifest_digest, name, created or utc_now(), expires)
    made = Signature(key.key_id, key.sign_bytes(pae(STATEMENT_TYPE, payload)))
    return envelope_bytes(STATEMENT_TYPE, payload, [made])


def statement_bytes(manifest_digest: str, name: str, created: str, expires: str | None) -> bytes:
    """The statement as canonical JSON."""
    subject = Subject(name=name, digest=Sha256(sha256=manifest_digest.removeprefix("sha256:")))
    validity = Validity(created=created, expires=expires, specctl_version=version("specctl"))
    tree = {
        "_type": _FORMAT,
        "subject": [subject.model_dump()],
        "predicateType": PREDICATE_TYPE,
        "predicate": validity.model_dump(),
    }
    return canonical_json(tree).encode()


def speaks_of(envelope: bytes, manifest_digest: str, name: str) -> bool:
    """Whether an envelope holds a statement of this manifest under this name, believed or not."""
    try:
        check_statement(parse_envelope(envelope).payload, manifest_digest, name)
    except ArtifactError:
        return False
    return True


def check_statement(payload: bytes, manifest_digest: str, name: str) -> None:
    """Refuses a statement of another manifest, of another name, or of another form (E_SIG)."""
    try:
        parse_strict(payload)
        subject = Statement.model_validate_json(payload).subject[0]
    except ArtifactError as error:
        raise bad_signature(error.expected, error.found) from None
    except ValidationError as error:
        raise bad_signature("an in-toto statement", describe_violation(error)) from None
    found = f"sha256:{subject.digest.sha256}"
    if found != manifest_digest:
        raise bad_signature(f"one of {manifest_digest}", f"one of {found}")
    if subject.name != name:
        raise bad_signature(f"one for the name {name}", f"one for {subject.name}")
