"""The history of one name: dense generations, each with the digest of the one before it.

Creating the key of the next generation is the only commit point. Entries are verified as they are
read and kept, so reading on costs only the new ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from specctl.artifacts.signing import MAX_ENVELOPE_BYTES
from specctl.errors import RegistryError
from specctl.registry.entries import (
    Action,
    Author,
    EntryPlace,
    Logged,
    Move,
    Note,
    Publish,
    broken_log,
    read_entry,
    write_entry,
)
from specctl.registry.names import segment_of
from specctl.stores import KeyAbsentError, KeyTakenError, ObjectStore, UnreadableError, create, read

LOGS = "log"
MAX_ENTRIES = 1_000_000
READ_AHEAD = 16
"""Entries requested at once where a listing shows as many."""
MAX_LOSSES = 1000
"""Lost races after which an append gives up; each is another writer's success."""
_KEY = re.compile(rf"{LOGS}/[^/]+/([0-9]{{12}})\.json")


def entry_key(name: str, generation: int) -> str:
    """Key of one entry of a name's history."""
    return f"{LOGS}/{segment_of(name)}/{generation:012d}.json"


@dataclass(frozen=True)
class Pointer:
    """The version of an alias, and the generation that moved it there.

    Attributes:
        below: the version that a rollback goes back to.
    """

    digest: str
    generation: int
    below: Pointer | None = field(default=None, compare=False, repr=False)

    def moved(self, move: Move, generation: int) -> Pointer:
        """The pointer after a move: a rollback drops everything above its version.

        A move to the present version renews it.
        """
        kept = self.find(move.digest) if move.kind == "rollback" else None
        if kept is None and move.digest == self.digest:
            kept = self
        return Pointer(move.digest, generation, self if kept is None else kept.below)

    def find(self, digest: str) -> Pointer | None:
        """The nearest pointer of a version among this one and those below; None if none."""
        return next((one for one in self.history() if one.digest == digest), None)

    def history(self) -> Iterator[Pointer]:
        """This pointer and those below it, newest first."""
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
        """Takes the next entry in; returns the rule that it breaks, or None."""
        action, generation = logged.entry.action, logged.entry.generation
        if isinstance(action, Publish):
            self.versions.pop(action.digest, None)
            self.versions[action.digest] = generation
            return None
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
        """A copy to try an entry on."""
        return NameState(dict(self.versions), dict(self.aliases))

    def expected(self, alias: str) -> tuple[str | None, int | None]:
        """Digest and generation that the next move of an alias must name."""
        now = self.aliases.get(alias)
        return (now.digest, now.generation) if now else (None, None)


class Log:
    """The history of one name.

    Args:
        ready: called before every append; raises where nothing must be written.

    Attributes:
        entries: read and verified so far; `refresh` reads on.
        state: versions and aliases after them.
    """

    def __init__(
        self,
        store: ObjectStore,
        registry_id: str,
        name: str,
        *,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.store, self.registry_id, self.name, self.ready = store, registry_id, name, ready
        self.entries: list[Logged] = []
        self.state = NameState()

    def refresh(self) -> None:
        """Reads on until a generation is absent. A stale listing costs time, never an entry.

        Raises:
            RegistryError: E_LOG for a gap, a fork, a broken chain or a broken rule.
            StoreError: the store cannot be read.
        """
        highest = -1 if self.entries else self._highest_listed()
        if highest >= READ_AHEAD:
            self._read_ahead(highest)
        while (envelope := self._get(len(self.entries))) is not None:
            self._take(envelope)
        if highest >= len(self.entries):
            where = self._where(len(self.entries))
            raise broken_log(where, f"an entry, as there is one at {highest}", "a gap")

    def append(
        self,
        action: Action,
        author: Author,
        *,
        created: str,
        note: Note,
        check: Callable[[Logged], None] = lambda _: None,
    ) -> Logged:
        """Commits the next generation.

        An entry stays for ever, so the new one is first read back and tried on a copy of the state:
        nothing is created that a reader would refuse.

        Args:
            check: receives the entry before it is created; an error stops the append.

        Raises:
            RegistryError: E_ENTRY for an entry that no reader would accept.
            KeyTakenError: another writer was faster; refresh, and decide again.
            UnknownOutcomeError: the outcome is not known; refresh, and look.
        """
        self.ready()
        envelope = write_entry(
            self.next_place(), action, author, created=created, note=note
        ).envelope
        state = self.state.copied()
        try:
            logged = self._parsed(envelope, state)
        except RegistryError as refusal:
            raise RegistryError(
                "E_ENTRY",
                refusal.field,
                expected=refusal.expected,
                found=refusal.found,
                fix="nothing was committed; look at the log, and decide again",
            ) from None
        check(logged)
        create(self.store, entry_key(self.name, len(self.entries)), envelope)
        self.entries.append(logged)
        self.state = state
        return logged

    def commit(
        self,
        decide: Callable[[NameState], Action | None],
        author: Author,
        *,
        now: Callable[[], str],
        note: Note,
        check: Callable[[Logged], None] = lambda _: None,
    ) -> Logged | None:
        """Appends an action to the newest state, deciding again after each lost race.

        Args:
            decide: returns the action, or None where nothing is left to do; an error stops it.
            now: the time, UTC.

        Returns:
            The entry that this call committed, or None.
        """
        for _ in range(MAX_LOSSES):
            self.refresh()
            action = decide(self.state)
            if action is None:
                return None
            try:
                return self.append(action, author, created=now(), note=note, check=check)
            except KeyTakenError:
                continue
        raise RegistryError(
            "E_BUSY",
            f"log of {self.name}",
            expected=f"to commit within {MAX_LOSSES} attempts",
            found="other writers that were always faster",
            fix="try again; nothing was committed",
        )

    def next_place(self) -> EntryPlace:
        """The place of the next entry, as far as the history was read."""
        previous = self.entries[-1].digest if self.entries else None
        return EntryPlace(self.registry_id, self.name, len(self.entries), previous)

    def _take(self, envelope: bytes) -> None:
        self.entries.append(self._parsed(envelope, self.state))

    def _parsed(self, envelope: bytes, state: NameState) -> Logged:
        """The next entry, applied to a state; E_LOG."""
        where = self._where(len(self.entries))
        if len(self.entries) >= MAX_ENTRIES:
            raise broken_log(where, f"at most {MAX_ENTRIES} entries", "more")
        logged = read_entry(envelope, self.next_place(), where)
        rule = state.apply(logged)
        if rule is not None:
            raise broken_log(where, rule, f"{logged.entry.action.kind!r} that breaks it")
        return logged

    def _get(self, generation: int) -> bytes | None:
        try:
            key = entry_key(self.name, generation)
            return read(self.store, key, max_bytes=MAX_ENVELOPE_BYTES)
        except KeyAbsentError:
            return None

    def _read_ahead(self, highest: int) -> None:
        """Reads listed entries many at a time, up to the first that is absent."""
        with ThreadPoolExecutor(READ_AHEAD) as pool:
            for first in range(0, highest + 1, READ_AHEAD):
                last = min(first + READ_AHEAD, highest + 1)
                for envelope in pool.map(self._get, range(first, last)):
                    if envelope is None:
                        return
                    self._take(envelope)

    def _highest_listed(self) -> int:
        """The highest listed generation; -1 for none, or where a foreign key spoils the listing."""
        try:
            found = self.store.objects(f"{LOGS}/{segment_of(self.name)}")
            keys = (_KEY.fullmatch(one.key) for one in found)
            return max((int(key[1]) for key in keys if key), default=-1)
        except UnreadableError:
            return -1

    def _where(self, generation: int) -> str:
        return f"{self.store.url}, {entry_key(self.name, generation)}"
