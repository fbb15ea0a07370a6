"""A loop's next policy where looks, loads and reloads fail: requests go on, nothing is missed, and
what failed is neither forgotten nor paid for at every round."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.artifacts import Artifact
from specctl.artifacts.signing import SigningKey
from specctl.errors import (
    ArtifactError,
    LossyPolicyError,
    RegistryError,
    SpecctlError,
    StoreError,
    UsageError,
)
from specctl.policy import Policy
from specctl.runtime import decode, watching
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.watching import FolderSource, Refusal, Version, Watch, refusal_of
from tests.artifacts.examples import write_artifact
from tests.runtime.registries import EXPECT, GOOD, LARGE, Shared, open_shared, trusting, version
from tests.runtime.toy_loops import loop_of

TOO_LONG = ArtifactError("E_COST", "policy record", expected="at most 4096", found="9000")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
AWAY = StoreError("team", expected="an answer", found="none", fix="try again later")
FOREIGN = ArtifactError("E_TARGET", "target", expected="this run's", found="another")


def unreachable(*_: object) -> None:
    """In place of `resolve`."""
    raise AWAY


@dataclass
class Clock:
    """The monotonic clock of watches."""

    now_s: float = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watching, "time", clock)
    return clock


@dataclass
class Counted:
    """Stands in a function's place: fails in the ways it is given, in turn, then is the function.

    Attributes:
        moments: of the calls.
    """

    real: Callable[..., Any]
    clock: Clock
    failures: list[Exception] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.moments.append(self.clock.now_s)
        if self.failures:
            raise self.failures.pop(0)
        return self.real(*given, **named)


@dataclass
class Followed:
    """A loop that follows a folder or an alias in which a new policy has just been put.

    Attributes:
        loads: calls of the loader. builds: calls of what a reload builds the new rules' memory by.
    """

    loop: DecodeLoop
    watch: Watch
    clock: Clock
    loads: Counted
    builds: Counted

    def poll(self, num: int, every_s: float = 0.0) -> list[bool]:
        """So many polls, that long apart."""
        found = []
        for _ in range(num):
            found.append(self.watch.poll())
            self.clock.now_s += every_s
        return found


@pytest.fixture(params=["folder", "alias"])
def followed(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Followed:
    """Both kinds of watching, in front of the policy `small`."""
    loop = loop_of(LARGE)
    name = {"folder": "load_artifact", "alias": "pull_resolved"}[request.param]
    loads = Counted(getattr(watching, name), clock)
    builds = Counted(decode.rehearse, clock)
    monkeypatch.setattr(watching, name, loads)
    monkeypatch.setattr(decode, "rehearse", builds)
    if request.param == "folder":
        watch = Watch(FolderSource(version(tmp_path / "policy", GOOD["small"]), EXPECT), loop)
    else:
        shared = open_shared(tmp_path)
        shared.publish(tmp_path, "small")
        shared.move("small")
        watch = shared.watch(loop)
    return Followed(loop, watch, clock, loads, builds)


def test_a_load_that_may_pass_is_tried_again_ever_less_often(followed: Followed) -> None:
    """An artifact whose load takes long must not cost that at each round."""
    followed.loads.failures += [TOO_LONG, OSError(), TOO_LONG]
    assert followed.poll(40, every_s=1.0) == [False] * 35 + [True] + [False] * 4
    assert followed.loads.moments == [100.0, 105.0, 115.0, 135.0]
    assert (followed.loop.policy, followed.watch.last_error) == (GOOD["small"], None)


def test_a_load_that_is_refused_for_good_is_not_tried_again(followed: Followed) -> None:
    followed.loads.failures += [FOREIGN]
    assert not any(followed.poll(40, every_s=1000.0))
    assert followed.loads.moments == [100.0], "the bytes are what they are"
    assert (followed.watch.last_error, followed.watch.num_failures) == (FOREIGN, 1)


@pytest.mark.parametrize("error", [NO_MEMORY, MemoryError(), KeyError(1)], ids=repr)
def test_a_reload_that_may_pass_is_tried_again_ever_less_often(
    error: Exception, followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    """And the loop is whole meanwhile: what fails is in the midst of `DecodeLoop.reload`."""
    rules = followed.loop.rules
    followed.builds.failures += [error, error]
    assert not any(followed.poll(15, every_s=1.0))
    assert (followed.loop.policy, followed.loop.rules) == (LARGE, rules)
    assert (followed.watch.last_error, followed.watch.num_failures) == (error, 2)
    assert len(caplog.messages) == 1, "told once"
    assert followed.poll(2) == [True, False]
    assert followed.builds.moments == [100.0, 105.0, 115.0]
    assert len(followed.loads.moments) == 1, "it was loaded; only the reload failed"
    assert (followed.loop.policy, followed.watch.last_error) == (GOOD["small"], None)


def test_a_place_that_cannot_be_listed_is_said(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that is not there may come; a file in its place, or one that is not ours to read,
    is a mistake that nobody would hear of."""
    place, loop = tmp_path / "policy", loop_of(LARGE)
    watch = Watch(FolderSource(place, EXPECT), loop)
    assert not watch.poll()
    assert watch.last_error is None
    place.write_text("no folder")
    assert not any(watch.poll() for _ in range(3))
    assert "E_MISSING" in str(watch.last_error)
    assert len(caplog.messages) == 1
    place.unlink()
    version(place, GOOD["small"])
    assert watch.poll()
    assert watch.last_error is None


def test_a_version_that_the_loop_refused_is_not_built_again(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, builds = loop_of(LARGE), list[Policy]()
    watch, real = shared.watch(loop), decode.runnable

    def count(policy: Policy, *given: Any) -> Any:
        builds.append(policy)
        return real(policy, *given)

    monkeypatch.setattr(decode, "runnable", count)
    shared.move("too large")
    assert not any(watch.poll() for _ in range(40))
    refusal = watch.last_error
    with monkeypatch.context() as patch:
        patch.setattr(watching, "resolve", unreachable)
        watch.poll()
    assert watch.last_error is AWAY
    watch.poll()
    assert watch.last_error is refusal, "an outage does not make it forgotten"
    assert len(builds) == 1
    shared.move("small")
    assert watch.poll(), "it was that version's refusal alone"


def test_the_waits_begin_anew_for_another_version(
    shared: Shared, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, loads = loop_of(LARGE), Counted(watching.pull_resolved, clock, [TOO_LONG] * 3)
    monkeypatch.setattr(watching, "pull_resolved", loads)
    followed = Followed(loop, shared.watch(loop), clock, loads, loads)
    shared.move("chain")
    followed.poll(2, every_s=5.0)
    shared.move("small")
    assert followed.poll(2, every_s=5.0) == [False, True]
    assert loads.moments == [100.0, 105.0, 110.0, 115.0]


def test_the_waits_begin_anew_once_a_version_was_taken_over(
    shared: Shared, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device had no memory a while ago, and has none again."""
    loop, builds = loop_of(LARGE), Counted(decode.rehearse, clock, [NO_MEMORY] * 2)
    monkeypatch.setattr(decode, "rehearse", builds)
    followed = Followed(loop, shared.watch(loop), clock, builds, builds)
    shared.move("small")
    assert followed.poll(4, every_s=5.0) == [False, False, False, True]
    shared.move("chain")
    assert followed.poll(1) == [True]
    shared.move("small")
    builds.failures.append(NO_MEMORY)
    assert followed.poll(2, every_s=5.0) == [False, True]


def test_an_outage_is_asked_through_and_told_once(
    shared: Shared, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is nobody's bytes, so nothing waits longer than the look that finds it over."""
    loop = loop_of(LARGE)
    watch = shared.watch(loop)
    shared.move("small")
    with monkeypatch.context() as patch:
        patch.setattr(watching, "resolve", unreachable)
        assert not any(watch.poll() for _ in range(3))
    assert (watch.last_error, watch.num_failures) == (AWAY, 3)
    assert len(caplog.messages) == 1
    assert watch.poll()
    assert watch.last_error is None


def test_an_alias_that_did_not_move_is_resolved_and_not_loaded_again(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, loads = loop_of(LARGE), list[str]()
    watch, real = shared.watch(loop), watching.pull_resolved

    def count(resolved: Any, *arguments: Any, **options: Any) -> Any:
        loads.append(resolved.digest)
        return real(resolved, *arguments, **options)

    monkeypatch.setattr(watching, "pull_resolved", count)
    for word in ("small", "other pair", "small"):
        shared.move(word)
        for _ in range(3):
            watch.poll()
    found = [shared.digests[word] for word in ("small", "other pair")]
    assert loads == found, "each digest once, good or bad"
    newest = shared.entries[-1]
    newest.with_name(f"{len(shared.entries):012d}.json").write_bytes(b"no entry")
    assert not watch.poll()
    assert watch.last_error is not None, "it is asked about all the same"


class Files:
    """Those of an artifact, many megabytes."""


def test_a_refusal_that_stands_holds_none_of_the_files(clock: Clock) -> None:
    held: list[weakref.ref[Files]] = []

    def refuse(files: Files) -> Artifact:
        try:
            int(files)  # type: ignore[call-overload]
        except TypeError:
            raise FOREIGN from None

    def load() -> Artifact:
        files = Files()
        held.append(weakref.ref(files))
        return refuse(files)

    class Refusing:
        def newest(self) -> Version:
            return Version("v1", load)

    watch = Watch(Refusing(), loop_of(LARGE))
    assert not watch.poll()
    assert watch.last_error is FOREIGN
    gc.collect()
    assert [files() for files in held] == [None]


# ------------------------------------------------------------------ what is known, and bad since


def test_a_signature_that_is_gone_is_missed_though_the_artifact_is_known(tmp_path: Path) -> None:
    """The digest was loaded, and its bytes are what they were; who signed it is asked each time."""
    shared = open_shared(tmp_path, SigningKey.generate())
    shared.publish(tmp_path, "small", "chain")
    shared.move("small")
    loop = loop_of(LARGE)
    watch = shared.watch(loop)
    assert watch.poll()
    for path in (shared.place / "signatures").rglob("*"):
        if path.is_file():
            path.unlink()
    assert not watch.poll()
    assert isinstance(watch.last_error, ArtifactError)
    assert watch.last_error.code == "E_SIG"
    shared.publish(tmp_path / "again", "small", "chain")
    watch.poll()
    assert watch.last_error is None, "signed again: it was no verdict on the bytes"


def test_what_is_ready_is_not_taken_over_once_a_look_has_refused_it(tmp_path: Path) -> None:
    """Revoked between a look of the thread and the next round."""
    shared = open_shared(tmp_path, SigningKey.generate())
    shared.publish(tmp_path, "small")
    shared.move("small")
    loop = loop_of(LARGE)
    watch = shared.watch(loop)
    watch.look()
    stranger = trusting(SigningKey.generate())
    object.__setattr__(watch.source.reader, "trust", stranger)  # type: ignore[attr-defined]
    assert not watch.poll()
    assert loop.policy == LARGE
    assert "E_SIG" in str(watch.last_error)


# ------------------------------------------------------------------ a race


def test_what_is_taken_over_does_not_hide_what_was_refused_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While the loop builds the rules of one version, a look refuses the next one."""
    folder, loop = write_artifact(tmp_path / "policy", "chain"), loop_of(LARGE)
    watch, real = Watch(FolderSource(folder, EXPECT), loop), loop.reload

    def reload(policy: Policy) -> None:
        real(policy)
        watch.source = Refusing()
        watch.look()

    monkeypatch.setattr(loop, "reload", reload)
    assert watch.poll()
    assert watch.last_error is FOREIGN
    assert not watch.poll()
    assert watch.num_failures == 1, "and it is remembered"


class Refusing:
    """A source whose version is refused."""

    def newest(self) -> Version:
        def load() -> Artifact:
            raise FOREIGN

        return Version("v3", load)


# ------------------------------------------------------------------ what is final


FACTS = {"expected": "this", "found": "that", "fix": "do so"}


def artifact_error(code: str) -> ArtifactError:
    return ArtifactError(code, "field", expected="this", found="that")


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (artifact_error("E_SCHEMA"), True),
        (artifact_error("E_SELFTEST"), True),
        (artifact_error("W_DOMAIN"), True),
        (UsageError("reload", **FACTS), True),
        (LossyPolicyError("reload", **FACTS), True),
        (artifact_error("E_COST"), False),  # memory that others took
        (artifact_error("E_DIGEST"), False),  # a copy that is not finished
        (artifact_error("E_MISSING"), False),
        (artifact_error("E_SIZE"), False),
        (artifact_error("E_FILETYPE"), False),  # a hard link beside a copy that is being made
        (artifact_error("E_SIG"), False),  # a key that is believed again
        (artifact_error("E_STALE"), False),  # an entry that was renewed
        (RegistryError("E_MISSING", "blob", **FACTS), False),
        (StoreError("team", **FACTS), False),
        (SpecctlError("other", **FACTS), False),
        (OSError("full"), False),
        (MemoryError(), False),
    ],
    ids=repr,
)
def test_what_is_of_the_bytes_is_final(error: Exception, *, is_final: bool) -> None:
    refusal = refusal_of("v1", error, None, 5.0, 100.0)
    assert refusal.not_before_s == (math.inf if is_final else 105.0)
    assert refusal.stands("v1", 104.9)
    assert refusal.stands("v1", 1e9) == is_final
    assert not refusal.stands("v2", 100.0)


def test_waits_double_up_to_64_intervals_for_one_version() -> None:
    before: Refusal | None = None
    waits = []
    for _ in range(9):
        before = refusal_of("v1", OSError(), before, 5.0, 100.0)
        waits.append(before.not_before_s - 100.0)
    assert waits == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 320.0, 320.0]
    assert refusal_of("v2", OSError(), before, 5.0, 100.0).not_before_s == 105.0
