"""A loop's next policy from a folder or from an alias: what is bad stays outside."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from specctl.artifacts import Origin, save_artifact
from specctl.artifacts.registry import (
    Author,
    Cache,
    Floors,
    Reader,
    Reference,
    Writer,
    init_registry,
    open_registry,
    promote,
    push,
    read_package,
)
from specctl.artifacts.signing import Trust
from specctl.policy import Policy, policy_digest
from specctl.policy.records import Chain, Mars, RootOnly, StaticTree
from specctl.runtime.watching import AliasWatch, PolicyWatch
from tests.artifacts.examples import EVIDENCE, PAIR, sha, write_artifact
from tests.runtime.test_decode import loop_of
from tests.runtime.test_guard import Kept
from tests.runtime.toy import toy_requests


def touched(folder: Path, moment: int) -> None:
    """Another time, however coarse the file system's clock."""
    for path in folder.iterdir():
        os.utime(path, (moment, moment))


def test_a_folder_is_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "policy"
    write_artifact(folder, "c2t_ffn")
    loop = loop_of(Policy(shape=StaticTree(depth=11, top_k=10, num_tokens=1000)))
    watch = PolicyWatch(folder, PAIR)
    assert not watch.poll(loop), "nothing changed"
    shutil.rmtree(folder)
    assert not watch.poll(loop), "nothing there for now"
    write_artifact(folder, "hetero")
    touched(folder, 1)
    assert watch.poll(loop)
    assert loop.policy.shape.kind == "hetero"
    (folder / "policy.safetensors").write_bytes(b"damage")
    with caplog.at_level(logging.WARNING, "specctl.policy"):
        assert not watch.poll(loop)
        assert not watch.poll(loop), "told once"
    assert len(caplog.messages) == 1
    assert "E_DIGEST" in caplog.messages[0]
    assert "the old one stays" in caplog.messages[0]
    assert loop.policy.shape.kind == "hetero"
    assert watch.last_error is not None


# ------------------------------------------------------------------ an alias

NAME = "toy+head@cpu:toys"
LARGE = Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=12))
GOOD = {
    "large": LARGE,
    "small": Policy(shape=StaticTree(depth=2, top_k=2, num_tokens=4)),
    "chain": Policy(shape=Chain(num_draft_tokens=3)),
}
OTHER_PAIR = PAIR.model_copy(update={"target_digest": sha("e")})


@dataclass
class Shared:
    """A registry with good and bad versions of one name."""

    place: Path
    writer: Writer
    digests: dict[str, str]
    reader: Reader

    def move(self, version: str) -> None:
        promote(self.writer, NAME, "prod", self.digests[version])

    def watch(self) -> AliasWatch:
        return AliasWatch(open_registry(self.place), Reference(NAME, "prod"), self.reader, PAIR)


def version(folder: Path, policy: Policy, origin: Origin) -> Path:
    save_artifact(folder, policy, origin, card="# toy\n")
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    place = tmp_path / "registry"
    writer = Writer(init_registry(place), Author("test"), Trust.load())
    origin = Origin(pair=PAIR, evidence=EVIDENCE)
    too_large = Policy(shape=StaticTree(depth=8, top_k=8, num_tokens=60))
    made = {
        **{word: (policy, origin) for word, policy in GOOD.items()},
        "too large": (too_large, origin),
        "lossy": (Policy(shape=Chain(), acceptance=Mars()), origin),
        "other pair": (GOOD["small"], Origin(pair=OTHER_PAIR, evidence=EVIDENCE)),
    }
    digests = {}
    for word, (policy, whence) in made.items():
        package = read_package(version(tmp_path / word, policy, whence))
        push(writer, package, NAME)
        digests[word] = package.digest
    reader = Reader(Trust.load(), Floors(tmp_path / "floors"), Cache(tmp_path / "cache"))
    return Shared(place, writer, digests, reader)


BAD = ("too large", "lossy", "other pair")


def test_an_alias_is_followed_and_bad_versions_are_not(
    shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    loop, watch = loop_of(LARGE), shared.watch()
    assert not watch.poll(loop), "there is no such alias yet"
    assert "E_UNKNOWN_ALIAS" in str(watch.last_error)
    for bad in BAD:
        shared.move("small")
        watch.poll(loop)
        assert watch.last_error is None
        assert (loop.policy, watch.digest) == (GOOD["small"], shared.digests["small"])
        shared.move(bad)
        caplog.clear()
        for _ in range(3):
            assert not watch.poll(loop)
        assert loop.policy == GOOD["small"]
        assert watch.last_error is not None
        assert len(caplog.messages) == 1, "told once"
        assert "the old one stays" in caplog.messages[0]


def test_a_registry_that_lost_its_blobs_changes_nothing(shared: Shared) -> None:
    loop, watch = loop_of(LARGE), shared.watch()
    shared.move("small")
    assert watch.poll(loop)
    shared.move("chain")
    shutil.rmtree(shared.place / "blobs")
    assert not watch.poll(loop)
    assert "E_MISSING" in str(watch.last_error)
    assert loop.policy == GOOD["small"]


def test_moves_under_load_fail_no_request_and_mix_no_round(shared: Shared) -> None:
    """Every other move is bad; texts are plain decoding's, each round is one good policy's."""
    requests = toy_requests(12)
    plain = {
        c.request.request_id: c.token_ids
        for c in loop_of(Policy(shape=RootOnly()), batch_size=3).run(requests)
    }
    kept = Kept()
    loop, watch, done = loop_of(LARGE, batch_size=3, observer=kept), shared.watch(), {}
    for request in requests:
        loop.submit(request)
    words = [word for pair in zip([*GOOD, *GOOD], [*BAD, *BAD], strict=True) for word in pair]
    taken: list[str] = []
    while loop.busy:
        shared.move(words[len(taken) % len(words)])
        watch.poll(loop)
        taken.append(policy_digest(loop.policy))
        done |= {c.request.request_id: c.token_ids for c in loop.step()}
    assert done == plain
    assert [record.policy_digest for record in kept.records] == taken
    assert set(taken) == {policy_digest(policy) for policy in GOOD.values()}


def wait_until(condition: Callable[[], bool]) -> None:
    import time

    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_thread_looks_by_itself_and_outlives_what_it_finds(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, watch = loop_of(LARGE), shared.watch()
    watch.interval_s = 0.01
    looks = iter([RuntimeError("a bug")])
    real = watch.look

    def look() -> None:
        for error in looks:
            raise error
        real()

    monkeypatch.setattr(watch, "look", look)
    shared.move("small")
    with watch:
        wait_until(lambda: watch.poll(loop))
    assert loop.policy == GOOD["small"]
    assert "a bug" in caplog.text
