"""Which signatures a registry's entries and artifacts need, and whether they have them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from specctl.artifacts.registry.entries import ENTRY_TYPE, Author, Logged, Note, Settings
from specctl.artifacts.registry.log import BeforeCommit, Log, commit
from specctl.artifacts.registry.names import SETTINGS
from specctl.artifacts.registry.room import Registry
from specctl.artifacts.signing import Role, parse_envelope, parse_trust
from specctl.artifacts.signing.dsse import pae
from specctl.artifacts.signing.keys import is_signature
from specctl.artifacts.signing.refusals import renewal
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError
from specctl.policy.parse import canonical_json

if TYPE_CHECKING:
    from specctl.artifacts.signing import SigningKey, Trust, TrustRecord

ROLES: dict[str, Role] = {
    "publish": "publisher",
    "alias": "promoter",
    "rollback": "promoter",
    "settings": "root",
}
CLOCK_SKEW_S = 3600
"""How far apart the clocks of those who sign may be: an entry that says that it was made longer
than this before a signed one in front of it was not made then."""


def effective_trust(registry: Registry, trust: Trust) -> Trust:
    """What a user trusts here: the own record, and what the registry's settings add to it.

    Who trusts a root of this registry takes the newest settings, which that root must have signed,
    and uses no registry that has none: whoever serves it may have left them out. For others
    requirements and revocations of all settings that there ever were add up, for nothing says that
    who took one back was allowed to.

    Raises:
        ArtifactError: E_SIG or E_STALE for settings that a trusted root did not sign, and E_SIG
            where there are none; E_SCHEMA for settings that are no trust record.
    """
    log, now = registry.settings_log(), registry.clock.utc()
    found = settled_trust(registry.url, log.entries, trust, now)
    if found.has_root:
        check_order(found, log, log.entries[-1], now)
    return found


def settled_trust(url: str, settings: Sequence[Logged], trust: Trust, now: str) -> Trust:
    """`effective_trust` by entries of settings, oldest first, wherever they were read.

    Args:
        url: of their registry. now: UTC.

    Raises:
        ArtifactError: see `effective_trust`.
    """
    here = trust.at(url)
    if settings:
        check_unexpired(settings[-1], f"{url}, {SETTINGS}", now)
    if here.has_root:
        return _settled_by_root(url, settings[-1:], here, now)
    for logged in settings:
        here = here.with_delegated(_record_of(logged), None)
    return here


def binding_settings(url: str, settings: Sequence[Logged], trust: Trust) -> tuple[Logged, ...]:
    """Those of a registry's settings that `settled_trust` rests on."""
    return tuple(settings[-1:] if trust.at(url).has_root else settings)


def _settled_by_root(url: str, newest: Sequence[Logged], here: Trust, now: str) -> Trust:
    if not newest:
        raise ArtifactError(
            "E_SIG",
            f"{url}, {SETTINGS}",
            expected="settings that a root signed, as a root is trusted for this registry",
            found="none",
            fix="ask who runs it; if it is meant to have none, say which registries the root is "
            "for: specctl registry trust add --role root --registry",
        )
    verified = here.verify(newest[0].envelope, ENTRY_TYPE, name=SETTINGS, role="root", now=now)
    return here.with_delegated(_record_of(newest[0]), verified)


def _record_of(logged: Logged) -> TrustRecord:
    assert isinstance(logged.entry.action, Settings)
    return parse_trust(canonical_json(logged.entry.action.settings).encode())


def write_settings(registry: Registry, record: bytes, author: Author, *, note: Note) -> Logged:
    """Commits a trust record as the registry's settings.

    Args:
        note: once its expiry has passed, every reader refuses the registry until a root signs anew;
            so nobody can hide a revocation for longer by serving old settings.

    Raises:
        ArtifactError: a record that is none.
        RegistryError: E_BUSY.
    """
    parse_trust(record)
    settings = Settings(settings=parse_strict(record))
    logged = commit(
        registry.settings_log(),
        lambda _: settings,
        author,
        now=registry.clock.utc,
        note=note,
    )
    assert logged is not None
    return logged


def current_settings(registry: Registry) -> dict[str, JsonValue] | None:
    """The trust record in force as plain JSON; None where none was ever set."""
    newest = registry.settings_log().state.newest
    if newest is None:
        return None
    assert isinstance(newest.entry.action, Settings)
    return newest.entry.action.settings


def check_entry(registry: Registry, trust: Trust, name: str, logged: Logged) -> None:
    """Refuses an entry without the signature that its name requires.

    Raises:
        ArtifactError: E_SIG, E_STALE.
    """
    check_envelope(registry, trust, name, ROLES[logged.entry.action.kind])(logged.envelope)


def check_envelope(registry: Registry, trust: Trust, name: str, role: Role) -> BeforeCommit:
    """A check of entries that are about to be committed: what readers would refuse is not."""
    return lambda envelope: check_signed(trust, name, role, envelope, registry.clock.utc())


def check_signed(trust: Trust, name: str, role: Role, envelope: bytes, now: str) -> None:
    """`check_entry` of an entry's envelope, wherever it was read.

    Args:
        now: UTC.

    Raises:
        ArtifactError: E_SIG, E_STALE.
    """
    if trust.requires(name):
        trust.verify(envelope, ENTRY_TYPE, name=name, role=role, now=now)


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


def newest_signed(trust: Trust, log: Log[Any]) -> Logged | None:
    """The newest entry whose signature is right, whether it has expired since or not.

    What anybody can add is not it: a floor that rose to such an entry would lock its user out of
    the registry once that was mended.
    """
    return next((one for one in reversed(log.entries) if _is_signed(trust, log.name, one)), None)


def _is_signed(trust: Trust, name: str, logged: Logged) -> bool:
    role, then = ROLES[logged.entry.action.kind], logged.entry.created
    try:
        trust.verify(logged.envelope, ENTRY_TYPE, name=name, role=role, now=then)
    except ArtifactError:
        return False
    return True


def check_order(trust: Trust, log: Log[Any], logged: Logged, now: str) -> None:
    """Refuses a signed entry that says it was made long before a signed one in front of it.

    So a key that has expired cannot sign on by an old date, once others have signed after that.
    Signed entries that lie in the future are passed over: one wrong clock must not stop a name.

    Args:
        now: UTC.

    Raises:
        ArtifactError: E_SIG.
    """
    latest, least = _shifted(now, CLOCK_SKEW_S), _shifted(logged.entry.created, CLOCK_SKEW_S)
    for earlier in log.entries[: logged.entry.generation]:
        if least < earlier.entry.created <= latest and _is_signed(trust, log.name, earlier):
            raise ArtifactError(
                "E_SIG",
                f"{log.name}, generation {logged.entry.generation}",
                expected=f"an entry made no sooner than {CLOCK_SKEW_S} s before generation "
                f"{earlier.entry.generation}, {earlier.entry.created}",
                found=f"one that says {logged.entry.created}",
                fix="check the clock of who signs; if somebody signs by old dates, revoke that key",
            )


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
        check_entry(registry, trust, log.name, logged)
        if trust.requires(log.name):
            check_order(trust, log, logged, registry.clock.utc())
    except ArtifactError:
        return False
    return True


def _shifted(utc: str, seconds: int) -> str:
    form = "%Y-%m-%dT%H:%M:%SZ"
    try:
        return (datetime.strptime(utc, form) + timedelta(seconds=seconds)).strftime(form)
    except (ValueError, OverflowError):  # a 31st of February; the last hour of year 9999
        return utc


def check_fresh(registry: Registry, logged: Logged, where: str) -> None:
    """Refuses an entry past its `expires`: a frozen registry would show it for ever.

    Raises:
        ArtifactError: E_STALE.
    """
    check_unexpired(logged, f"{registry.url}, {where}", registry.clock.utc())


def check_unexpired(logged: Logged, where: str, now: str) -> None:
    """`check_fresh` of an entry, wherever it was read.

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
