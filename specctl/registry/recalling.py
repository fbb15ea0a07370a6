"""What a reference meant when it was last pulled, judged again by what the user trusts today."""

from __future__ import annotations

from pydantic import ValidationError

from specctl.artifacts.manifest import digest_of
from specctl.artifacts.signing import Trust, parse_envelope
from specctl.errors import ArtifactError, RegistryError
from specctl.registry.cache import Remembered
from specctl.registry.entries import Entry, Logged, Move, Publish, Settings
from specctl.registry.names import SETTINGS, Reference
from specctl.registry.settling import settle
from specctl.registry.trusting import check_signed, check_unexpired


def check_remembered(
    url: str, reference: Reference, meant: Remembered, trust: Trust, now: str
) -> None:
    """Refuses what is not of this name and registry, and what would not be believed now.

    Args:
        now: UTC.

    Raises:
        RegistryError: E_OFFLINE for a note of something else.
        ArtifactError: E_SIG, E_STALE.
    """
    settings = [_logged(url, reference, meant, text, SETTINGS) for text in meant.settings]
    entries = [_logged(url, reference, meant, text, reference.name) for text in meant.entries]
    if not all(isinstance(logged.entry.action, Settings) for logged in settings):
        raise _of_something_else(url, reference, "settings that are none")
    _check_meaning(url, reference, meant, entries)
    trusted, _ = settle(url, settings, trust, reference.name, now)
    for logged in entries:
        check_unexpired(logged, f"{url}, {reference}, as pulled {meant.resolved}", now)
        check_signed(trusted, reference.name, logged)
    if trusted.requires(reference.name):
        envelopes = [text.encode() for text in meant.envelopes]
        trusted.believed_envelopes(envelopes, meant.digest, name=reference.name, now=now)


def _logged(url: str, reference: Reference, meant: Remembered, envelope: str, name: str) -> Logged:
    """An entry of a note, which must be of the log and the registry that the note is of."""
    data = envelope.encode()
    try:
        entry = Entry.model_validate_json(parse_envelope(data).payload)
    except (ArtifactError, ValidationError):
        raise _of_something_else(url, reference, "what is no entry") from None
    if (entry.name, entry.registry_id) != (name, meant.registry_id):
        raise _of_something_else(url, reference, "an entry of another name or registry")
    return Logged(entry, data, digest_of(data))


def _check_meaning(
    url: str, reference: Reference, meant: Remembered, entries: list[Logged]
) -> None:
    """The entries say what the note says: this digest was published, and the alias moved to it."""
    kinds = [Publish] if reference.alias is None else [Publish, Move]
    actions = [logged.entry.action for logged in entries]
    said = [type(action) for action in actions] == kinds and all(
        action.digest == meant.digest for action in actions if isinstance(action, Publish | Move)
    )
    moved = [action.alias for action in actions if isinstance(action, Move)]
    asked = reference.digest in (None, meant.digest) and reference.name == meant.name
    if not (said and asked and moved == ([] if reference.alias is None else [reference.alias])):
        raise _of_something_else(url, reference, "a note that does not say so")


def _of_something_else(url: str, reference: Reference, found: str) -> RegistryError:
    return RegistryError(
        "E_OFFLINE",
        f"{url}, {reference}",
        expected="what was pulled under this name from this registry",
        found=found,
        fix="pull it once without --offline",
    )
