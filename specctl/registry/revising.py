"""Settings anew: what another set meanwhile is never taken back unseen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specctl.artifacts.signing import parse_trust
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import RegistryError, UsageError
from specctl.plain_text import shown
from specctl.registry.entries import Author, Logged, Note, Settings, settings_of
from specctl.registry.log import commit
from specctl.registry.names import SETTINGS
from specctl.registry.room import Registry
from specctl.registry.state import SettingsState

if TYPE_CHECKING:
    from pydantic import JsonValue


def write_settings(
    registry: Registry,
    record: bytes,
    author: Author,
    *,
    note: Note,
    expect: int | None = None,
) -> Logged:
    """Commits a trust record as the registry's settings.

    Args:
        note: once its expiry has passed, every reader refuses the registry until a root signs anew;
            so nobody can hide a revocation for longer by serving old settings.
        expect: generation of the settings that the record was made from, where the record itself
            does not say. Without either, it replaces none that say something else.

    Raises:
        ArtifactError: a record that is none.
        RegistryError: E_SETTINGS_CONFLICT where others that say something else were set since;
            E_BUSY.
    """
    settings, wanted = draft(record, expect)

    def decide(state: SettingsState) -> Settings:
        check_follows(registry.url, state.newest, settings, wanted)
        return settings

    logged = commit(registry.settings_log(), decide, author, now=registry.clock.utc, note=note)
    assert logged is not None
    return logged


def draft(record: bytes, expect: int | None) -> tuple[Settings, int | None]:
    """What a record says, and the generation of the settings that it was made from, if known.

    Raises:
        ArtifactError: a record that is none.
        UsageError: the record names another generation than the caller.
    """
    made_from = parse_trust(record).generation
    if expect is not None and made_from not in (None, expect):
        raise UsageError(
            "--expect-generation",
            expected=f"{made_from}, as the record says",
            found=str(expect),
            fix="leave it out, or begin with what `specctl registry settings --json` shows",
        )
    tree = parse_strict(record)
    tree.pop("generation", None)
    return Settings(settings=tree), made_from if expect is None else expect


def check_follows(url: str, newest: Logged | None, settings: Settings, expect: int | None) -> None:
    """Refuses settings that would take back what was set since they were made.

    Raises:
        RegistryError: E_SETTINGS_CONFLICT.
    """
    if newest is None or newest.entry.generation == expect or says(newest, settings):
        return
    raise RegistryError(
        "E_SETTINGS_CONFLICT",
        f"{url}, {SETTINGS}",
        expected=f"generation {expect}, which these settings were made from"
        if expect is not None
        else "no settings yet, as these do not say what they were made from",
        found=standing(newest),
        fix="begin with what `specctl registry settings --json` shows now",
    )


def says(newest: Logged | None, settings: Settings) -> bool:
    """Whether settings stand that say the same: to set them again takes nothing back."""
    return newest is not None and settings_of(newest) == settings.settings


def standing(newest: Logged) -> str:
    """`generation 3, set by ann@host 2026-01-31T12:00:00Z`."""
    entry = newest.entry
    return f"generation {entry.generation}, set by {shown(entry.actor)} {entry.created}"


def current_settings(registry: Registry) -> dict[str, JsonValue] | None:
    """See `settings_json`; None where none was ever set."""
    newest = registry.settings_log().state.newest
    return None if newest is None else settings_json(newest)


def settings_json(newest: Logged) -> dict[str, JsonValue]:
    """The trust record of an entry, with its generation, so that it can be edited."""
    return {**settings_of(newest), "generation": newest.entry.generation}
