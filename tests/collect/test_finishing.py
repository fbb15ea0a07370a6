"""Ctrl-C while a commit is written, and at any other moment: what was finished is kept."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from specctl.collect import trace_writer as module
from specctl.collect.dense import collection
from specctl.collect.dense.collection import AnsweredPrompt, DenseSummary
from specctl.collect.recorder import ItemQueue, Recorder, RecorderConfig
from specctl.collect.rounds import TraceRecorder
from specctl.collect.trace_writer import TraceWriter, finishing
from specctl.errors import OutputError, PromptError
from specctl.logs.trace_set import read_listing
from tests.collect.rounds import header, random_record
from tests.collect.sets import NUM_ROUNDS, tables_of, writer

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
    assert read_listing(writer.place.name).prompt_ids == ("a",)
    assert signal.getsignal(number) is signal.default_int_handler


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


# --------------------------------------------------------------------------- dense collections


def draft(drafting: None, text: AnsweredPrompt, summary: DenseSummary) -> list[dict[str, Any]]:
    """Rows at no cost; prompt `x` cannot be drafted."""
    if text.prompt_id == "x":
        raise PromptError("x: expected e, found f", hint="g")
    return [tables_of([text.prompt_id])]


def collect(
    root: Path, monkeypatch: pytest.MonkeyPatch, prompts: str, flush_s: float = 0.0
) -> None:
    monkeypatch.setattr(collection, "_draft", draft)
    summary = DenseSummary(str(root), len(prompts), 0)
    texts = (AnsweredPrompt(prompt, (), is_cut=False, num_shortened=0) for prompt in prompts)
    config = RecorderConfig(flush_s=flush_s, wake_s=0.001)
    with TraceWriter.open(root, header()) as opened:
        collection._record(None, texts, opened, summary, config)  # type: ignore[arg-type]


def committed(root: Path) -> list[str]:
    """Prompts that are committed, all of them with their rows."""
    listing = read_listing(root)
    for segment in listing.segments:
        assert segment.num_rounds == NUM_ROUNDS * len(segment.prompt_ids)
    return sorted(listing.prompt_ids)


class Interrupt:
    """Ctrl-C at the n-th line that the functions of a dense collection come to."""

    CODES = frozenset(
        function.__code__
        for function in (collection._record, Recorder.put, Recorder.close, ItemQueue.put)
    )

    def __init__(self, at: int) -> None:
        self.left, self.has_come = at, False

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code not in self.CODES:
            return None
        if event == "line" and not self.has_come:
            self.left -= 1
            if self.left < 0:
                self.has_come = True
                signal.raise_signal(signal.SIGINT)
        return self


def test_an_interrupt_at_any_line_parts_no_prompt_from_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, at = sys.gettrace(), 0
    while True:
        root, interrupt = tmp_path / str(at), Interrupt(at)
        sys.settrace(interrupt)
        try:
            collect(root, monkeypatch, "ab")
        except KeyboardInterrupt:
            assert interrupt.has_come
        finally:
            sys.settrace(before)
        kept = committed(root)
        if not interrupt.has_come:
            break
        at += 1
    assert at > 20
    assert kept == ["a", "b"]


def test_an_error_of_a_prompt_keeps_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PromptError):
        collect(tmp_path / "set", monkeypatch, "abx", flush_s=1e9)
    assert committed(tmp_path / "set") == ["a", "b"]
