"""The recorder: whole prompts, in the background, errors and interrupts included."""

from __future__ import annotations

import pytest

from specctl.collect.recorder import RecorderConfig, TraceRecorder
from specctl.collect.trace_writer import TraceWriter
from specctl.errors import OutputError
from specctl.logs.trace_set import TraceSet, read_listing
from tests.collect.rounds import random_record
from tests.collect.sets import count_calls, writer

__all__ = ["writer"]  # a fixture

EAGER = RecorderConfig(flush_s=0.0, wake_s=0.001, wake_rounds=1)
"""Commits as soon as a prompt is finished."""


def test_recorder_commits_finished_prompts_and_discards_the_others(writer: TraceWriter) -> None:
    commits = []
    with TraceRecorder(writer, on_commit=commits.append) as recorder:
        for step in range(3):
            recorder.on_round(random_record(["a", "b", "c"], step, seed=step))
        recorder.finish_prompt("c")
        recorder.finish_prompt("a")
    assert recorder.discarded == ("b",)
    assert [commit.prompt_ids for commit in commits] == [("a", "c")]  # one segment for both
    rounds = TraceSet.open(writer.place.name).scan("rounds").collect()
    assert sorted(rounds["request_id"].cast(str).to_list()) == ["a/0"] * 3 + ["c/0"] * 3
    assert set(rounds["batch_size"]) == {3}


def test_recorder_commits_while_decoding_goes_on(writer: TraceWriter) -> None:
    acked: list[str] = []
    with TraceRecorder(writer, EAGER, lambda commit: acked.extend(commit.prompt_ids)) as recorder:
        recorder.on_round(random_record(["a"]))
        recorder.finish_prompt("a")
        for step in range(2000):
            recorder.on_round(random_record(["b"], step, depth=1, top_k=1, num_tokens=2))
            if acked:
                break
        assert acked == ["a"]


def test_interrupt_keeps_what_is_finished(writer: TraceWriter) -> None:
    def decode() -> None:
        with TraceRecorder(writer) as recorder:
            recorder.on_round(random_record(["a"]))
            recorder.finish_prompt("a")
            recorder.on_round(random_record(["b"]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode()
    assert TraceSet.open(writer.place.name).prompt_ids == ("a",)


def test_error_of_the_thread_surfaces_in_the_decoding_thread(
    writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_calls(monkeypatch, "fsync", 0)
    recorder = TraceRecorder(writer, EAGER)
    recorder.on_round(random_record(["a"]))
    recorder.finish_prompt("a")
    recorder._thread.join(10)
    with pytest.raises(OutputError, match="Input/output error"):
        recorder.on_round(random_record(["b"]))
    with pytest.raises(OutputError, match="Input/output error"):
        recorder.close()
    assert read_listing(writer.place.name).segments == ()


def test_closed_recorder_takes_no_more(writer: TraceWriter) -> None:
    recorder = TraceRecorder(writer)
    recorder.close()
    with pytest.raises(OutputError, match="closed"):
        recorder.finish_prompt("a")
