"""What a history adds up to: the fold of a name's log, and of the registry's own logs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from specctl.registry.entries import (
    Keep,
    Logged,
    Mark,
    Move,
    Publish,
    Settings,
    Sweep,
    Swept,
)


class State(Protocol):
    """A fold: entries are applied in the order of their generations."""

    def apply(self, logged: Logged) -> str | None:
        """Takes one entry in; returns the law that it breaks, or None."""

    def copied(self) -> Self:
        """A state of its own, to try an entry on."""


@dataclass(frozen=True)
class Pointer:
    """Where an alias points, and the generation that moved it there.

    Attributes:
        below: what a rollback goes back to: where the alias was before it had this version.
    """

    digest: str
    generation: int
    below: Pointer | None = field(default=None, compare=False, repr=False)

    def moved(self, move: Move, generation: int) -> Pointer:
        """What follows a move: a rollback takes away what is above the version it goes back to.

        A move to the version that is there already renews that one. A rollback to one that the
        alias never had, as older versions wrote it, is a move like any other.
        """
        kept = self.find(move.digest) if move.kind == "rollback" else None
        if kept is None and move.digest == self.digest:
            kept = self
        return Pointer(move.digest, generation, self if kept is None else kept.below)

    def find(self, digest: str) -> Pointer | None:
        """The nearest of this one and those below it that has a version; None if none has."""
        return next((one for one in self.history() if one.digest == digest), None)

    def history(self) -> Iterator[Pointer]:
        """This one and those below it, newest first."""
        here: Pointer | None = self
        while here is not None:
            yield here
            here = here.below


@dataclass
class NameState:
    """Versions and aliases of one name.

    Attributes:
        versions: the newest generation that published each digest, oldest first.
    """

    versions: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, Pointer] = field(default_factory=dict)

    def apply(self, logged: Logged) -> str | None:
        """See `State`. A move must follow the move that it says it follows."""
        action, generation = logged.entry.action, logged.entry.generation
        if isinstance(action, Publish):
            self.versions.pop(action.digest, None)
            self.versions[action.digest] = generation
            return None
        if not isinstance(action, Move):
            return "only publish, alias and rollback in the log of a name"
        if action.digest not in self.versions:
            return "an alias of a published digest"
        if (action.expected_digest, action.expected_generation) != self.expected(action.alias):
            return "a move that follows the alias's last one"
        before = self.aliases.get(action.alias)
        self.aliases[action.alias] = (
            before.moved(action, generation) if before else Pointer(action.digest, generation)
        )
        return None

    def copied(self) -> NameState:
        """See `State`."""
        return NameState(dict(self.versions), dict(self.aliases))

    def expected(self, alias: str) -> tuple[str | None, int | None]:
        """Digest and generation that a move of the alias must name now."""
        now = self.aliases.get(alias)
        return (now.digest, now.generation) if now else (None, None)


@dataclass
class SettingsState:
    """The newest settings, with the envelope that may be signed; None before the first."""

    newest: Logged | None = None

    def apply(self, logged: Logged) -> str | None:
        """See `State`."""
        if not isinstance(logged.entry.action, Settings):
            return "only settings in the log of settings"
        self.newest = logged
        return None

    def copied(self) -> SettingsState:
        """See `State`."""
        return SettingsState(self.newest)


@dataclass
class GarbageState:
    """Digests by what garbage collection did with them.

    Attributes:
        marked: unreachable when marked, with the entry that marked them; not swept yet.
        doomed: being deleted by the sweep of `sweep_generation`; empty when none is under way.
        collected: deleted, and not said to be there again since.
    """

    marked: dict[str, Logged] = field(default_factory=dict)
    doomed: tuple[str, ...] = ()
    sweep_generation: int | None = None
    collected: set[str] = field(default_factory=set)

    def apply(self, logged: Logged) -> str | None:
        """See `State`."""
        action, entry = logged.entry.action, logged.entry
        if isinstance(action, Mark):
            self.marked = {**dict.fromkeys(action.digests, logged), **self.marked}
        elif isinstance(action, Keep):
            self._forget(action.digests)
        elif isinstance(action, Sweep):
            return self._sweep(action, entry.generation)
        elif isinstance(action, Swept):
            return self._swept(action)
        else:
            return "only mark, keep, sweep and swept in the log of garbage"
        return None

    def copied(self) -> GarbageState:
        """See `State`."""
        return replace(self, marked=dict(self.marked), collected=set(self.collected))

    @property
    def gone(self) -> set[str]:
        """What was deleted, or is being deleted, and not said to be there again since."""
        return self.collected | set(self.doomed)

    def _forget(self, digests: tuple[str, ...]) -> None:
        for digest in digests:
            self.marked.pop(digest, None)
            self.collected.discard(digest)

    def _sweep(self, action: Sweep, generation: int) -> str | None:
        if self.sweep_generation is not None:
            return "one sweep at a time"
        if not set(action.digests) <= set(self.marked):
            return "a sweep of marked digests"
        self._forget(action.digests)
        self.doomed, self.sweep_generation = action.digests, generation
        return None

    def _swept(self, action: Swept) -> str | None:
        if action.sweep_generation != self.sweep_generation:
            return "the end of the sweep that is under way"
        self.collected |= set(self.doomed)
        self.doomed, self.sweep_generation = (), None
        return None
