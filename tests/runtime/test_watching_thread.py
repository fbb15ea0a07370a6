"""The thread of a watch: it looks by itself, ends with its block, and can be begun again."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from specctl.errors import UsageError
from specctl.runtime import watching
from specctl.runtime.watching import FolderSource, Source, Version, Watch
from tests.runtime.registries import EXPECT, GOOD, LARGE, Shared, version
from tests.runtime.toy_loops import loop_of


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it should have happened by now"
        time.sleep(0.01)


@dataclass
class Failing:
    """A source that fails first."""

    source: Source
    failures: list[BaseException]

    def newest(self) -> Version | None:
        if self.failures:
            raise self.failures.pop()
        return self.source.newest()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("failure", [RuntimeError("a bug"), SystemExit()], ids=repr)
def test_what_a_look_finds_freezes_no_policy(
    failure: BaseException, shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread outlives a bug; where one ended in silence, `poll` looks by itself."""
    loop = loop_of(LARGE)
    shared.move("small")
    with Watch(Failing(shared.source(), [failure]), loop, interval_s=0.01) as watch:
        wait_until(watch.poll)
    assert loop.policy == GOOD["small"]
    assert str(failure) in caplog.text
    assert watch.last_error is None


def test_poll_waits_for_no_look(shared: Shared) -> None:
    """Within a block it takes over what is ready, and asks nobody."""
    hangs, begun = threading.Event(), threading.Event()

    class Slow:
        def newest(self) -> Version | None:
            begun.set()
            hangs.wait()
            return shared.source().newest()

    loop = loop_of(LARGE)
    shared.move("small")
    with Watch(Slow(), loop, interval_s=0.01) as watch:
        assert begun.wait(30)
        assert not watch.poll()
        hangs.set()
        wait_until(watch.poll)


def test_a_block_can_be_entered_again_and_polls_behind_it_look(tmp_path: Path) -> None:
    folder, loop = tmp_path / "policy", loop_of(LARGE)
    watch = Watch(FolderSource(folder, EXPECT), loop, interval_s=0.01)
    with watch:
        pass
    version(folder, GOOD["small"])
    with watch:
        wait_until(watch.poll)
        with pytest.raises(UsageError, match="one `with` block at a time"), watch:
            pass
    version(folder, GOOD["chain"])
    assert watch.poll(), "by itself"
    assert loop.policy == GOOD["chain"]
    assert not [t for t in threading.enumerate() if t.name == "specctl-watch"]


def test_the_end_of_a_watch_does_not_wait_for_ever(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what the look that was left behind finds in the end is not taken for news."""
    monkeypatch.setattr(watching, "JOIN_LIMIT_S", 0.05)
    hangs, begun = threading.Event(), threading.Event()
    loop, source = loop_of(LARGE), shared.source()

    class Hanging:
        def newest(self) -> Version | None:
            found = source.newest()
            begun.set()
            hangs.wait()
            return found

    shared.move("chain")
    with Watch(Hanging(), loop) as watch:
        assert begun.wait(30)
        [thread] = [t for t in threading.enumerate() if t.name == "specctl-watch"]
    assert "did not end" in caplog.text
    watch.source = source
    shared.move("small")
    watch.look()
    hangs.set()
    thread.join(30)
    with watch:
        wait_until(watch.poll)
    assert loop.policy == GOOD["small"]


NEVER_LEFT = """
import sys, time, torch
from specctl.runtime.watching import Watch
class Busy:
    def newest(self):
        for _ in range(20):
            torch.rand(300, 300) @ torch.rand(300, 300)
Watch(Busy(), None, interval_s=0).__enter__()
time.sleep(0.3)
sys.exit(6)
"""


def test_a_process_may_end_within_the_block() -> None:
    """Its thread would be stopped in the midst of torch, which aborts the process."""
    done = subprocess.run([sys.executable, "-c", NEVER_LEFT], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (6, b"")
