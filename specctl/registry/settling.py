"""The registry's settings: which names must be signed, and by whom, for each user and name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from specctl.artifacts.signing import parse_trust
from specctl.errors import ArtifactError
from specctl.policy.parse import canonical_json
from specctl.registry.entries import Logged, settings_of
from specctl.registry.names import SETTINGS
from specctl.registry.room import Registry
from specctl.registry.trusting import check_unexpired, verify_in_turn

if TYPE_CHECKING:
    from specctl.artifacts.signing import Trust, TrustRecord, Verified


def effective_trust(registry: Registry, trust: Trust, name: str) -> Trust:
    """What a user trusts here under a name: the own record, and what the settings add to it.

    Who trusts a root of this registry takes the newest settings that a root signed which is trusted
    for the name: no other root loosens them. A registry that has none is not used: whoever serves
    it may have left them out. For others, and for names that no root of theirs is trusted for,
    requirements and revocations of all settings that there ever were add up, for nothing says that
    who took one back was allowed to.

    Args:
        name: `_settings` asks about the settings themselves.

    Raises:
        ArtifactError: E_SIG for settings that no trusted root signed, or where there are none;
            E_STALE for those that decide and have expired; E_SCHEMA for what is no trust record.
    """
    settings, now = registry.settings_log().entries, registry.clock.utc()
    return settle(registry.url, settings, trust, name, now)[0]


def settle(
    url: str, settings: Sequence[Logged], trust: Trust, name: str, now: str
) -> tuple[Trust, tuple[Logged, ...]]:
    """`effective_trust` by entries of settings, wherever they were read.

    Args:
        url: of their registry. settings: oldest first. now: UTC.

    Returns:
        The trust, and those of the settings that it rests on.

    Raises:
        ArtifactError: see `effective_trust`.
    """
    here = trust.at(url)
    binding = _binding(url, settings, here, name, now)
    for logged, _ in binding[-1:]:
        check_unexpired(logged, f"{url}, {SETTINGS}", now)
    for logged, verified in binding:
        here = here.with_delegated(_record_of(logged), verified)
    return here, tuple(logged for logged, _ in binding)


def created_of_binding(
    url: str, settings: Sequence[Logged], trust: Trust, name: str, now: str
) -> str:
    """When the newest of the settings that `settle` rests on was made, UTC; `now` without any.

    Raises:
        ArtifactError: E_SIG, see `effective_trust`.
    """
    binding = _binding(url, settings, trust.at(url), name, now)
    return binding[-1][0].entry.created if binding else now


def _binding(
    url: str, settings: Sequence[Logged], here: Trust, name: str, now: str
) -> list[tuple[Logged, Verified | None]]:
    """Settings that decide about a name, each with the roots that signed it where they count."""
    if not here.has_root:
        return [(logged, None) for logged in settings]
    _check_signed_by_root(url, settings, here, now)
    if not here.has_root_of(name):
        return [(logged, None) for logged in settings]
    for logged, verified in _signed_by_root(settings, here, now):
        if here.is_for(verified, name):
            return [(logged, verified)]
    raise _unsettled(url, f"settings that a root signed which is trusted for {name}", "others")


def _check_signed_by_root(url: str, settings: Sequence[Logged], here: Trust, now: str) -> None:
    """The newest settings must be of a root: else somebody wrote there who may not."""
    if not settings:
        expected = "settings that a root signed, as a root is trusted for this registry"
        raise _unsettled(url, expected, "none")
    verify_in_turn(here, settings[:-1], settings[-1], now)


def _signed_by_root(
    settings: Sequence[Logged], here: Trust, now: str
) -> Iterator[tuple[Logged, Verified]]:
    """Settings that roots signed, newest first."""
    for place in reversed(range(len(settings))):
        try:
            yield settings[place], verify_in_turn(here, settings[:place], settings[place], now)
        except ArtifactError:
            continue  # of another root, or of nobody: it decides nothing for this user


def _unsettled(url: str, expected: str, found: str) -> ArtifactError:
    return ArtifactError(
        "E_SIG",
        f"{url}, {SETTINGS}",
        expected=expected,
        found=found,
        fix="ask who runs it; if it is meant to have none, say which registries the root is "
        "for: specctl registry trust add --role root --registry",
    )


def _record_of(logged: Logged) -> TrustRecord:
    record = parse_trust(canonical_json(settings_of(logged)).encode())
    if record.generation is not None:
        raise ArtifactError(
            "E_SCHEMA",
            f"{SETTINGS}, generation {logged.entry.generation}",
            expected="a trust record as entries hold it",
            found="one with `generation`, which is of records that are shown",
            fix="whoever holds the root key sets them anew: specctl registry settings FILE",
        )
    return record
