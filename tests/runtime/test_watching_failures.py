"""A loop's next policy where looks and reloads fail: requests go on, and nothing is missed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts import Artifact
from specctl.errors import ArtifactError
from specctl.policy import Policy
from specctl.runtime import watching
from specctl.runtime.watching import Found, PolicyWatch, Watch
from tests.artifacts.examples import PAIR, write_artifact
from tests.runtime.test_decode import loop_of
from tests.runtime.test_watching import GOOD, LARGE, Shared, shared

__all__ = ["shared"]  # a fixture


class Scripted(Watch):
    """Finds what it is told to, in turn."""

    def __init__(self, *script: Found | Exception) -> None:
        super().__init__("script")
        self.script = list(script)

    def find(self) -> Found | None:
        found = self.script.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def looked_at_by_another(self) -> Scripted:
        """As in a `with` block, whose thread does not run."""
        self._thread = threading.Thread()
        return self


REVOKED = ArtifactError("E_SIG", "version", expected="a believed key", found="a revoked one")


def test_what_a_later_look_refused_is_not_taken_over() -> None:
    loop = loop_of(LARGE)
    watch = Scripted(Found("v2", GOOD["small"]), REVOKED).looked_at_by_another()
    watch.look()
    watch.look()
    assert not watch.poll(loop)
    assert (loop.policy, watch.last_error, watch.num_failures) == (LARGE, REVOKED, 1)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), MemoryError(), KeyError(1)])
def test_no_error_of_a_reload_or_a_look_reaches_the_loop(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, found = loop_of(LARGE), Found("v2", GOOD["small"])
    watch = Scripted(found, found, error, found)

    def fail(_: Policy) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(loop, "reload", fail)
        assert not watch.poll(loop)
        assert not watch.poll(loop), "and it is tried again"
    assert not watch.poll(loop)
    assert (loop.policy, watch.last_error, watch.num_failures) == (LARGE, error, 3)
    assert len(caplog.messages) == 1, "told once"
    assert watch.poll(loop)
    assert (loop.policy, watch.last_error, watch.digest) == (GOOD["small"], None, "v2")


def test_a_failure_that_may_pass_is_tried_again_and_a_verdict_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, failures = write_artifact(tmp_path / "policy", "c2t_ffn"), list[Exception]()
    watch, loads = PolicyWatch(folder, PAIR, interval_s=0.0), list[Path]()
    real = watching.load_artifact

    def load(place: Path, **options: Any) -> Artifact:
        loads.append(place)
        if failures:
            raise failures.pop(0)
        return real(place, **options)

    monkeypatch.setattr(watching, "load_artifact", load)
    write_artifact(folder, "chain")
    failures += [ArtifactError("E_COST", "child", expected="an answer", found="none"), OSError()]
    loop = loop_of(LARGE)
    assert [watch.poll(loop) for _ in range(4)] == [False, False, True, False]
    assert len(loads) == 3
    write_artifact(folder, "hetero")
    failures += [REVOKED]
    assert [watch.poll(loop) for _ in range(4)] == [False] * 4
    assert len(loads) == 4, "the bytes are what they are"


def test_a_failure_that_may_pass_is_not_tried_again_at_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact whose first load burns all of its time must not cost that at each round."""
    folder = write_artifact(tmp_path / "policy", "chain")
    watch, now, loads = PolicyWatch(folder, PAIR, interval_s=5.0), [100.0], list[float]()

    def load(place: Path, **_: Any) -> Artifact:
        loads.append(now[0])
        raise ArtifactError("E_COST", str(place), expected="an answer", found="none")

    monkeypatch.setattr(watching, "load_artifact", load)
    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
    write_artifact(folder, "eagle2")
    loop = loop_of(LARGE)
    for _ in range(40):
        watch.poll(loop)
        now[0] += 1.0
    assert loads == [100.0, 105.0, 115.0, 135.0]


def test_an_alias_that_did_not_move_is_resolved_and_not_loaded_again(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, watch, loads = loop_of(LARGE), shared.watch(), list[str]()
    real = watching.pull_resolved

    def count(resolved: Any, *arguments: Any, **options: Any) -> Any:
        loads.append(resolved.digest)
        return real(resolved, *arguments, **options)

    monkeypatch.setattr(watching, "pull_resolved", count)
    for version in ("small", "other pair", "small"):
        shared.move(version)
        for _ in range(3):
            watch.poll(loop)
    found = [shared.digests[version] for version in ("small", "other pair")]
    assert loads == found, "each digest once, good or bad"
    [log] = (shared.place / "log").iterdir()
    (log / f"{len(list(log.iterdir())):012d}.json").write_bytes(b"no entry")
    assert not watch.poll(loop)
    assert watch.last_error is not None, "it is asked about all the same"


def test_the_end_of_a_watch_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watching, "JOIN_LIMIT_S", 0.05)
    hangs, begun = threading.Event(), threading.Event()

    class Hanging(Scripted):
        def find(self) -> Found | None:
            begun.set()
            hangs.wait()
            return None

    with Hanging():
        assert begun.wait(30)
    assert "did not end" in caplog.text
    hangs.set()
