"""The history of one name: strict entries, chained by digest, signed or not, in dense generations.

An entry is canonical JSON in a DSSE envelope. Creating the key of the next generation is the only
commit point. Entries are verified once, when they are read; a refresh reads only the new ones.
"""

from __future__ import annotations

import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from specctl.artifacts.manifest import Digest, Name, UtcTime, digest_of, utc_now
from specctl.artifacts.signing import (
    MAX_ENVELOPE_BYTES,
    SigningKey,
    bad_signature,
    envelope_bytes,
    parse_envelope,
    parse_signed,
)
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, RecordError, RegistryError
from specctl.records import Record, canonical_json
from specctl.registry.names import segment_of, typed
from specctl.registry.trust import Trust
from specctl.stores import KeyAbsentError, ObjectStore, UnreadableError, create, read

REGISTRY_VERSION: Final = 1
ENTRY_TYPE = "application/vnd.specctl.registry.entry+json"
MAX_GENERATION = 10**12 - 1
"""Twelve digits, far below 2^53, so that every JSON parser reads it exactly."""
MAX_ENTRIES = 1_000_000
READ_AHEAD = 16
"""Requests at a time."""
LOGS = "log"
_KEY = re.compile(rf"{LOGS}/[^/]+/([0-9]{{12}})\.json")
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""128 random bits."""
Generation = Annotated[int, Field(ge=0, le=MAX_GENERATION)]


class Publish(Record):
    """Publishes a version of the name."""

    kind: Literal["publish"] = "publish"
    digest: Digest


class Move(Record):
    """Points an alias to a version."""

    kind: Literal["alias", "rollback"]
    alias: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    digest: Digest


class Entry(Record):
    """One generation of one history; docs/registry.md explains the fields."""

    registry_version: Literal[1]
    registry_id: Nonce
    name: Name
    generation: Generation
    prev_digest: Digest | None
    nonce: Nonce
    actor: Name
    created: UtcTime
    reason: Name | None
    action: Annotated[Publish | Move, Field(discriminator="kind")]


@dataclass(frozen=True)
class Logged:
    """An entry, its envelope as stored, and the envelope's digest."""

    entry: Entry
    envelope: bytes
    digest: str

    @classmethod
    def of(cls, envelope: bytes) -> Logged:
        """The entry in a canonical envelope (else E_SIG); its signature is not verified."""
        sealed = parse_envelope(envelope)
        if sealed.payload_type != ENTRY_TYPE:
            raise bad_signature(f"the envelope holds {sealed.payload_type}, not {ENTRY_TYPE}")
        for data in (envelope, sealed.payload):
            if canonical_json(parse_strict(data)).encode() != data:
                raise bad_signature("the entry is not canonical JSON")
        form = f"an entry of registry version {REGISTRY_VERSION}"
        return cls(parse_signed(sealed.payload, Entry, form), envelope, digest_of(envelope))


@dataclass(frozen=True)
class Pointer:
    """The version of an alias, and the generation that moved it there."""

    digest: str
    generation: int


@dataclass
class NameState:
    """Versions and aliases of one name."""

    versions: dict[str, list[int]] = field(default_factory=dict)
    """The generations that published each digest, in the order of `v1`, `v2`, ..."""
    moves: dict[str, list[Pointer]] = field(default_factory=dict)
    """Versions that each alias may roll back to, the present one last."""

    @property
    def aliases(self) -> dict[str, Pointer]:
        """The present version of each alias, sorted by alias."""
        return {alias: self.moves[alias][-1] for alias in sorted(self.moves)}

    def broken_rule(self, action: Publish | Move) -> str | None:
        """The rule that an action would break next, as a sentence; None for a valid action."""
        if isinstance(action, Publish) or action.digest in self.versions:
            return None
        return f"{action.alias} would point to {action.digest}, which was never published"

    def apply(self, action: Publish | Move, generation: int) -> None:
        """Applies the next action, which must break no rule.

        A rollback drops the moves after its version; a move to the present version renews it.
        """
        if isinstance(action, Publish):
            self.versions.setdefault(action.digest, []).append(generation)
            return
        moves = self.moves.setdefault(action.alias, [])
        if action.kind == "rollback":
            places = (i for i in reversed(range(len(moves))) if moves[i].digest == action.digest)
            del moves[next(places, len(moves)) :]
        elif moves and moves[-1].digest == action.digest:
            moves.pop()
        moves.append(Pointer(action.digest, generation))


class Log:
    """The history of one name in a registry's store."""

    def __init__(self, store: ObjectStore, registry_id: str, name: str) -> None:
        self.store, self.registry_id, self.name = store, registry_id, name
        self.entries: list[Logged] = []  # verified; `refresh` reads more
        self.state = NameState()  # after these entries
        self._judged: dict[Trust, tuple[int, NameState]] = {}

    def accepted(self, trust: Trust) -> NameState:
        """The state after the entries that `trust` accepts; after all entries if the name needs no
        signature. Each entry is judged once per trust file.
        """
        if not trust.requires(self.name):
            return self.state
        first, state = self._judged.get(trust, (0, NameState()))
        for generation, logged in enumerate(self.entries[first:], start=first):
            with suppress(ArtifactError):
                trust.verify(parse_envelope(logged.envelope), self.name)
                state.apply(logged.entry.action, generation)
        self._judged[trust] = (len(self.entries), state)
        return state

    def refresh(self) -> None:
        """Reads new entries until a generation is absent; E_LOG for a gap, a fork, a broken chain
        or rule. A stale listing makes this slower, and no entry is missed.
        """
        highest = -1 if self.entries else self._highest_listed()
        if highest >= READ_AHEAD:
            self._read_ahead(highest)
        while (envelope := self._get(len(self.entries))) is not None:
            self._take(self._parsed(envelope))
        if highest >= len(self.entries):
            raise self._broken(f"this entry is missing, but entry {highest} exists")

    def draft(
        self, action: Publish | Move, actor: str, key: SigningKey | None, reason: str | None = None
    ) -> Logged:
        """The next entry, signed but not committed.

        Entries are permanent, so one that readers would refuse is not made (E_ENTRY).
        """
        problem = self.state.broken_rule(action)
        if len(self.entries) >= MAX_ENTRIES:
            problem = f"a history has at most {MAX_ENTRIES} entries"
        try:
            entry = Entry(
                registry_version=REGISTRY_VERSION,
                **self._place(),
                nonce=secrets.token_hex(16),
                actor=actor,
                created=utc_now(),
                reason=reason,
                action=action,
            )
        except RecordError as error:
            problem = f"texts have 1 to 256 printable characters: {error.message}"
        if problem is not None:
            raise RegistryError("E_ENTRY", "log entry", problem, hint="nothing was committed")
        payload = canonical_json(entry.model_dump(mode="json")).encode()
        sealed = key.sign(ENTRY_TYPE, payload) if key else envelope_bytes(ENTRY_TYPE, payload)
        return Logged(entry, sealed, digest_of(sealed))

    def append(self, logged: Logged) -> None:
        """Commits a drafted entry.

        Raises:
            KeyTakenError: another writer was faster; refresh, and decide again.
            UnknownOutcomeError: the outcome is not known; refresh, and look.
        """
        create(self.store, entry_key(self.name, len(self.entries)), logged.envelope)
        self._take(logged)

    def _take(self, logged: Logged) -> None:
        self.state.apply(logged.entry.action, len(self.entries))
        self.entries.append(logged)

    def _place(self) -> dict[str, Any]:
        """Fields that follow from the next entry's place in the history."""
        return {
            "registry_id": self.registry_id,
            "name": self.name,
            "generation": len(self.entries),
            "prev_digest": self.entries[-1].digest if self.entries else None,
        }

    def _parsed(self, envelope: bytes) -> Logged:
        """Parses the next entry (else E_LOG) without verifying its signature."""
        if len(self.entries) >= MAX_ENTRIES:
            raise self._broken(f"a history has at most {MAX_ENTRIES} entries")
        try:
            logged = Logged.of(envelope)
        except ArtifactError as error:
            raise self._broken(error.problem) from None
        for name, wanted in self._place().items():
            if getattr(logged.entry, name) != wanted:
                raise self._broken(f"{name} is {getattr(logged.entry, name)}, not {wanted}")
        problem = self.state.broken_rule(logged.entry.action)
        if problem is not None:
            raise self._broken(problem)
        return logged

    def _get(self, generation: int) -> bytes | None:
        try:
            key = entry_key(self.name, generation)
            return read(self.store, key, max_bytes=MAX_ENVELOPE_BYTES)
        except KeyAbsentError:
            return None

    def _read_ahead(self, highest: int) -> None:
        """Reads listed entries in parallel, up to the first that is absent."""
        with ThreadPoolExecutor(READ_AHEAD) as pool:
            for first in range(0, highest + 1, READ_AHEAD):
                last = min(first + READ_AHEAD, highest + 1)
                for envelope in pool.map(self._get, range(first, last)):
                    if envelope is None:
                        return
                    self._take(self._parsed(envelope))

    def _highest_listed(self) -> int:
        """The highest listed generation; -1 for none, or if an invalid key breaks the listing."""
        try:
            found = self.store.objects(f"{LOGS}/{segment_of(self.name)}")
            keys = (_KEY.fullmatch(one.key) for one in found)
            return max((int(key[1]) for key in keys if key), default=-1)
        except UnreadableError:
            return -1

    def _broken(self, problem: str) -> RegistryError:
        return RegistryError(
            "E_LOG",
            f"{self.store.url}, {entry_key(self.name, len(self.entries))}",
            problem,
            hint=f"run {typed(self.store.url, 'verify')}; restore the history from a copy",
        )


def entry_key(name: str, generation: int) -> str:
    """Key of one entry of a name's history."""
    return f"{LOGS}/{segment_of(name)}/{generation:012d}.json"
