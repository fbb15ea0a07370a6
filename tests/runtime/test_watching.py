"""A loop's policy follows a folder or an alias: what is good takes over, what is bad does not, and
what failed is neither forgotten nor paid for at every round."""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
import time
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
from specctl.policy import Policy, RootOnly, StaticTree, policy_digest
from specctl.registry import parse_reference
from specctl.runtime import decode, watching
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.watching import AliasSource, FolderSource, Version, Watch, refusal_of, stamp_of
from tests.artifacts.examples import HETERO, write_artifact
from tests.runtime.registries import (
    BAD,
    EXPECT,
    GOOD,
    LARGE,
    NAME,
    Shared,
    open_shared,
    trusting,
    version,
)
from tests.runtime.toy import toy_requests
from tests.runtime.toy_loops import Kept, loop_of, texts_of

ROOMY = Policy(shape=StaticTree(depth=11, top_k=10, num_tokens=1000))
FACTS = {"expected": "this", "found": "that", "fix": "do so"}
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
AWAY = StoreError("team", **FACTS)


def artifact_error(code: str) -> ArtifactError:
    return ArtifactError(code, "field", expected="this", found="that")


TOO_LONG, FOREIGN = artifact_error("E_COST"), artifact_error("E_TARGET")


def unreachable(*_: object) -> None:
    """In place of `resolve`."""
    raise AWAY


@dataclass
class Clock:
    """The monotonic clock of watches."""

    now_s: float = 100.0

    def monotonic(self) -> float:
        return self.now_s


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
    """A loop that follows something.

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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watching, "time", clock)
    return clock


Follow = Callable[[Path | Shared], Followed]


@pytest.fixture
def follow(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Follow:
    def follow(place: Path | Shared) -> Followed:
        is_folder = isinstance(place, Path)
        name = "load_artifact" if is_folder else "pull_resolved"
        loads = Counted(getattr(watching, name), clock)
        builds = Counted(decode.rehearse, clock)
        monkeypatch.setattr(watching, name, loads)
        monkeypatch.setattr(decode, "rehearse", builds)
        loop = loop_of(LARGE)
        watch = Watch(FolderSource(place, EXPECT), loop) if is_folder else place.watch(loop)
        return Followed(loop, watch, clock, loads, builds)

    return follow


@pytest.fixture(params=["folder", "alias"])
def followed(request: pytest.FixtureRequest, tmp_path: Path, follow: Follow) -> Followed:
    """Both kinds of watching, in front of the policy `small`."""
    if request.param == "folder":
        return follow(version(tmp_path / "policy", GOOD["small"]))
    shared = open_shared(tmp_path)
    shared.publish(tmp_path, "small")
    shared.move("small")
    return follow(shared)


# --------------------------------------------------------------------------- a folder


def test_a_folder_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, loop = tmp_path / "policy", loop_of(ROOMY)
    watch = Watch(FolderSource(folder, EXPECT), loop)
    assert not watch.poll(), "nothing there for now"
    write_artifact(folder, "hetero")
    assert [watch.poll(), watch.poll()] == [True, False]
    assert loop.policy.shape.kind == "hetero"
    (folder / "policy.safetensors").write_bytes(b"damage")
    with caplog.at_level(logging.WARNING, "specctl.policy"):
        assert not any(watch.poll() for _ in range(2))
    [told] = caplog.messages
    assert "E_DIGEST" in told
    assert "the old one stays" in told
    assert loop.policy.shape.kind == "hetero"
    assert watch.last_error is not None
    shutil.rmtree(folder)
    write_artifact(folder, "chain")
    assert watch.poll()
    assert watch.last_error is None


def test_what_the_loop_plays_already_is_not_taken_over_again(tmp_path: Path) -> None:
    """Its graphs and what its rules remember of requests would be lost for nothing."""
    folder, loop = version(tmp_path / "policy", LARGE), loop_of(LARGE)
    watch = Watch(FolderSource(folder, EXPECT), loop)
    rules = loop.rules
    assert not watch.poll()
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    assert not watch.poll(), "touched"
    assert loop.rules is rules
    assert watch.digest is not None


def test_an_artifact_with_the_sizes_and_times_of_the_last_one_is_noticed(tmp_path: Path) -> None:
    """`current -> v1` becomes `current -> v2`, both unpacked with fixed times."""
    loop = loop_of(ROOMY)
    for name, edges in (("v1", (0.125, 1.0, 2.0)), ("v2", (0.25, 1.5, 2.5))):
        policy = Policy(shape=HETERO.model_copy(update={"edges": edges}))
        for path in version(tmp_path / name, policy).iterdir():
            os.utime(path, (0, 0))
    current, following = tmp_path / "current", tmp_path / "next"
    current.symlink_to("v1")
    watch = Watch(FolderSource(current, EXPECT), loop)
    assert watch.poll()
    following.symlink_to("v2")
    following.replace(current)
    assert watch.poll()
    assert loop.policy.shape.edges == (0.25, 1.5, 2.5)  # type: ignore[union-attr]


def test_a_stamp_tells_files_from_others_of_equal_times_and_sizes(tmp_path: Path) -> None:
    """Written over in place, and put in place of it; and the same files have the same stamp."""
    folder, path, aside = tmp_path / "folder", tmp_path / "folder" / "file", tmp_path / "aside"
    folder.mkdir()
    stamps = []
    for place in (path, path, aside):
        time.sleep(0.02)  # a file system's clock ticks every 10 ms at most
        place.write_bytes(b"any")
        os.utime(place, (0, 0))
        place.replace(path)
        stamps.append(stamp_of(folder))
        assert stamp_of(folder) == stamps[-1]
    assert len(set(stamps)) == 3
    assert stamp_of(tmp_path / "none") == ()


def test_a_place_that_cannot_be_listed_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that is not there may come; a file in its place is a mistake that nobody would
    hear of."""
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


# --------------------------------------------------------------------------- an alias


def test_an_alias_is_followed_and_bad_versions_are_not(
    shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_of(LARGE)
    watch = shared.watch(loop)
    assert not watch.poll(), "there is no such alias yet"
    assert "E_UNKNOWN_ALIAS" in str(watch.last_error)
    for bad in BAD:
        shared.move("small")
        watch.poll()
        assert watch.last_error is None
        assert (loop.policy, watch.digest) == (GOOD["small"], shared.digests["small"])
        shared.move(bad)
        caplog.clear()
        failures = watch.num_failures
        assert not any(watch.poll() for _ in range(3))
        assert loop.policy == GOOD["small"]
        assert watch.last_error is not None
        assert watch.num_failures == failures + 1, "a refusal that stands is one"
        [told] = caplog.messages
        assert "the old one stays" in told


def test_a_registry_that_lost_its_blobs_changes_nothing(shared: Shared) -> None:
    loop = loop_of(LARGE)
    watch = shared.watch(loop)
    shared.move("small")
    assert watch.poll()
    shared.move("chain")
    shutil.rmtree(shared.place / "blobs")
    assert not watch.poll()
    assert "E_MISSING" in str(watch.last_error)
    assert loop.policy == GOOD["small"]


def test_moves_under_load_fail_no_request_and_mix_no_round(shared: Shared) -> None:
    """Every other move is bad; texts are plain decoding's, each round is one good policy's."""
    requests = toy_requests(12)
    plain = texts_of(loop_of(Policy(shape=RootOnly()), batch_size=3).run(requests))
    kept = Kept()
    loop, done = loop_of(LARGE, batch_size=3, observer=kept), {}
    watch = shared.watch(loop)
    for request in requests:
        loop.submit(request)
    words = [word for pair in zip([*GOOD, *GOOD], [*BAD, *BAD], strict=True) for word in pair]
    taken: list[str] = []
    while loop.busy:
        shared.move(words[len(taken) % len(words)])
        watch.poll()
        taken.append(policy_digest(loop.policy))
        done |= texts_of(loop.step())
    assert done == plain
    assert [record.policy_digest for record in kept.records] == taken
    assert set(taken) == {policy_digest(policy) for policy in GOOD.values()}


def test_what_nobody_moves_is_not_followed(shared: Shared) -> None:
    source = shared.source()
    for reference in (f"{NAME}@{shared.digests['small']}", NAME):
        with pytest.raises(UsageError, match=r"policy to follow: expected NAME@ALIAS"):
            AliasSource(source.registry, parse_reference(reference), source.reader, EXPECT)


def test_a_signature_that_is_gone_is_missed_though_the_artifact_is_known(tmp_path: Path) -> None:
    """The digest was loaded, and its bytes are what they were; who signed it is asked each time."""
    shared = open_shared(tmp_path, SigningKey.generate())
    shared.publish(tmp_path, "small", "chain")
    shared.move("small")
    watch = shared.watch(loop_of(LARGE))
    assert watch.poll()
    for path in (shared.place / "signatures").rglob("*"):
        if path.is_file():
            path.unlink()
    assert not watch.poll()
    assert "E_SIG" in str(watch.last_error)
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


# --------------------------------------------------------------------------- what fails


def test_a_load_that_may_pass_is_tried_again_ever_less_often(followed: Followed) -> None:
    """Waits double up to 64 intervals: a load that takes long must not cost that at each round."""
    followed.loads.failures += [TOO_LONG, OSError(), TOO_LONG, *[TOO_LONG] * 5]
    taken = followed.poll(1300, every_s=1.0)
    moments = [100.0, 105.0, 115.0, 135.0, 175.0, 255.0, 415.0, 735.0, 1055.0]
    assert followed.loads.moments == moments
    assert [100.0 + at for at, is_taken in enumerate(taken) if is_taken] == moments[-1:]
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


def test_the_waits_begin_anew_for_another_version(shared: Shared, follow: Follow) -> None:
    followed = follow(shared)
    followed.loads.failures += [TOO_LONG] * 3
    shared.move("chain")
    followed.poll(2, every_s=5.0)
    shared.move("small")
    assert followed.poll(2, every_s=5.0) == [False, True]
    assert followed.loads.moments == [100.0, 105.0, 110.0, 115.0]


def test_the_waits_begin_anew_once_a_version_was_taken_over(shared: Shared, follow: Follow) -> None:
    """The device had no memory a while ago, and has none again."""
    followed = follow(shared)
    followed.builds.failures += [NO_MEMORY] * 2
    shared.move("small")
    assert followed.poll(4, every_s=5.0) == [False, False, False, True]
    shared.move("chain")
    assert followed.poll(1) == [True]
    shared.move("small")
    followed.builds.failures.append(NO_MEMORY)
    assert followed.poll(2, every_s=5.0) == [False, True]


def test_each_version_is_loaded_and_built_once_good_or_bad(
    shared: Shared, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = follow(shared)
    runnables = Counted(decode.runnable, followed.clock)
    monkeypatch.setattr(decode, "runnable", runnables)
    counts = {}
    for turn, word in enumerate(("too large", "small", "other pair", "small")):
        shared.move(word)
        assert followed.poll(40)[0] == (turn == 1), "a refusal is of its version alone"
        counts[turn] = (len(followed.loads.moments), len(runnables.moments))
    assert counts == {0: (1, 1), 1: (2, 2), 2: (3, 2), 3: (3, 2)}
    newest = shared.entries[-1]
    newest.with_name(f"{len(shared.entries):012d}.json").write_bytes(b"no entry")
    assert not followed.watch.poll()
    assert followed.watch.last_error is not None, "it is asked about all the same"


@pytest.mark.parametrize("word", ["small", "too large"])
def test_an_outage_is_asked_through_and_told_once(
    word: str,
    shared: Shared,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is nobody's bytes, so nothing waits longer than the look that finds it over; and it makes
    no refusal forgotten."""
    watch = shared.watch(loop_of(LARGE))
    shared.move(word)
    if word == "too large":
        watch.poll()
        caplog.clear()
    refusal, failures = watch.last_error, watch.num_failures
    with monkeypatch.context() as patch:
        patch.setattr(watching, "resolve", unreachable)
        assert not any(watch.poll() for _ in range(3))
    assert (watch.last_error, watch.num_failures) == (AWAY, failures + 3)
    assert len(caplog.messages) == 1
    assert watch.poll() == (word == "small")
    assert watch.last_error is refusal


@dataclass
class Given:
    """A source of one version."""

    load: Callable[[], Artifact]

    def newest(self) -> Version:
        return Version("v3", self.load)


class Files:
    """Those of an artifact, many megabytes."""


def test_a_refusal_that_stands_holds_none_of_the_files() -> None:
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

    watch = Watch(Given(load), loop_of(LARGE))
    assert not watch.poll()
    assert watch.last_error is FOREIGN
    gc.collect()
    assert [files() for files in held] == [None]


def test_what_is_taken_over_does_not_hide_what_was_refused_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While the loop builds the rules of one version, a look refuses the next one."""
    folder, loop = write_artifact(tmp_path / "policy", "chain"), loop_of(LARGE)
    watch, real = Watch(FolderSource(folder, EXPECT), loop), loop.reload

    def refuse() -> Artifact:
        raise FOREIGN

    def reload(policy: Policy) -> None:
        real(policy)
        watch.source = Given(refuse)
        watch.look()

    monkeypatch.setattr(loop, "reload", reload)
    assert watch.poll()
    assert watch.last_error is FOREIGN
    assert not watch.poll()
    assert watch.num_failures == 1, "and it is remembered"


FINAL = [
    *map(artifact_error, ("E_SCHEMA", "E_SELFTEST", "W_DOMAIN")),
    UsageError("reload", **FACTS),
    LossyPolicyError("reload", **FACTS),
]
PASSING = [
    artifact_error("E_COST"),  # memory that others took
    artifact_error("E_DIGEST"),  # a copy that is not finished
    artifact_error("E_MISSING"),
    artifact_error("E_SIZE"),
    artifact_error("E_FILETYPE"),  # a hard link beside a copy that is being made
    artifact_error("E_SIG"),  # a key that is believed again
    RegistryError("E_MISSING", "blob", **FACTS),
    StoreError("team", **FACTS),
    SpecctlError("other", **FACTS),
    OSError("full"),
    MemoryError(),
]


@pytest.mark.parametrize("error", FINAL + PASSING, ids=repr)
def test_what_is_of_the_bytes_is_final(error: Exception) -> None:
    refusal, is_final = refusal_of("v1", error, None, 5.0, 100.0), error in FINAL
    assert refusal.not_before_s == (math.inf if is_final else 105.0)
    assert refusal.stands("v1", 104.9)
    assert refusal.stands("v1", 1e9) == is_final
    assert not refusal.stands("v2", 100.0)
