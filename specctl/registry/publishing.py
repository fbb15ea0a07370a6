"""Writing: push a version, promote an alias to it, roll an alias back; nothing is ever deleted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specctl.artifacts.files import check_is_artifact, read_folder
from specctl.artifacts.manifest import MANIFEST, SIGNATURE, Domain, parse_manifest
from specctl.artifacts.signing import SigningKey, parse_envelope, sign_artifact, speaks_of
from specctl.errors import RegistryError, UsageError, shown
from specctl.registry.content import check_envelope, checked
from specctl.registry.log import Log, Logged, Move, Pointer, Publish
from specctl.registry.names import (
    Reference,
    contains,
    parse_digest,
    parse_name,
    parse_new_alias,
    parse_reference,
    parts_of,
    typed,
)
from specctl.registry.opening import Registry
from specctl.registry.resolving import (
    accepted_signatures,
    check_entry,
    check_published,
    named_digest,
    publication,
)
from specctl.registry.trust import Trust
from specctl.stores import KeyTakenError, UnknownOutcomeError

MAX_LOSSES = 1000
"""Commits that a writer loses to others before it gives up."""
MAX_NAMED = 3
"""Versions listed in a refusal, newest first."""


@dataclass(frozen=True)
class Writer:
    """A user who writes to a registry."""

    registry: Registry
    trust: Trust  # the keys that this writer trusts
    actor: str  # shown to people, e.g. `ann@host`; not verified
    key: SigningKey | None = None  # signs the entries; None leaves them unsigned

    def has_signed(self, envelope: bytes) -> bool:
        """Whether the writer's key signed an envelope; true for a writer without a key."""
        return self.key is None or parse_envelope(envelope).is_signed_by(self.key.public_key)


@dataclass(frozen=True)
class Package:
    """An artifact that was loaded once."""

    digest: str  # of the manifest
    files: Mapping[str, bytes]  # by name, the manifest included
    envelopes: tuple[bytes, ...] = ()  # over the manifest, not verified


@dataclass(frozen=True)
class Written(Logged):
    """The entry behind a version or an alias, after a push or a move."""

    changed: bool = True  # whether this call wrote it
    number: int = 0  # N of `vN`, of a push
    is_new: bool = False  # whether this call made that version


def read_package(folder: Path) -> Package:
    """Reads an artifact folder and loads it, so that an invalid artifact is never published.

    Raises:
        ArtifactError: the loader refuses it, or it changed meanwhile; E_SIG for a signature of
            another artifact.
    """
    check_is_artifact(folder)
    from specctl.artifacts.load import load_artifact  # here: it needs torch

    digest = load_artifact(folder).digest
    found = read_folder(folder)
    checked(str(folder), found[MANIFEST], digest)
    envelopes = tuple(found[name] for name in (SIGNATURE,) if name in found)
    for envelope in envelopes:
        check_envelope(f"{folder}/{SIGNATURE}", envelope, digest)
    files = {name: data for name, data in found.items() if name != SIGNATURE}
    return Package(digest, files, envelopes)


def contradictions(name: str, package: Package) -> list[str]:
    """A sentence for each part of a name that contradicts the artifact's manifest.

    Facts that the manifest lacks are not compared, and neither is the hardware `cpu`.
    """
    target, drafter, hardware, workload = parts_of(name)
    manifest = parse_manifest(package.files[MANIFEST])
    if manifest.pair.drafter == "embedded":  # an abbreviation
        pair = manifest.pair.model_copy(update={"drafter": "embedded:eagle3"})
        manifest = manifest.model_copy(update={"pair": pair})
    domain = manifest.domain or Domain()
    parts = {
        "target": (target, (manifest.pair.target,)),
        "drafter": (drafter, (manifest.pair.drafter,)),
        "hardware": (None if hardware == "cpu" else hardware, domain.hardware or ()),
        "workload": (workload, () if domain.workload is None else (domain.workload,)),
    }
    return [
        f"the name says {field} {word}, the artifact was made on {shown(', '.join(found))}"
        for field, (word, found) in parts.items()
        if word is not None and found and not any(contains(one, word) for one in found)
    ]


def push(writer: Writer, package: Package, name: str, *, reason: str | None = None) -> Written:
    """Publishes a version: blobs, manifest, signatures, and last the entry that makes them count.

    The writer's key signs the artifact and the entry. A version that exists keeps its number; a
    new entry is added only if the writer's key has not signed it.

    Raises:
        ArtifactError: E_SIG if the name requires a signature that is missing.
        RegistryError: E_NAME, E_BUSY, E_LOG.
        StoreError: the store cannot be used; repeating is safe.
    """
    registry, trust, digest = writer.registry, writer.trust, package.digest
    log, envelopes = registry.log(parse_name(name)), list(package.envelopes)
    there = registry.content.signatures(digest) if digest in log.state.versions else []
    if writer.key is not None and not any(
        speaks_of(one, digest, name) and writer.has_signed(one) for one in there
    ):
        envelopes.append(sign_artifact(writer.key, digest, name))
    if trust.requires(name):
        trust.accepted([*there, *envelopes], digest, name)

    def decide() -> Publish | None:
        published = log.accepted(trust).versions.get(digest, [])
        is_there = any(writer.has_signed(log.entries[one].envelope) for one in published)
        return None if is_there else Publish(digest=digest)

    # Drafted before anything is stored, since the reason or the key may be refused.
    if (action := decide()) is not None:
        _drafted(writer, log, action, reason)
    registry.check_store()
    registry.content.publish(digest, package.files, envelopes)
    logged = _committed(writer, log, decide, reason)
    first = log.state.versions[digest][0]
    return Written(
        **vars(logged or log.entries[first]),
        changed=logged is not None,
        number=list(log.state.versions).index(digest) + 1,
        is_new=logged is not None and logged.entry.generation == first,
    )


def promote(
    writer: Writer,
    name: str,
    alias: str,
    digest: str,
    *,
    expect: str | None = None,
    reason: str | None = None,
) -> Written:
    """Points an alias to a published version, by compare-and-swap on its present one.

    If it points there already, an entry is written only to add the signature of the writer's key.

    Args:
        expect: the digest that the alias must have now; None accepts any.

    Raises:
        RegistryError: E_ALIAS_CONFLICT with the present version if another writer moved it
            meanwhile, E_MISSING for a digest not published under the name, E_BUSY, E_LOG.
        ArtifactError: the version's content is damaged, or it lacks a required signature.
    """
    log = writer.registry.known_log(name)
    parse_new_alias(alias)
    parse_digest(digest)
    return _moved(writer, log, _present(writer, log, alias, expect), "alias", alias, digest, reason)


def rollback(
    writer: Writer,
    name: str,
    alias: str,
    *,
    reason: str,
    to: str | None = None,
    expect: str | None = None,
) -> Written:
    """Points an alias back to an older version; see also `promote`.

    Args:
        reason: required.
        to: an earlier version of the alias; None for the one before the present. Versions that
            were rolled back do not count.
        expect: the version to go back from, so that a repeated call is refused once it was done.

    Raises:
        RegistryError: E_NO_PREVIOUS; see also `promote`.
        UsageError: no reason.
        UnknownOutcomeError: the outcome is unknown; repeat with `expect`.
    """
    if not reason.strip():
        raise UsageError("--reason is empty; the history needs one")
    log = writer.registry.known_log(name)
    present = _present(writer, log, alias, expect)
    moves = log.accepted(writer.trust).moves.get(alias, [])
    digest = _previous(log, alias, moves, None if to is None else parse_digest(to))
    try:
        return _moved(writer, log, present, "rollback", alias, digest, reason)
    except UnknownOutcomeError as lost:
        fix = f"repeat it with --expect {moves[-1].digest}, which is refused if it was done"
        raise UnknownOutcomeError(lost.message, hint=fix) from None


def version_digest(writer: Writer, name: str, version: str) -> str:
    """The digest of a version given by the user: `v2`, `sha256:<hex>` or its first digits, or
    another alias of the name, as the writer sees it."""
    reference = parse_reference(f"{name}@{version}")
    return named_digest(writer.registry.known_log(name), reference, writer.trust)


def _present(writer: Writer, log: Log, alias: str, expect: str | None = None) -> Pointer | None:
    """The present version of an alias, as the writer sees it (E_ALIAS_CONFLICT if another one is
    expected)."""
    present = log.accepted(writer.trust).aliases.get(alias)
    if expect is not None and (present is None or present.digest != expect):
        raise _conflict(log, alias, expect, present)
    return present


def _previous(log: Log, alias: str, moves: Sequence[Pointer], to: str | None) -> str:
    """The version to go back to (else E_NO_PREVIOUS)."""
    held = [one.digest for one in moves]
    if to is None and len(held) > 1:
        return held[-2]
    if to is not None and to in held:
        return to
    problem = "there is no older version to go back to" if held else "there is no such alias"
    if held and to is not None:
        older = list(dict.fromkeys(held[-2::-1]))[:MAX_NAMED]
        problem = f"the alias never had {to}; it had {', '.join(older) or 'no older version'}"
    command = typed(log.store.url, "promote", log.name, alias, "VERSION")
    fix = f"{command} points it to any version, also one that was rolled back"
    raise RegistryError("E_NO_PREVIOUS", str(Reference(log.name, alias)), problem, hint=fix)


def _moved(
    writer: Writer,
    log: Log,
    before: Pointer | None,
    kind: Literal["alias", "rollback"],
    alias: str,
    digest: str,
    reason: str | None,
) -> Written:
    """Commits a move to a version that is complete and that readers accept.

    Only another move of this alias since `before` is a conflict.
    """
    registry, trust = writer.registry, writer.trust
    registry.check_store()
    check_published(log, digest)
    check_entry(trust, publication(log, trust, digest))
    registry.content.fetch(digest)
    accepted_signatures(log, trust, digest)

    def decide() -> Move | None:
        present = _present(writer, log, alias)
        if present != before:
            raise _conflict(log, alias, before.digest if before else None, present)
        # A later move that the writer does not accept still affects readers: it is replaced.
        if present is not None and present == log.state.aliases[alias]:
            there = log.entries[present.generation]
            if present.digest == digest and writer.has_signed(there.envelope):
                return None
        return Move(kind=kind, alias=alias, digest=digest)

    logged = _committed(writer, log, decide, reason)
    there = log.entries[log.accepted(trust).aliases[alias].generation]
    return Written(**vars(logged or there), changed=logged is not None)


def _committed(
    writer: Writer, log: Log, decide: Callable[[], Publish | Move | None], reason: str | None
) -> Logged | None:
    """Appends an action to the newest state; decides again if another writer was faster.

    Args:
        decide: returns the action, or None if there is nothing to do.
    """
    for _ in range(MAX_LOSSES):
        log.refresh()
        action = decide()
        if action is None:
            writer.registry.note(log)
            return None
        logged = _drafted(writer, log, action, reason)
        try:
            log.append(logged)
        except KeyTakenError:
            continue
        writer.registry.note(log)
        return logged
    problem = f"other writers were faster {MAX_LOSSES} times; nothing was committed"
    raise RegistryError("E_BUSY", f"log of {log.name}", problem, hint="try again")


def _drafted(writer: Writer, log: Log, action: Publish | Move, reason: str | None) -> Logged:
    """Drafts the next entry and checks that readers accept it."""
    logged = log.draft(action, writer.actor, writer.key, reason)
    check_entry(writer.trust, logged)
    return logged


def _conflict(log: Log, alias: str, expected: str | None, found: Pointer | None) -> RegistryError:
    return RegistryError(
        "E_ALIAS_CONFLICT",
        str(Reference(log.name, alias)),
        f"it points to {found.digest if found else 'nothing'}, not to {expected or 'nothing'}",
        hint="check its present version, then decide again",
    )
