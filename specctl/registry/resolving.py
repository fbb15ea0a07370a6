"""From a reference to a digest that may be used: history and signatures.

Readers and writers share these functions, so an entry that readers would refuse is never written.
Required signatures depend on the user's own trust file alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.artifacts.signing import parse_envelope, speaks_of
from specctl.errors import RegistryError, did_you_mean
from specctl.registry.content import Content
from specctl.registry.log import Log, Logged, NameState, Pointer
from specctl.registry.names import Reference, typed
from specctl.registry.opening import Registry
from specctl.registry.trust import Trust


@dataclass(frozen=True)
class Resolved:
    """A reference whose history was checked; its content is not checked yet."""

    log: Log
    reference: Reference
    digest: str
    entries: tuple[Logged, ...]
    """The last accepted publication and, for an alias, its last accepted move."""
    trust: Trust
    ignored: Logged | None = None
    """A later move of the alias that `trust` does not accept."""

    @property
    def content(self) -> Content:
        """Files and signatures of the registry."""
        return Content(self.log.store)

    def any_signature(self) -> bytes | None:
        """An unverified envelope of the artifact under its name, for recipients who require one."""
        found = self.content.signatures(self.digest)
        return next((one for one in found if speaks_of(one, self.digest, self.log.name)), None)


def resolve(registry: Registry, reference: Reference, trust: Trust) -> Resolved:
    """Resolves a reference to the version that it names now.

    Raises:
        RegistryError: E_UNKNOWN_NAME, E_UNKNOWN_ALIAS, E_MISSING, E_LOG.
        ArtifactError: E_SIG.
    """
    log = registry.known_log(reference.name)
    registry.note(log)
    return resolve_in(log, reference, trust)


def resolve_in(log: Log, reference: Reference, trust: Trust) -> Resolved:
    """`resolve` in a history that was just read."""
    digest = named_digest(log, reference, trust)
    entries = deciding_entries(log, reference, digest, trust)
    for logged in entries:
        check_entry(trust, logged)
    last = log.state.aliases.get(reference.alias or "")
    moved = None if last is None else log.entries[last.generation]
    return Resolved(log, reference, digest, entries, trust, None if moved in entries else moved)


def pointers(log: Log, trust: Trust) -> dict[str, Pointer]:
    """The aliases as a user sees them, after the last accepted move of each.

    An alias without an accepted move has the last one that a revoked key signed, else its last
    move; `check_entry` then refuses either.
    """
    return {alias: at for state in _states(log, trust) for alias, at in state.aliases.items()}


def publication(log: Log, trust: Trust, digest: str) -> Logged:
    """The last accepted publication of a version; without one, chosen as in `pointers`."""
    found = [state.versions[digest] for state in _states(log, trust) if digest in state.versions]
    return log.entries[found[-1][-1]]


def _states(log: Log, trust: Trust) -> tuple[NameState, ...]:
    """The states after all entries, after those that were accepted before keys were revoked, and
    after the accepted ones, which count. The others are for the cause of a refusal."""
    return log.state, log.accepted(trust.before_revocations), log.accepted(trust)


def named_digest(log: Log, reference: Reference, trust: Trust) -> str:
    """The digest that a reference names: E_UNKNOWN_ALIAS; E_MISSING for a digest not published
    under the name; E_NAME for a name alone, or for digits that several versions begin with."""
    if reference.digest is not None:
        fitting = [one for one in log.state.versions if one.startswith(reference.digest)]
        if not fitting:
            check_published(log, reference.digest)
        if len(fitting) > 1:
            problem = f"several versions begin so: {' and '.join(fitting)}"
            raise RegistryError("E_NAME", str(reference), problem, hint="give more of them")
        return fitting[0]
    aliases = pointers(log, trust)
    if reference.alias in aliases:
        return aliases[reference.alias].digest
    versions = list(log.state.versions)
    if reference.number is not None and reference.number <= len(versions):
        return versions[reference.number - 1]
    known = [*aliases, *(f"v{n + 1}" for n in range(len(versions)))]
    there = f"aliases: {', '.join(aliases) or 'none yet'}; versions: {len(versions)}"
    if reference.alias is None:
        problem = f"the name needs @ALIAS, @v<number> or @sha256:<hex> ({there})"
        raise RegistryError("E_NAME", str(reference), problem, hint="name the version")
    lists = f"{typed(log.store.url, 'show', log.name)} lists"
    fix = did_you_mean(reference.alias, known, f"{lists} both")
    problem = f"the name has no such alias or version ({there})"
    raise RegistryError("E_UNKNOWN_ALIAS", str(reference), problem, hint=fix)


def check_published(log: Log, digest: str) -> None:
    """Refuses a digest that was never published under the name (E_MISSING)."""
    if digest not in log.state.versions:
        raise RegistryError(
            "E_MISSING",
            f"{log.name}@{digest}",
            f"the name has {len(log.state.versions)} versions, and none has this digest",
            hint="push it under this name first; "
            f"{typed(log.store.url, 'show', log.name)} lists versions",
        )


def deciding_entries(
    log: Log, reference: Reference, digest: str, trust: Trust
) -> tuple[Logged, ...]:
    """The entries that decide a resolution: the publication, and the alias's move.

    Each is chained to all earlier ones, so a signature over it covers the history too.
    """
    published, at = publication(log, trust, digest), pointers(log, trust).get(reference.alias or "")
    return (published,) if at is None else (published, log.entries[at.generation])


def check_entry(trust: Trust, logged: Logged) -> None:
    """Refuses an entry without the signature that its name requires (E_SIG)."""
    if trust.requires(logged.entry.name):
        trust.verify(parse_envelope(logged.envelope), logged.entry.name)


def accepted_signatures(log: Log, trust: Trust, digest: str) -> tuple[bytes, ...]:
    """The accepted envelopes over an artifact; none where its name requires no signature."""
    if not trust.requires(log.name):
        return ()
    return tuple(trust.accepted(Content(log.store).signatures(digest), digest, log.name))
