"""Who writes to a registry, and what stands before every commit."""

from __future__ import annotations

from dataclasses import dataclass

from specctl.artifacts.signing import Trust
from specctl.registry.entries import Author, Logged
from specctl.registry.holding import Hold, hold, tell_stored
from specctl.registry.log import BeforeCommit, Log
from specctl.registry.room import Registry
from specctl.registry.settling import effective_trust
from specctl.registry.state import NameState
from specctl.registry.trusting import check_entry


@dataclass(frozen=True)
class Writer:
    """A registry, who writes to it, and whom that user trusts."""

    registry: Registry
    author: Author
    trust: Trust

    def trusted(self, name: str) -> Trust:
        """The user's trust under a name, with what the registry's settings add now.

        Raises:
            ArtifactError: E_SIG, E_STALE.
        """
        return effective_trust(self.registry, self.trust, name)

    def guard(self, held: Hold, trust: Trust, log: Log[NameState]) -> BeforeCommit:
        """What must hold right before a commit: that readers will take the entry, and the time."""

        def before(logged: Logged) -> None:
            check_entry(self.registry, trust, log, logged)
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
