"""A second Ctrl-C while the last commit is written: what was finished is kept all the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from specctl.collect import finishing as module
from specctl.collect.finishing import finishing
from specctl.collect.logs import read_commits
from specctl.collect.recorder import TraceRecorder
from specctl.collect.store import TraceWriter
from specctl.errors import OutputError
from tests.collect.rounds import random_record
from tests.collect.sets import writer

__all__ = ["writer"]  # a fixture


@pytest.fixture(autouse=True)
def terminating() -> Iterator[None]:
    """SIGTERM as the command line has it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


def soon(number: int) -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_impatient_interrupt_loses_nothing(
    writer: TraceWriter, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = writer.commit

    def slow(*given: object) -> object:
        time.sleep(0.5)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "commit", slow)

    def decode() -> None:
        with TraceRecorder(writer) as recorder:
            recorder.on_round(random_record(["a"]))
            recorder.finish_prompt("a")
            soon(number)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode()
    assert read_commits(writer.root).prompt_ids == ("a",)
    assert signal.getsignal(number) is signal.default_int_handler


def test_an_interrupt_meanwhile_is_told_afterwards() -> None:
    """Also where none had come before: the command must still end as an interrupted one."""
    done = []

    def finish() -> None:
        with finishing():
            soon(signal.SIGINT)
            time.sleep(0.3)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        finish()
    assert done == [True]


def test_what_is_stuck_can_be_ended_and_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)

    def finish() -> None:
        with finishing():
            soon(signal.SIGINT)
            time.sleep(30)

    begun = time.monotonic()
    with pytest.raises(OutputError, match="decode again what it held, with --resume"):
        finish()
    assert time.monotonic() - begun < 20
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_that_are_ignored_stay_ignored_and_other_threads_change_none() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with finishing():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    found = []

    def elsewhere() -> None:
        with finishing():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]
