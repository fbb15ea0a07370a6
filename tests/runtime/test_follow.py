"""A loop's policy follows a folder or an alias: what is good takes over, what is bad does not.

`Decoder.follow` takes words, and is as strict as the decoder's own start.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specctl.artifacts import Origin, save_artifact
from specctl.artifacts.compatibility import Expectation
from specctl.artifacts.signing import SigningKey
from specctl.errors import ArtifactError, StoreError, UsageError
from specctl.policy import Chain, Mars, Policy, StaticTree
from specctl.registry import (
    Cache,
    Reader,
    Reference,
    Writer,
    init_registry,
    open_registry,
    promote,
    push,
    read_package,
)
from specctl.registry.trust import Trust, TrustedKey
from specctl.runtime import decode, follow
from specctl.runtime.api import Decoder
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.follow import AliasSource, FolderSource, Follower
from specctl.runtime.load import Pair, pair_domain
from tests.artifacts.examples import EVIDENCE, HETERO, PAIR, sha, write_artifact
from tests.runtime.toy import loop_of

NAME = "toy+head@cpu:toys"
EXPECT = Expectation(PAIR)
LARGE = Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=12))
"""What loops begin with: the memory that it takes is what later policies have."""
GOOD = {
    "small": Policy(shape=StaticTree(depth=2, top_k=2, num_tokens=4)),
    "chain": Policy(shape=Chain(num_draft_tokens=3)),
}
BAD = ("too large", "lossy", "other pair")
ORIGIN = Origin(pair=PAIR, evidence=EVIDENCE)
ELSEWHERE = Origin(pair=PAIR.model_copy(update={"target_digest": sha("e")}), evidence=EVIDENCE)
VERSIONS = {
    **{word: (policy, ORIGIN) for word, policy in GOOD.items()},
    "too large": (Policy(shape=StaticTree(depth=8, top_k=8, num_tokens=60)), ORIGIN),
    "lossy": (Policy(shape=Chain(), acceptance=Mars()), ORIGIN),
    "other pair": (GOOD["small"], ELSEWHERE),
}


def version(folder: Path, policy: Policy, origin: Origin = ORIGIN) -> Path:
    """An artifact's folder."""
    save_artifact(folder, policy, origin, card="# toy\n")
    return folder


@dataclass
class Shared:
    """The registry, who writes to it, and one of its readers.

    Attributes:
        digests: of the versions, by their words.
    """

    place: Path
    writer: Writer
    reader: Reader
    digests: dict[str, str] = field(default_factory=dict)

    def publish(self, work: Path, *words: str) -> None:
        for word in words:
            package = read_package(version(work / word, *VERSIONS[word]))
            push(self.writer, package, NAME)
            self.digests[word] = package.digest

    def move(self, word: str) -> None:
        promote(self.writer, NAME, "prod", self.digests[word])

    def source(self) -> AliasSource:
        return AliasSource(open_registry(self.place), Reference(NAME, "prod"), self.reader, EXPECT)

    def follower(self, loop: DecodeLoop) -> Follower:
        return Follower(self.source(), loop)


def open_shared(work: Path, key: SigningKey | None = None) -> Shared:
    """A new registry without versions; with a key, one whose reader requires its signatures."""
    trust = Trust() if key is None else trusting(key)
    place = work / "registry"
    writer = Writer(init_registry(place), trust, "test", key)
    return Shared(place, writer, Reader(trust, Cache(work / "cache")))


def trusting(key: SigningKey) -> Trust:
    """One that trusts a key for all names, which it must have signed."""
    return Trust(keys=(TrustedKey.of(key.public_key, names=("*",)),))


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    """A registry with all versions, of which no alias names one yet."""
    shared = open_shared(tmp_path)
    shared.publish(tmp_path, *VERSIONS)
    return shared


ROOMY = Policy(shape=StaticTree(depth=11, top_k=10, num_tokens=1000))
AWAY = StoreError("team: expected this, found that", hint="do so")


def taken(follower: Follower) -> bool:
    """Whether a look finds another policy and the loop takes it over."""
    follower.look()
    return follower.poll()


def counted(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, *failures: Exception
) -> list[object]:
    """Calls of a function, the first of which fail."""
    calls, real, left = list[object](), getattr(module, name), list(failures)

    def call(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if left:
            raise left.pop(0)
        return real(*given, **named)

    monkeypatch.setattr(module, name, call)
    return calls


# --------------------------------------------------------------------------- a folder


def test_a_folder_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that is not there may come; a file in its place is a mistake, said once."""
    folder, loop = tmp_path / "policy", loop_of(ROOMY)
    follower = Follower(FolderSource(folder, EXPECT), loop)
    assert not taken(follower), "nothing there for now"
    assert follower.last_error is None
    folder.write_text("no folder")
    assert not any(taken(follower) for _ in range(3))
    [told] = caplog.messages
    assert "E_MISSING" in told
    folder.unlink()
    caplog.clear()
    write_artifact(folder, "hetero")
    assert not follower.poll(), "nothing was looked at"
    assert [taken(follower), taken(follower)] == [True, False]
    assert loop.policy.shape.kind == "hetero"
    (folder / "policy.safetensors").write_bytes(b"damage")
    with caplog.at_level(logging.WARNING, "specctl.policy"):
        assert not any(taken(follower) for _ in range(2))
    [told] = caplog.messages
    assert "E_DIGEST" in told
    assert "the old one stays" in told
    assert loop.policy.shape.kind == "hetero"
    assert follower.last_error is not None
    shutil.rmtree(folder)
    write_artifact(folder, "chain")
    assert taken(follower)
    assert follower.last_error is None


def test_what_the_loop_plays_already_is_not_taken_over_again(tmp_path: Path) -> None:
    """Its graphs and what its rules remember of requests would be lost for nothing."""
    folder, loop = version(tmp_path / "policy", LARGE), loop_of(LARGE)
    follower = Follower(FolderSource(folder, EXPECT), loop)
    rules = loop.rules
    assert not taken(follower)
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    assert not taken(follower), "touched"
    assert loop.rules is rules
    assert follower.digest is not None


def test_an_artifact_with_the_sizes_and_times_of_the_last_one_is_noticed(tmp_path: Path) -> None:
    """`current -> v1` becomes `current -> v2`, both unpacked with fixed times."""
    loop = loop_of(ROOMY)
    for name, edges in (("v1", (0.125, 1.0, 2.0)), ("v2", (0.25, 1.5, 2.5))):
        policy = Policy(shape=HETERO.model_copy(update={"edges": edges}))
        for path in version(tmp_path / name, policy).iterdir():
            os.utime(path, (0, 0))
    current, following = tmp_path / "current", tmp_path / "next"
    current.symlink_to("v1")
    follower = Follower(FolderSource(current, EXPECT), loop)
    assert taken(follower)
    following.symlink_to("v2")
    following.replace(current)
    assert taken(follower)
    assert loop.policy.shape.edges == (0.25, 1.5, 2.5)  # type: ignore[union-attr]


# --------------------------------------------------------------------------- an alias


def test_an_alias_is_followed_and_bad_versions_are_not(
    shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_of(LARGE)
    follower = shared.follower(loop)
    assert not taken(follower), "there is no such alias yet"
    assert "E_UNKNOWN_ALIAS" in str(follower.last_error)
    for bad in BAD:
        shared.move("small")
        taken(follower)
        assert follower.last_error is None
        assert (loop.policy, follower.digest) == (GOOD["small"], shared.digests["small"])
        shared.move(bad)
        caplog.clear()
        failures = follower.num_failures
        assert not any(taken(follower) for _ in range(3))
        assert loop.policy == GOOD["small"]
        assert follower.last_error is not None
        assert follower.num_failures > failures
        [told] = caplog.messages
        assert "the old one stays" in told


def test_a_signature_that_is_gone_is_missed_though_the_artifact_is_known(tmp_path: Path) -> None:
    """The digest was loaded, and its bytes are what they were; who signed it is asked each time."""
    shared = open_shared(tmp_path, SigningKey.generate())
    shared.publish(tmp_path, "small", "chain")
    shared.move("small")
    follower = shared.follower(loop_of(LARGE))
    assert taken(follower)
    for path in (shared.place / "signatures").rglob("*"):
        if path.is_file():
            path.unlink()
    assert not taken(follower)
    assert "E_SIG" in str(follower.last_error)
    shared.publish(tmp_path / "again", "small", "chain")
    taken(follower)
    assert follower.last_error is None, "signed again: it was no verdict on the bytes"


def test_what_is_in_the_slot_is_not_taken_over_once_a_look_has_refused_it(tmp_path: Path) -> None:
    """Revoked between two looks of the thread, before the next round."""
    shared = open_shared(tmp_path, SigningKey.generate())
    shared.publish(tmp_path, "small")
    shared.move("small")
    loop = loop_of(LARGE)
    follower = shared.follower(loop)
    follower.look()
    object.__setattr__(follower.source.reader, "trust", trusting(SigningKey.generate()))  # type: ignore[union-attr]
    assert not taken(follower)
    assert loop.policy == LARGE
    assert "E_SIG" in str(follower.last_error)


# --------------------------------------------------------------------------- what fails


@pytest.mark.parametrize("step", ["resolve", "pull_resolved"])
def test_a_look_that_fails_is_made_again(
    step: str, shared: Shared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage is told once, other failures each."""
    failures = [AWAY] * 3 if step == "resolve" else [OSError("full"), MemoryError(), AWAY]
    calls = counted(monkeypatch, follow, step, *failures)
    follower = shared.follower(loop_of(LARGE))
    shared.move("small")
    found = []
    for _ in range(5):
        found.append(taken(follower))
        if len(found) == 3:
            assert follower.last_error is AWAY
    assert found == [False, False, False, True, False]
    assert (follower.num_failures, follower.last_error) == (3, None)
    assert len(caplog.messages) == len(set(failures))
    assert len(calls) == (5 if step == "resolve" else 4), "what was loaded is not loaded again"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyError(1)])
def test_what_the_loop_refuses_is_offered_once(
    error: Exception,
    shared: Shared,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the loop is whole meanwhile: what fails is in the midst of `DecodeLoop.reload`."""
    loop = loop_of(LARGE)
    follower, rules = shared.follower(loop), loop.rules
    builds = counted(monkeypatch, decode, "rehearse", error)
    shared.move("small")
    assert not any(taken(follower) for _ in range(4))
    assert (loop.policy, loop.rules, len(builds)) == (LARGE, rules, 1)
    assert (follower.last_error, follower.num_failures) == (error, 1)
    assert len(caplog.messages) == 1
    shared.move("chain")
    assert taken(follower)
    shared.move("small")
    assert taken(follower), "another version came between"
    assert (loop.policy, follower.last_error) == (GOOD["small"], None)


# --------------------------------------------------------------------------- the thread


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it should have happened by now"
        time.sleep(0.01)


def following(source: Any, loop: Any) -> Follower:
    return Follower(source, loop, interval_s=0.01)


def test_a_block_can_be_entered_again(tmp_path: Path) -> None:
    folder, loop = tmp_path / "policy", loop_of(LARGE)
    follower = following(FolderSource(folder, EXPECT), loop)
    with follower:
        pass
    version(folder, GOOD["small"])
    with follower:
        wait_until(follower.poll)
        with pytest.raises(UsageError, match="already running"), follower:
            pass
    assert loop.policy == GOOD["small"]
    assert not [t for t in threading.enumerate() if t.name == "specctl-follow"]


def test_the_end_of_a_block_does_not_wait_for_ever(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "JOIN_S", 0.05)
    hangs = threading.Event()
    source = SimpleNamespace(newest=lambda: hangs.wait() and None)
    with following(source, loop_of(LARGE)):
        [thread] = [t for t in threading.enumerate() if t.name == "specctl-follow"]
    assert thread.is_alive()
    hangs.set()
    thread.join(30)


NEVER_LEFT = """
import sys, time, torch
from specctl.runtime.follow import Follower
class Busy:
    def newest(self):
        for _ in range(20):
            torch.rand(300, 300) @ torch.rand(300, 300)
Follower(Busy(), None, interval_s=0).__enter__()
time.sleep(0.3)
sys.exit(6)
"""


def test_a_process_may_end_within_the_block() -> None:
    """Its thread would be stopped in the midst of torch, which aborts the process."""
    done = subprocess.run([sys.executable, "-c", NEVER_LEFT], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (6, b"")


# --------------------------------------------------------------------------- by the decoder


HEAD = "embedded+eagle3@cpu:demo"
PLAYED = Policy(shape=StaticTree(depth=4, top_k=4, num_tokens=16))
FITTED = Policy(shape=StaticTree(depth=3, top_k=4, num_tokens=12))


def fitted(folder: Path, pair: Pair, hardware: str | None = None) -> Path:
    """An artifact that was fitted here, or on other hardware."""
    domain = pair_domain(pair, batch_size=2)
    if hardware is not None:
        domain = domain.model_copy(update={"hardware": (hardware,)})
    return version(folder, FITTED, Origin(pair=pair.fingerprint, evidence=EVIDENCE, domain=domain))


@pytest.mark.parametrize("allow_mismatch", [False, True])
def test_what_was_fitted_elsewhere_is_treated_as_at_the_start(
    allow_mismatch: bool,  # noqa: FBT001
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By the same rule, whether it is there first or comes later."""
    decoder = Decoder.from_pretrained(
        "embedded", "embedded", device="cpu", batch_size=2, allow_mismatch=allow_mismatch
    )
    loop = decoder.loop_for(64)
    played = loop.policy
    follower = decoder.follow(tmp_path / "policy", loop)
    assert "policy does not exist yet" in caplog.text
    assert not taken(follower), "nothing there for now"
    folder = fitted(tmp_path / "policy", decoder.pair, "NVIDIA H200")
    assert taken(follower) == allow_mismatch
    assert loop.policy == (FITTED if allow_mismatch else played)
    assert "W_DOMAIN" in caplog.text
    if not allow_mismatch:
        assert getattr(follower.last_error, "code", None) == "W_DOMAIN"
        with pytest.raises(ArtifactError, match="W_DOMAIN"):
            Decoder.from_pretrained(
                "embedded", "embedded", policy=str(folder), device="cpu", batch_size=2
            )


def test_an_alias_by_the_words_of_the_command_line(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "team"
    writer = Writer(init_registry(place), Trust(), "test")
    package = read_package(fitted(tmp_path / "policy", pair))
    push(writer, package, HEAD)
    promote(writer, HEAD, "prod", package.digest)
    decoder = Decoder(pair, PLAYED, batch_size=2)
    loop = decoder.loop_for(64)
    follower = decoder.follow(f"{place}/{HEAD}@prod", loop)
    assert taken(follower)
    assert (loop.policy, follower.digest) == (FITTED, package.digest)
    monkeypatch.setenv("SPECCTL_REGISTRY", str(place))
    again = decoder.follow(f"{HEAD}@prod", loop)
    assert not taken(again), "it plays already"
    assert again.digest == package.digest
    with pytest.raises(UsageError, match="is not NAME@ALIAS"):
        decoder.follow(f"{place}/{HEAD}", loop)


def test_a_folder_among_the_histories_of_a_registry_is_no_policy(
    pair: Pair, tmp_path: Path
) -> None:
    """Whoever may write there could otherwise pass by signatures, floors and digests."""
    init_registry(tmp_path / "team")
    folder = fitted(tmp_path / "team" / "policy", pair)
    decoder = Decoder(pair, PLAYED, batch_size=2)
    loop = decoder.loop_for(64)
    follower = decoder.follow(folder, loop)
    assert not taken(follower)
    assert "skips a registry's checks" in str(follower.last_error)
    assert loop.policy == PLAYED
