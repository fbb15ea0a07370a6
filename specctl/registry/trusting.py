"""Whether readers take an entry or an artifact: the one verdict, for who reads and who writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from specctl.artifacts.signing import Role, parse_envelope
from specctl.artifacts.signing.dsse import pae
from specctl.artifacts.signing.keys import is_signature
from specctl.artifacts.signing.refusals import renewal
from specctl.errors import ArtifactError
from specctl.registry.entries import ENTRY_TYPE, Logged
from specctl.registry.log import Log
from specctl.registry.room import Registry

if TYPE_CHECKING:
    from specctl.artifacts.signing import SigningKey, Trust, Verified

ROLES: dict[str, Role] = {
    "publish": "publisher",
    "alias": "promoter",
    "rollback": "promoter",
    "settings": "root",
}
CLOCK_SKEW_S = 3600
"""How far apart the clocks of those who sign may be: an entry was made no sooner than this before
the date of a signed one in front of it."""


def check_entry(registry: Registry, trust: Trust, log: Log[Any], logged: Logged) -> None:
    """Refuses an entry that readers do not take now; a pull rests on those that pass alone.

    It must be signed in time where its name requires that, and must not have expired.

    Args:
        trust: what the user trusts under the log's name; see `settling.effective_trust`.
        logged: of that log, or about to be its next.

    Raises:
        ArtifactError: E_SIG, E_STALE.
    """
    now = registry.clock.utc()
    if trust.requires(log.name):
        verify_in_turn(trust, log.entries[: logged.entry.generation], logged, now)
    check_unexpired(logged, f"{registry.url}, {log.name}", now)


def check_signed(trust: Trust, name: str, logged: Logged) -> None:
    """Refuses an entry without the signature that its name requires, wherever it was read.

    What was in front of it is not known here, so a key signed it when it says so.

    Raises:
        ArtifactError: E_SIG.
    """
    if trust.requires(name):
        _verify(trust, logged)


def verify_in_turn(trust: Trust, before: Sequence[Logged], logged: Logged, now: str) -> Verified:
    """Who signed an entry, as keys that had not expired when the entries before it were made.

    So a key that has expired cannot sign on by an old date, once others have signed after its end.

    Args:
        before: what stands in front of it, oldest first. now: UTC.

    Raises:
        ArtifactError: E_SIG.
    """
    return _verify(trust, logged, _not_before(trust, before, logged, now))


def _verify(trust: Trust, logged: Logged, since: str = "") -> Verified:
    """The signature alone: whether the entry has expired is asked for by itself."""
    entry = logged.entry
    return trust.verify(
        logged.envelope,
        ENTRY_TYPE,
        name=entry.name,
        role=ROLES[entry.action.kind],
        now=entry.created,
        since=since,
    )


def _not_before(trust: Trust, before: Iterable[Logged], logged: Logged, now: str) -> str:
    """When an entry was made at the earliest, by the latest signed one in front of it; UTC.

    Entries that lie in the future are passed over: that clock was wrong.
    """
    created, latest = logged.entry.created, _shifted(now, CLOCK_SKEW_S)
    dated = [one for one in before if created < one.entry.created <= latest]
    for earlier in sorted(dated, key=lambda one: one.entry.created, reverse=True):
        if _is_signed(trust, earlier):
            return _shifted(earlier.entry.created, -CLOCK_SKEW_S)
    return created


def newest_signed(trust: Trust, log: Log[Any], now: str) -> Logged | None:
    """The newest entry that was signed in time, whether it has expired since or not.

    What anybody can add, or the thief of a key that has ended, is not it: a floor that rose to such
    an entry would lock its user out of the registry once that was mended.

    Args:
        now: UTC.
    """
    for logged in reversed(log.entries):
        if _is_signed(trust, logged):  # asked first, as it costs less
            with suppress(ArtifactError):
                verify_in_turn(trust, log.entries[: logged.entry.generation], logged, now)
                return logged
    return None


def _is_signed(trust: Trust, logged: Logged) -> bool:
    try:
        _verify(trust, logged)
    except ArtifactError:
        return False
    return True


def _shifted(utc: str, seconds: int) -> str:
    form = "%Y-%m-%dT%H:%M:%SZ"
    try:
        return (datetime.strptime(utc, form) + timedelta(seconds=seconds)).strftime(form)
    except (ValueError, OverflowError):  # a 31st of February; the last hour of year 9999
        return utc


def check_unexpired(logged: Logged, where: str, now: str) -> None:
    """Refuses an entry past its `expires`: a frozen registry would show it for ever.

    Args:
        where: for messages. now: UTC.

    Raises:
        ArtifactError: E_STALE.
    """
    expires = logged.entry.expires
    if expires is not None and expires <= now:
        raise ArtifactError(
            "E_STALE",
            f"{where}, generation {logged.entry.generation}",
            expected=f"an entry that is valid at {now}",
            found=f"one that expired at {expires}",
            fix=renewal(ROLES[logged.entry.action.kind]),
        )


def check_artifact(
    registry: Registry, trust: Trust, name: str, digest: str, envelopes: Sequence[bytes]
) -> tuple[bytes, ...]:
    """Refuses an artifact without the signature that its name requires.

    Returns:
        The envelopes that were believed; none where none is asked for.

    Raises:
        ArtifactError: E_SIG, E_STALE.
    """
    if not trust.requires(name):
        return ()
    now = registry.clock.utc()
    return trust.believed_envelopes(envelopes, digest, name=name, now=now)


def stands(
    registry: Registry, trust: Trust, log: Log[Any], logged: Logged, keys: Sequence[SigningKey]
) -> bool:
    """Whether readers take an entry as it is, and each of some keys has signed it."""
    sealed = parse_envelope(logged.envelope)
    data, made = pae(sealed.payload_type, sealed.payload), dict[str, bytes]()
    for one in sealed.signatures:
        made[one.key_id] = one.signature
    for key in keys:
        if not is_signature(key.public_key, made.get(key.key_id, b""), data):
            return False
    try:
        check_entry(registry, trust, log, logged)
    except ArtifactError:
        return False
    return True
