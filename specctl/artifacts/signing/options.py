"""What users write about keys, checked; and a trust record in words."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from specctl.artifacts.describe import Description
from specctl.artifacts.manifest import UtcTime, utc_now
from specctl.artifacts.signing.records import TrustedKey, TrustRecord
from specctl.errors import UsageError
from specctl.plain_text import shown
from specctl.policy.parse import describe_violation

_TIME = TypeAdapter(UtcTime)


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


EVER = "1970-01-01T00:00:00Z"


def trusted_key(
    public_key: bytes,
    *,
    names: Sequence[str],
    roles: Sequence[str],
    not_before: str | None = None,
    not_after: str | None = None,
    comment: str = "",
    registries: Sequence[str] = (),
) -> TrustedKey:
    """A key that is believed.

    Args:
        not_before: None believes what it signed before it was added, too: a root key had signed
            settings long before a new user heard of it.
        registries: URLs that a root is one for, as the user asks for them; none is every one.

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
            registries=tuple(dict.fromkeys(registries)) or None,
        )
    except ValidationError as error:
        raise UsageError(
            "trusted key",
            expected="roles publisher, promoter, root; names of [a-z0-9._+@:-] and *; registries "
            "of a root alone",
            found=describe_violation(error),
            fix="correct that",
        ) from error


def describe_trust(record: TrustRecord) -> Description:
    """The keys as a table, and what must be signed."""
    facts = (
        ("signatures required for", ", ".join(record.require) or "nothing"),
        ("keys that must have signed", str(record.threshold)),
    )
    columns = ("key", "roles", "names", "registries", "until", "state", "comment")
    now = utc_now()
    return Description("trust", facts, columns, tuple(_row(key, now) for key in record.keys))


def _row(key: TrustedKey, now: str) -> tuple[str, ...]:
    state = _state(key, now)
    registries = ", ".join(key.registries) if key.registries else "all"
    listed = (", ".join(key.roles), ", ".join(key.names), registries)
    cells = (key.key_id, *listed, key.not_after or "open")
    return tuple(shown(cell) for cell in (*cells, state, key.comment))


def _state(key: TrustedKey, now: str) -> str:
    """Whether what the key signs at this moment is believed."""
    if key.revoked is not None:
        return f"revoked: {key.revoked.reason}"
    if now < key.not_before:
        return f"not before {key.not_before}"
    if key.not_after is not None and key.not_after < now:
        return "expired: believed for what it signed before"
    return "believed"
