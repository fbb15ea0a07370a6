"""Who writes to a registry, and what stands before every commit."""

from __future__ import annotations

from dataclasses import dataclass

from specctl.artifacts.registry.entries import Author
from specctl.artifacts.registry.holding import Hold, hold, tell_stored
from specctl.artifacts.registry.log import BeforeCommit
from specctl.artifacts.registry.room import Registry
from specctl.artifacts.registry.trusting import check_envelope, effective_trust
from specctl.artifacts.signing import Role, Trust


@dataclass(frozen=True)
class Writer:
    """A registry, who writes to it, and whom that user trusts."""

    registry: Registry
    author: Author
    trust: Trust

    def trusted(self) -> Trust:
        """The user's trust with what the registry's settings add now.

        Raises:
            ArtifactError: E_SIG, E_STALE.
        """
        return effective_trust(self.registry, self.trust)

    def guard(self, held: Hold, trust: Trust, name: str, role: Role) -> BeforeCommit:
        """What must hold right before a commit: the signature readers will ask for, the time."""
        check = check_envelope(self.registry, trust, name, role)

        def before(envelope: bytes) -> None:
            check(envelope)
            held.check()

        return before


def hold_whole(writer: Writer, digest: str) -> Hold:
    """Holds an artifact that the registry has, and makes sure that all of it is there.

    Raises:
        ArtifactError: E_MISSING, E_DIGEST.
        RegistryError: E_BUSY.
    """
    content = writer.registry.content
    parts = content.parts(digest)
    held = hold(writer.registry, parts, writer.author)
    content.fetch(digest, lambda _: None)
    tell_stored(writer.registry, parts, writer.author)
    return held
