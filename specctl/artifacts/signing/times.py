"""When something was signed, and whether a key could sign then."""

from __future__ import annotations

from pydantic import ValidationError

from specctl.artifacts.manifest import UtcTime
from specctl.artifacts.signing.dsse import bad_signature
from specctl.artifacts.signing.records import TrustedKey
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError
from specctl.policy.base import Record
from specctl.policy.parse import describe_violation


class Times(Record):
    """What a signed payload says of itself."""

    created: UtcTime
    expires: UtcTime | None


def times_of(payload: bytes) -> Times:
    """`created` and `expires` of a payload, at its top or in its predicate.

    Raises:
        ArtifactError: E_SIG for a payload without them.
    """
    try:
        tree = parse_strict(payload)
        holder = tree.get("predicate", tree) if isinstance(tree, dict) else tree
        stated = holder if isinstance(holder, dict) else {}
        return Times.model_validate({name: stated.get(name) for name in Times.model_fields})
    except ArtifactError as error:
        raise bad_signature(error.expected, error.found) from None
    except ValidationError as error:
        expected = "a payload with created and expires"
        raise bad_signature(expected, describe_violation(error)) from None


def out_of_time(key: TrustedKey, times: Times, since: str) -> str | None:
    """Why a key could not sign something when it was signed; None if it could.

    Args:
        since: UTC; it was not signed before that, whatever date it bears.
    """
    if times.created < key.not_before:
        return f"was not valid before {key.not_before}, signed {times.created}"
    if key.not_after is not None and max(times.created, since) > key.not_after:
        behind = f", behind entries of {since} and later" if since > times.created else ""
        return f"expired {key.not_after}, signed {times.created}{behind}"
    return None
