"""A process killed before and after every call of the store: a reader sees all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from specctl.artifacts.facts import utc_now
from specctl.artifacts.signing import Trust
from specctl.errors import ArtifactError
from specctl.registry import Note, Writer, copy_registry, promote, push, rollback
from specctl.registry.entries import Publish
from specctl.registry.fsck import fsck
from specctl.registry.garbage import end_dead_sweep, mark, sweep
from specctl.registry.layout import manifest_key
from specctl.registry.names import parse_reference
from specctl.registry.resolving import named_digest
from tests.registry.worlds import (
    GRACE_S,
    LIMIT_S,
    NAME,
    Dying,
    HandClock,
    Killed,
    package,
    registry_on,
    writer_on,
)
from tests.stores.memory import MemoryStore

ONE, TWO = package("one"), package("two")
ORPHAN = package("orphan")
RETENTION_S = 0.0
Verb = Callable[[Writer], object]


def begun(clock: HandClock) -> MemoryStore:
    """Two versions, `prod` at the second; an orphan that is marked, old enough to be swept."""
    store = MemoryStore()
    writer = writer_on(store, clock)
    for one in (ONE, TWO):
        push(writer, one, NAME)
        promote(writer, NAME, "prod", one.digest)
    writer.registry.content.publish(ORPHAN.digest, ORPHAN.files, lambda _: None)
    mark(writer.registry, writer.author, retention_s=1e9)
    clock.now_s += GRACE_S
    return store


def push_third(writer: Writer) -> None:
    push(writer, package("three"), NAME)


def push_orphan(writer: Writer) -> None:
    """Needs what is marked."""
    push(writer, ORPHAN, NAME)


def promote_first(writer: Writer) -> None:
    promote(writer, NAME, "prod", ONE.digest)


def roll_back(writer: Writer) -> None:
    """Said again after a lost answer, it is done once (`expect`)."""
    rollback(writer, NAME, "prod", note=Note("why"), expect=TWO.digest)


def mark_all(writer: Writer) -> None:
    mark(writer.registry, writer.author, retention_s=RETENTION_S)


def sweep_all(writer: Writer) -> None:
    sweep(writer.registry, writer.author, grace_s=2.0 * LIMIT_S, retention_s=1e9)


VERBS = (push_third, push_orphan, promote_first, roll_back, mark_all, sweep_all)


def check_readers(store: MemoryStore, clock: HandClock) -> None:
    """Every version and every alias that a fresh reader sees is whole, and nothing is damaged."""
    registry = registry_on(store, clock)
    log = registry.log(NAME)
    for digest in log.state.versions:
        registry.content.fetch(digest, lambda _: None)
    assert named_digest(log, parse_reference(f"{NAME}@prod")) in (ONE.digest, TWO.digest)
    findings = [one for one in fsck(registry, Trust()) if one.is_damage]
    assert findings == []


def num_calls(verb: Verb) -> int:
    clock = HandClock()
    store = Dying(begun(clock))
    verb(writer_on(store, clock))
    return store.num_calls


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_kill_at_any_call_leaves_all_or_nothing(verb: Verb, *, is_after: bool) -> None:
    total = num_calls(verb)
    assert total >= 3, "no calls to be killed at would show nothing"
    for dies_at in range(total):
        clock = HandClock()
        store = begun(clock)
        dying = Dying(store, dies_at, is_after)
        with pytest.raises(Killed):
            verb(writer_on(dying, clock))
        check_readers(store, clock)
        finish(verb, writer_on(store, clock))
        check_readers(store, clock)


def finish(verb: Verb, writer: Writer) -> None:
    """The same again by another process must work; a sweep that died is ended by hand."""
    if writer.registry.garbage_log().state.sweep_generation is not None:
        end_dead_sweep(writer.registry, writer.author)
    verb(writer)


def test_a_kill_while_what_was_collected_is_pushed_again_loses_nothing(tmp_path: Path) -> None:
    """Its history names it still; until it is whole again it counts as collected, not as lost."""
    clock = HandClock()
    store = begun(clock)
    for _ in range(2):
        sweep_old(writer_on(store, clock))
    assert found(store, clock) == {"W_COLLECTED"}
    total, kept = num_calls_on(store, clock), dict(store.kept)
    assert total > 10
    for dies_at, is_after in product(range(total), (False, True)):
        store.kept = dict(kept)
        with pytest.raises(Killed):
            push(writer_on(Dying(store, dies_at, is_after), clock), ONE, NAME)
        assert found(store, clock) <= {"W_COLLECTED", "W_ORPHAN"}
        copy_registry(registry_on(store, clock), tmp_path / f"{dies_at}{is_after}")
    push(writer_on(store, clock), ONE, NAME)
    assert found(store, clock) == set()
    del store.kept[manifest_key(ONE.digest)]
    assert "E_MISSING" in found(store, clock), "what is there again can be lost"


def sweep_old(writer: Writer) -> None:
    """Sweeps what is marked, then marks all that no alias needs."""
    registry, author = writer.registry, writer.author
    sweep(registry, author, grace_s=GRACE_S, retention_s=RETENTION_S)
    mark(registry, author, retention_s=RETENTION_S)
    registry.clock.now_s += GRACE_S  # type: ignore[attr-defined]


def found(store: MemoryStore, clock: HandClock) -> set[str]:
    return {one.code for one in fsck(registry_on(store, clock), Trust())}


def num_calls_on(store: MemoryStore, clock: HandClock) -> int:
    copy = MemoryStore()
    copy.kept = dict(store.kept)
    dying = Dying(copy)
    push(writer_on(dying, clock), ONE, NAME)
    return dying.num_calls


def push_hastily(writer: Writer) -> None:
    """A mutant: the log entry first, what it names afterwards."""
    three = package("three")
    log = writer.registry.log(NAME)
    log.append(Publish(digest=three.digest), writer.author, created=utc_now(), note=Note())
    writer.registry.content.publish(three.digest, three.files, lambda _: None)


def test_the_wrong_order_would_be_seen() -> None:
    total, num_torn = num_calls(push_hastily), 0
    for dies_at in range(total):
        clock = HandClock()
        store = begun(clock)
        with pytest.raises(Killed):
            push_hastily(writer_on(Dying(store, dies_at, is_after=False), clock))
        try:
            check_readers(store, clock)
        except ArtifactError:
            num_torn += 1
    assert num_torn >= len(package("three").files)
