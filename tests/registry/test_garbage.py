"""What is used is never deleted: by rule, and in every interleaving of a user and a collector."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specctl.errors import RegistryError, UsageError
from specctl.registry import garbage, holding, pin, promote, push, writing
from specctl.registry.garbage import reachable, sweep
from specctl.registry.pins import release_pins
from tests.registry.races import (
    NEW,
    OLD,
    RETENTION_S,
    User,
    World,
    races,
    use_by_copy,
    use_by_pin,
    use_by_promotion,
    use_by_push,
)
from tests.registry.worlds import (
    GRACE_S,
    LIMIT_S,
    NAME,
    HandClock,
    package,
)


@pytest.fixture
def world() -> World:
    return World()


def test_what_nothing_reaches_is_marked_then_swept_after_the_grace(world: World) -> None:
    marked = world.mark()
    assert set(marked) == OLD.parts - NEW.parts, "a blob that is shared stays"
    assert world.sweep() == []
    world.clock.now_s += GRACE_S
    assert world.sweep() == marked
    assert not world.holds(OLD.digest)
    assert world.holds(NEW.digest)
    assert world.mark() == []


def test_every_reason_to_stay_is_one(world: World) -> None:
    registry = world.writer.registry
    assert OLD.digest in reachable(registry, 1e9), "named by an entry within the retention"
    assert OLD.digest in reachable(registry, 3 * RETENTION_S), "moved away from within it"
    assert NEW.digest in reachable(registry, 0.0), "aliased, and the newest"
    assert OLD.digest not in reachable(registry, 0.0)
    promote(world.writer, NAME, "prod", OLD.digest)
    assert NEW.digest in reachable(registry, -1.0), "the newest, and nothing else"
    promote(world.writer, NAME, "prod", NEW.digest)
    promote(world.writer, NAME, "other", OLD.digest)
    assert OLD.digest in reachable(registry, -1.0), "aliased"


def test_a_pin_keeps_until_it_is_released(world: World) -> None:
    writer = world.writer
    made = pin(writer, OLD.digest, reason="the paper cites it")
    assert world.mark() == []
    assert release_pins(writer.registry, OLD.digest, actor="ann", reason="withdrawn") == 1
    assert f"pins/{OLD.digest[7:]}/{made.nonce}.json" in world.store.kept, "the trail stays"
    assert OLD.digest in world.mark()
    with pytest.raises(RegistryError, match="E_NOT_PINNED"):
        release_pins(writer.registry, OLD.digest, actor="ann", reason="again")


def test_a_grace_that_a_publication_could_outlast_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="--grace"):
        sweep(world.writer.registry, world.writer.author, grace_s=GRACE_S - 1)


def test_a_slow_publication_is_stopped_before_its_commit(world: World) -> None:
    writer = world.writer
    with pytest.raises(RegistryError, match="E_TIMEOUT"):
        push(writer, package("slow"), NAME, on_bytes=lambda _: _pass(world.clock))
    assert package("slow").digest not in writer.registry.log(NAME).state.versions


def _pass(clock: HandClock) -> None:
    clock.now_s += LIMIT_S


def test_a_sweep_that_died_blocks_until_it_is_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = world.mark()
    world.clock.now_s += GRACE_S
    writer = world.writer

    def die(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer.registry.content, "remove", die)
    with pytest.raises(KeyboardInterrupt):
        world.sweep(writer)
    for attempt in (lambda: world.sweep(), lambda: push(world.writer, OLD, NAME)):
        with pytest.raises(RegistryError, match="E_BUSY"):
            attempt()
    assert world.end_dead_sweep() == marked, "nothing was deleted yet"
    with pytest.raises(RegistryError, match="E_NO_SWEEP"):
        world.end_dead_sweep()
    assert world.mark() == marked
    world.clock.now_s += GRACE_S
    assert world.sweep() == marked
    push(world.writer, OLD, NAME)
    assert world.holds(OLD.digest)


# ------------------------------------------------------------------ every interleaving


@pytest.mark.parametrize("marks_first", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize(
    ("user", "num_passes"),
    [(use_by_push, 2), (use_by_promotion, 1), (use_by_pin, 1), (use_by_copy, 1)],
)
def test_no_interleaving_deletes_what_is_used(
    user: User, num_passes: int, *, marks_first: bool
) -> None:
    """Few passes of the turn here; benchmarks/bench_registry_gc.py runs all users with three."""
    codes: list[str] = []
    for race in races(user, marks_first=marks_first, num_passes=num_passes):
        assert not race.is_lost()
        codes.append(race.refused)
    assert len(codes) > 25
    assert "" in codes
    assert set(codes) <= {"", "E_BUSY", "E_TIMEOUT", "E_MISSING"}


def no_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users who do not look at the marks."""

    def hold(registry: object, digests: object, author: object) -> holding.Hold:
        return holding.Hold.now(registry)  # type: ignore[arg-type]

    for module in (writing, "specctl.registry.publishing"):
        name = f"{module}.hold" if isinstance(module, str) else f"{module.__name__}.hold"
        monkeypatch.setattr(name, hold)


def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users who take their time."""
    monkeypatch.setattr(holding.Hold, "check", lambda _: None)


def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that believes its mark, and does not read the logs again."""
    found = reachable

    def once(registry: object, retention_s: float, *, gone: object) -> set[str]:
        kept = registry.__dict__.setdefault("kept", found(registry, retention_s))  # type: ignore[arg-type]
        return set(kept)

    monkeypatch.setattr(garbage, "reachable", once)


@pytest.mark.parametrize(
    ("mutant", "marks_first"),
    [(no_keep, True), (no_limit, False), (no_second_look, False)],
    ids=["no keep", "no limit", "no second look"],
)
def test_each_part_of_the_protocol_is_needed(
    mutant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    *,
    marks_first: bool,
) -> None:
    """Without it, the same schedules lose what is in use."""
    mutant(monkeypatch)
    assert any(race.is_lost() for race in races(use_by_push, marks_first=marks_first, num_passes=2))
