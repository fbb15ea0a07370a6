"""A loop's policy follows a folder or an alias: what is good takes over, what is bad does not."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path

import pytest

from specctl.errors import UsageError
from specctl.policy import Policy, RootOnly, StaticTree, policy_digest
from specctl.registry import parse_reference
from specctl.runtime.watching import AliasSource, FolderSource, Stamp, Watch, stamp_of
from tests.artifacts.examples import HETERO, write_artifact
from tests.runtime.registries import BAD, EXPECT, GOOD, LARGE, NAME, Shared, version
from tests.runtime.toy import toy_requests
from tests.runtime.toy_loops import Kept, loop_of, texts_of

ROOMY = Policy(shape=StaticTree(depth=11, top_k=10, num_tokens=1000))


def test_a_folder_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, loop = tmp_path / "policy", loop_of(ROOMY)
    watch = Watch(FolderSource(folder, EXPECT), loop)
    assert not watch.poll(), "nothing there for now"
    write_artifact(folder, "hetero")
    assert watch.poll()
    assert loop.policy.shape.kind == "hetero"
    assert not watch.poll(), "nothing changed"
    (folder / "policy.safetensors").write_bytes(b"damage")
    with caplog.at_level(logging.WARNING, "specctl.policy"):
        assert not watch.poll()
        assert not watch.poll(), "told once"
    assert len(caplog.messages) == 1
    assert "E_DIGEST" in caplog.messages[0]
    assert "the old one stays" in caplog.messages[0]
    assert loop.policy.shape.kind == "hetero"
    assert watch.last_error is not None
    shutil.rmtree(folder)
    write_artifact(folder, "chain")
    assert watch.poll()
    assert watch.last_error is None


def test_what_was_replaced_while_the_models_were_loaded_takes_over(tmp_path: Path) -> None:
    """A watch made late knows what the loop plays, and not what the folder held back then."""
    loop = loop_of(LARGE)
    watch = Watch(FolderSource(version(tmp_path / "v", GOOD["small"]), EXPECT), loop)
    assert watch.poll()
    assert loop.policy == GOOD["small"]


def test_what_the_loop_plays_already_is_not_taken_over_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    folder, path = tmp_path, tmp_path / "file"

    def stamp() -> Stamp:
        os.utime(path, (0, 0))
        return stamp_of(folder)

    path.write_bytes(b"one")
    first = stamp()
    assert stamp_of(folder) == first
    time.sleep(0.02)  # a file system's clock ticks every 10 ms at most
    path.write_bytes(b"two")
    second = stamp()
    (tmp_path.parent / "aside").write_bytes(b"two")
    os.utime(tmp_path.parent / "aside", (0, 0))
    (tmp_path.parent / "aside").replace(path)
    assert len({first, second, stamp_of(folder)}) == 3
    assert stamp_of(tmp_path / "none") == ()


# ------------------------------------------------------------------ an alias


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
        for _ in range(3):
            assert not watch.poll()
        assert loop.policy == GOOD["small"]
        assert watch.last_error is not None
        assert watch.num_failures == failures + 1, "a refusal that stands is one"
        assert len(caplog.messages) == 1, "told once"
        assert "the old one stays" in caplog.messages[0]


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
