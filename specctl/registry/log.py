"""An append-only history: dense generations, each naming the digest of the one before it.

Creating the next generation's key is the only commit point there is. What is read is verified as
it is read and kept, so that reading on costs only what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from specctl.artifacts.signing import MAX_ENVELOPE_BYTES
from specctl.errors import RegistryError
from specctl.registry.entries import (
    Action,
    Author,
    EntryPlace,
    Logged,
    Note,
    broken,
    read_entry,
    write_entry,
)
from specctl.registry.layout import generation_of, log_folder, log_key
from specctl.registry.state import State
from specctl.stores import KeyAbsentError, KeyTakenError, ObjectStore, create
from specctl.stores.creating import read
from specctl.stores.interface import UnreadableError

MAX_ENTRIES = 1_000_000
READ_AHEAD = 16
"""Entries asked for at once, where a listing says that there are as many."""
MAX_LOSSES = 1000
"""Lost races after which an append gives up; each of them is somebody else's success."""
S = TypeVar("S", bound=State)
BeforeCommit = Callable[[Logged], None]


class Log(Generic[S]):
    """The history of one name.

    Attributes:
        entries: those read and verified so far; `refresh` reads on.
        state: their fold.
        ready: stands before every entry; raises where nothing must be written.
    """

    def __init__(
        self,
        store: ObjectStore,
        registry_id: str,
        name: str,
        state: S,
        *,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.store, self.registry_id, self.name = store, registry_id, name
        self.ready = ready
        self.entries: list[Logged] = []
        self.state = state

    def refresh(self) -> None:
        """Reads on until a generation is absent. A stale listing costs time, never an entry.

        Raises:
            RegistryError: E_LOG for a gap, a fork, a broken chain or a broken law.
            StoreError: the store cannot be read.
        """
        highest = -1 if self.entries else self._highest_listed()
        if highest >= READ_AHEAD:
            self._read_ahead(highest)
        while (envelope := self._get(len(self.entries))) is not None:
            self._take(envelope)
        if highest >= len(self.entries):
            where = self._where(len(self.entries))
            raise broken(where, f"an entry, as there is one at {highest}", "a gap")

    def append(
        self,
        action: Action,
        author: Author,
        *,
        created: str,
        note: Note,
        before: BeforeCommit = lambda _: None,
    ) -> Logged:
        """Commits the generation that follows what was read.

        An entry is for ever, so nothing is created that a reader would refuse: the new entry is
        read back, and its law tried on a copy of the state, before.

        Args:
            before: sees the entry that is about to be created; what it raises stops that.

        Raises:
            RegistryError: E_ENTRY for an entry that no reader would take; nothing was committed.
            KeyTakenError: somebody else did; refresh, and decide again.
            UnknownOutcomeError: it cannot be told; refresh, and look.
        """
        self.ready()
        envelope = write_entry(self._place(), action, author, created=created, note=note).envelope
        state = self.state.copied()
        try:
            logged = self._read(envelope, state)
        except RegistryError as refusal:
            raise _unreadable(refusal) from None
        before(logged)
        create(self.store, log_key(self.name, len(self.entries)), envelope)
        self.entries.append(logged)
        self.state = state
        return logged

    def _place(self) -> EntryPlace:
        generation = len(self.entries)
        previous = self.entries[-1].digest if self.entries else None
        return EntryPlace(self.registry_id, self.name, generation, previous)

    def _take(self, envelope: bytes) -> None:
        self.entries.append(self._read(envelope, self.state))

    def _read(self, envelope: bytes, state: S) -> Logged:
        """The next entry, applied to a state.

        Raises:
            RegistryError: E_LOG.
        """
        where = self._where(len(self.entries))
        if len(self.entries) >= MAX_ENTRIES:
            raise broken(where, f"at most {MAX_ENTRIES} entries", "more")
        logged = read_entry(envelope, self._place(), where)
        law = state.apply(logged)
        if law is not None:
            raise broken(where, law, f"{logged.entry.action.kind!r} that is none")
        return logged

    def _get(self, generation: int) -> bytes | None:
        key = log_key(self.name, generation)
        try:
            return read(self.store, key, max_bytes=MAX_ENVELOPE_BYTES)
        except KeyAbsentError:
            return None

    def _read_ahead(self, highest: int) -> None:
        """Reads what a listing shows many at a time, up to the first that is absent."""
        with ThreadPoolExecutor(READ_AHEAD) as pool:
            for first in range(0, highest + 1, READ_AHEAD):
                last = min(first + READ_AHEAD, highest + 1)
                for envelope in pool.map(self._get, range(first, last)):
                    if envelope is None:
                        return
                    self._take(envelope)

    def _highest_listed(self) -> int:
        """-1 where none is, or a key that nobody can read hides them all: it is but a hint."""
        try:
            return max(self._listed(), default=-1)
        except UnreadableError:
            return -1

    def _listed(self) -> Iterator[int]:
        for one in self.store.objects(log_folder(self.name)):
            generation = generation_of(one.key)
            if generation is not None:
                yield generation

    def _where(self, generation: int) -> str:
        return f"{self.store.url}, {log_key(self.name, generation)}"


def _unreadable(refusal: RegistryError) -> RegistryError:
    return RegistryError(
        "E_ENTRY",
        refusal.field,
        expected=refusal.expected,
        found=refusal.found,
        fix="nothing was committed; look at what the log says now, and decide again",
    )


def commit(
    log: Log[S],
    decide: Callable[[S], Action | None],
    author: Author,
    *,
    now: Callable[[], str],
    note: Note | None = None,
    before: BeforeCommit = lambda _: None,
) -> Logged | None:
    """Appends what `decide` says about the newest state, deciding again after each lost race.

    Args:
        decide: None where there is nothing left to do; what it raises stops the commit.
        now: the time, as entries write it.
        before: see `Log.append`.

    Returns:
        The entry that this call committed, or None.
    """
    for _ in range(MAX_LOSSES):
        log.refresh()
        action = decide(log.state)
        if action is None:
            return None
        try:
            return log.append(action, author, created=now(), note=note or Note(), before=before)
        except KeyTakenError:
            continue
    raise RegistryError(
        "E_BUSY",
        f"log of {log.name}",
        expected=f"to commit within {MAX_LOSSES} races",
        found="others that were always faster",
        fix="try again; nothing was committed",
    )
