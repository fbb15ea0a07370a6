"""A history: dense, chained, in its one place; whatever a listing says, whoever else writes."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specctl.artifacts.signing import envelope_bytes
from specctl.errors import RegistryError
from specctl.records import canonical_json
from specctl.registry import push
from specctl.registry.log import ENTRY_TYPE, Logged, Move, Publish, entry_key
from specctl.stores import KeyTakenError, StoredObject, UnreadableError
from tests.registry.worlds import NAME, Stale, package, registry_on, writer_on
from tests.stores.memory import MemoryStore, Unsure


@pytest.fixture
def store() -> MemoryStore:
    """Three versions of one name."""
    store = MemoryStore()
    for word in ("one", "two", "three"):
        push(writer_on(store), package(word), NAME)
    return store


def payload_of(store: MemoryStore, generation: int) -> dict[str, Any]:
    envelope = json.loads(store.kept[entry_key(NAME, generation)])
    tree: dict[str, Any] = json.loads(b64decode(envelope["payload"]))
    return tree


def replace_entry(store: MemoryStore, at: int, **changes: object) -> None:
    """An attacker who may write rewrites an entry, correctly in all but what is changed."""
    tree = {**payload_of(store, at), **changes}
    store.kept[entry_key(NAME, at)] = envelope_bytes(ENTRY_TYPE, canonical_json(tree).encode())


def refusal(store: MemoryStore) -> str:
    with pytest.raises(RegistryError) as refused:
        registry_on(store).log(NAME)
    assert refused.value.code == "E_LOG"
    assert refused.value.exit_code == 7
    return str(refused.value)


def entries(store: MemoryStore) -> list[Logged]:
    return registry_on(store).log(NAME).entries


def remove_second(store: MemoryStore) -> None:
    del store.kept[entry_key(NAME, 1)]


def fast_forward(store: MemoryStore) -> None:
    """Family 17: the largest generation that a key can hold; nothing is read up to there."""
    store.kept[entry_key(NAME, 999_999_999_999)] = store.kept[entry_key(NAME, 2)]


def add_spaces(store: MemoryStore) -> None:
    envelope = json.loads(store.kept[entry_key(NAME, 2)])
    spaced = json.dumps(payload_of(store, 2), indent=1).encode()
    envelope["payload"] = b64encode(spaced).decode()
    store.kept[entry_key(NAME, 2)] = canonical_json(envelope).encode()


def rebuilt(change: Callable[[bytes], bytes]) -> Callable[[MemoryStore], None]:

    def harm(store: MemoryStore) -> None:
        store.kept[entry_key(NAME, 2)] = change(store.kept[entry_key(NAME, 2)])

    return harm


NEVER = {"kind": "alias", "alias": "prod", "digest": "sha256:" + "0" * 64}
HARMS: dict[str, tuple[Callable[[MemoryStore], None], str]] = {
    "a gap": (remove_second, "is missing"),
    "a fast-forwarded log": (fast_forward, "is missing"),
    "a rewritten past": (lambda store: replace_entry(store, 1, actor="mallory"), "prev_digest"),
    "a move to no version": (lambda store: replace_entry(store, 2, action=NEVER), "never pub"),
    "a payload that is not canonical": (add_spaces, "canonical"),
    "a space more": (rebuilt(lambda data: data + b" "), ""),
    "another type": (rebuilt(lambda d: d.replace(b"registry.entry", b"other.entry")), ""),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_a_broken_history_is_refused(store: MemoryStore, harm: str) -> None:
    HARMS[harm][0](store)
    assert HARMS[harm][1] in refusal(store)


@pytest.mark.parametrize(
    ("field", "value"),
    [("generation", 1), ("generation", 2**63 - 1), ("generation", 2**60), ("name", "other"),
     ("registry_id", "0" * 32), ("prev_digest", None), ("prev_digest", "sha256:" + "0" * 64),
     ("registry_version", 2), ("nonce", "short"), ("created", "yesterday"),
     ("created", "2026-13-01T00:00:00Z"), ("created", "2026-02-31T25:61:61Z"),
     ("expires", None), ("created", "2026-01-01T24:00:00Z"),
     ("created", "٢٠٢٦-01-01T00:00:00Z"), ("actor", "a\x1b[2J"),
     ("extra", 1), ("action", {"kind": "mark", "digests": ["sha256:" + "0" * 64]}),
     ("action", {"kind": "exec"})],
)  # fmt: skip
def test_an_entry_out_of_place_is_refused(store: MemoryStore, field: str, value: object) -> None:
    replace_entry(store, 2, **{field: value})
    assert refusal(store).isprintable()


def test_nothing_is_written_that_readers_would_refuse(store: MemoryStore) -> None:
    nothing = Move(kind="alias", alias="prod", digest="sha256:" + "0" * 64)
    log, before = registry_on(store).log(NAME), dict(store.kept)
    with pytest.raises(RegistryError, match=r"E_ENTRY .*nothing was committed"):
        log.draft(nothing, "ann", None)
    assert store.kept == before
    push(writer_on(store), package("four"), NAME)
    assert len(entries(store)) == 4


def test_a_lost_race_leaves_the_state_as_it_was(store: MemoryStore) -> None:
    log = registry_on(store).log(NAME)
    push(writer_on(store), package("four"), NAME)
    with pytest.raises(KeyTakenError):
        log.append(log.draft(Publish(digest=package("five").digest), "ann", None))
    assert len(log.entries) == len(log.state.versions) == 3


def test_stale_listings_hide_nothing_from_two_writers() -> None:
    """Both see the listing of an empty store for ever."""
    store = MemoryStore()
    writer_on(store)
    left, right = (writer_on(Stale(store)) for _ in range(2))
    for number in range(5):
        push(left, package(f"left {number}"), NAME)
        push(right, package(f"right {number}"), NAME)
    assert len(entries(store)) == 10
    assert len(registry_on(Stale(store)).log(NAME).entries) == 10


@pytest.mark.parametrize("outcomes", [["late"], ["lost"], ["lost", "late"]], ids="-".join)
def test_a_commit_of_unknown_outcome_happens_once(store: MemoryStore, outcomes: list[str]) -> None:
    unsure = Unsure(store)
    writer = writer_on(unsure)
    four = package("four")
    writer.registry.check_store()
    writer.registry.content.publish(four.digest, four.files)
    unsure.outcomes = ["good"] * len(four.files) + list(outcomes)
    push(writer, four, NAME)
    assert unsure.outcomes == []
    versions = [one.entry.action for one in entries(store)]
    assert [action.digest for action in versions].count(four.digest) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("key", ["sub/000000000009.json", "9.json", "head", "000000000009"])
def test_other_keys_beside_entries_are_passed_over(store: MemoryStore, key: str) -> None:
    store.kept[f"log/{NAME.replace(':', '=')}/{key}"] = b"junk"
    assert len(entries(store)) == 3


def test_a_listing_that_nobody_can_read_stops_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a bucket one odd key hides all that is beside it; entries are read one by one then."""
    store = MemoryStore()
    digest = package("one").digest
    push(writer_on(store), package("one"), NAME)

    def objects(prefix: str) -> Iterator[StoredObject]:
        raise UnreadableError(f"{prefix}: expected keys, found another", hint="remove it")

    monkeypatch.setattr(store, "objects", objects)
    log = registry_on(store).log(NAME)
    assert list(log.state.versions) == [digest]
