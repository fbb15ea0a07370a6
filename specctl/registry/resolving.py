"""From a reference to a digest that may be used: history, floor, freshness, signatures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.artifacts.signing.dsse import parse_envelope
from specctl.artifacts.signing.statement import speaks_of
from specctl.errors import ArtifactError, RegistryError
from specctl.registry.entries import Logged
from specctl.registry.floors import Floors
from specctl.registry.log import Log
from specctl.registry.names import Reference, parse_reference
from specctl.registry.packages import read_package
from specctl.registry.room import Registry
from specctl.registry.settling import settle
from specctl.registry.state import NameState
from specctl.registry.trusting import check_artifact, check_entry, newest_signed

if TYPE_CHECKING:
    from specctl.artifacts.signing import Trust


@dataclass(frozen=True)
class Resolved:
    """A reference that passed every check of the registry; its content has none yet.

    Attributes:
        entries: those that the answer rests on, as `deciding` has them.
        settings: those that `trust` rests on.
        heads: the newest entries of the logs that may be believed: floors rise to them.
        trust: what the user trusts in this registry under the name.
    """

    registry: Registry
    reference: Reference
    digest: str
    entries: tuple[Logged, ...]
    settings: tuple[Logged, ...]
    heads: tuple[Logged, ...]
    trust: Trust

    def check_signatures(self) -> tuple[bytes, ...]:
        """Refuses an artifact without the signature that its name requires.

        Returns:
            The envelopes that were believed; none where none is asked for.

        Raises:
            ArtifactError: E_SIG, E_STALE.
        """
        name = self.reference.name
        if not self.trust.requires(name):
            return ()
        envelopes = self.registry.content.signatures(self.digest)
        return check_artifact(self.registry, self.trust, name, self.digest, envelopes)

    def found_signatures(self) -> tuple[bytes, ...]:
        """Envelopes over the artifact under its name: the believed ones, or all if none is.

        Nobody asked for one; whoever the artifact goes to may.
        """
        digest, name = self.digest, self.reference.name
        found = [
            one for one in self.registry.content.signatures(digest) if speaks_of(one, digest, name)
        ]
        try:
            now = self.registry.clock.utc()
            return self.trust.believed_envelopes(found, digest, name=name, now=now)
        except ArtifactError:
            return tuple(sorted(found, key=lambda one: -len(parse_envelope(one).signatures)))

    def confirm(self, floors: Floors) -> None:
        """Raises the user's floors: only once the artifact passed every check."""
        for head in self.heads:
            floors.raise_to(self.registry, head)


def resolve(registry: Registry, reference: Reference, trust: Trust, floors: Floors) -> Resolved:
    """What a reference means now.

    Raises:
        RegistryError: E_UNKNOWN_NAME, E_UNKNOWN_ALIAS, E_MISSING, E_LOG, E_ROLLBACK.
        ArtifactError: E_SIG, E_STALE.
    """
    settings = registry.settings_log()
    floors.check(registry, settings)
    name, now = reference.name, registry.clock.utc()
    trusted, binding = settle(registry.url, settings.entries, trust, name, now)
    log = registry.known_log(name)
    floors.check(registry, log)
    digest = named_digest(log, reference)
    entries = deciding(log, reference, digest)
    for logged in entries:
        check_entry(registry, trusted, log, logged)
    return Resolved(
        registry,
        reference,
        digest,
        tuple(entries),
        binding,
        (*settings.entries[-1:], _head(log, trusted, now)),
        trusted,
    )


def _head(log: Log[NameState], trust: Trust, now: str) -> Logged:
    """How far a floor may rise: where signatures are asked for, not to what anybody can add.

    Args:
        now: UTC; not later than that of the verdict on the deciding entries, which stands.
    """
    if not trust.requires(log.name):
        return log.entries[-1]
    signed = newest_signed(trust, log, now)
    assert signed is not None  # the deciding entries are
    return signed


def named(registry: Registry, text: str) -> str:
    """The digest that a reference names now, for those who do not use what it names.

    Raises:
        RegistryError: see `named_digest`.
    """
    reference = parse_reference(text)
    return named_digest(registry.known_log(reference.name), reference)


def version_digest(registry: Registry, name: str, version: str) -> str:
    """The digest of a version as people say it.

    Args:
        version: `sha256:<hex>`, another alias of the name, or the path of an artifact's folder,
            which has a slash in it.

    Raises:
        RegistryError: see `named_digest`.
        ArtifactError: a folder that must not be loaded.
    """
    if "/" in version:
        return read_package(Path(version)).digest
    return named(registry, f"{name}@{version}")


def named_digest(log: Log[NameState], reference: Reference) -> str:
    """The version that a reference names.

    Raises:
        RegistryError: E_UNKNOWN_ALIAS; E_MISSING for a digest not published under the name;
            E_NAME for a name alone.
    """
    if reference.digest is not None:
        check_published(log, reference.digest)
        return reference.digest
    aliases = log.state.aliases
    if reference.alias is None:
        raise _unsaid("E_NAME", reference, "a bare name", aliases)
    if reference.alias not in aliases:
        raise _unsaid("E_UNKNOWN_ALIAS", reference, "no such alias", aliases)
    return aliases[reference.alias].digest


def check_published(log: Log[NameState], digest: str) -> None:
    """Refuses a digest that the name never had.

    Raises:
        RegistryError: E_MISSING.
    """
    if digest not in log.state.versions:
        raise RegistryError(
            "E_MISSING",
            f"{log.name}@{digest}",
            expected="a digest published under the name",
            found=f"none of its {len(log.state.versions)} versions",
            fix="push it under this name first; `specctl registry show` lists versions",
        )


def deciding(log: Log[NameState], reference: Reference, digest: str) -> list[Logged]:
    """The entries that the answer rests on: the publication, and the alias's last move.

    Each is chained to all before it, so a signature over them covers the history too.
    """
    generations = [log.state.versions[digest]]
    if reference.alias is not None:
        generations.append(log.state.aliases[reference.alias].generation)
    return [log.entries[generation] for generation in generations]


def _unsaid(code: str, reference: Reference, found: str, aliases: object) -> RegistryError:
    known = ", ".join(sorted(aliases)) if isinstance(aliases, dict) and aliases else "none yet"
    return RegistryError(
        code,
        str(reference),
        expected=f"NAME@ALIAS or NAME@sha256:<hex>; aliases: {known}",
        found=found,
        fix="say which version is meant",
    )
