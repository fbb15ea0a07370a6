"""Publication: blobs, manifest, signatures, and last the log entry that makes them count."""

from __future__ import annotations

from specctl.artifacts.signing import add_signature, sign_artifact
from specctl.registry.content import OnBytes
from specctl.registry.entries import Author, Logged, Note, Publish
from specctl.registry.holding import hold, tell_stored
from specctl.registry.log import commit
from specctl.registry.packages import Package
from specctl.registry.pins import Pin, write_pin
from specctl.registry.trusting import check_artifact
from specctl.registry.writing import Writer, hold_whole


def push(
    writer: Writer,
    package: Package,
    name: str,
    *,
    note: Note | None = None,
    on_bytes: OnBytes = lambda _: None,
) -> Logged:
    """Publishes a version. The writer's keys sign the artifact and the entry.

    Raises:
        ArtifactError: E_SIG where the name requires a signature that this push would not bring.
        RegistryError: E_NAME, E_BUSY, E_TIMEOUT, E_LOG.
        StoreError: the store cannot be used; doing it again is safe.
    """
    registry, note = writer.registry, note or Note()
    log, trust = registry.log(name), writer.trusted(name)
    envelopes = [*package.envelopes, *_signed(writer.author, package.digest, name, note.expires)]
    check_artifact(registry, trust, name, package.digest, envelopes)
    held = hold(registry, package.parts, writer.author)
    registry.content.publish(package.digest, package.files, on_bytes)
    for envelope in envelopes:
        registry.content.add_signature(package.digest, envelope)
    tell_stored(registry, package.parts, writer.author)
    action, before = Publish(digest=package.digest), writer.guard(held, trust, log)
    logged = commit(
        log, lambda _: action, writer.author, now=registry.clock.utc, note=note, before=before
    )
    assert logged is not None
    return logged


def _signed(author: Author, digest: str, name: str, expires: str | None) -> list[bytes]:
    """One envelope of all the author's keys: a folder can hold no more than one."""
    if not author.keys:
        return []
    envelope = sign_artifact(author.keys[0], digest, name, expires=expires)
    for key in author.keys[1:]:
        envelope = add_signature(envelope, key)
    return [envelope]


def pin(writer: Writer, digest: str, *, reason: str) -> Pin:
    """Keeps an artifact from garbage collection until it is released.

    Raises:
        ArtifactError: E_MISSING where it is not there.
        RegistryError: E_BUSY, E_TIMEOUT, E_ENTRY.
    """
    held = hold_whole(writer, digest)
    held.check()
    return write_pin(writer.registry, digest, actor=writer.author.actor, reason=reason)
