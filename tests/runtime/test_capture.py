"""Bookkeeping of graphs: what is captured when, what stays eager and why."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specctl.errors import UsageError
from specctl.runtime.capture import (
    GraphCache,
    GraphSettings,
    Recording,
)
from tests.runtime.captured import TapeCapture


class Work:
    """Counts on the device, and how often Python came by."""

    def __init__(self) -> None:
        self.count, self.num_calls = torch.zeros(1), 0

    def __call__(self) -> torch.Tensor:
        self.num_calls += 1
        return self.count.add_(1)


def test_first_use_warms_up_second_is_captured_others_are_replayed() -> None:
    cache, work = GraphCache(TapeCapture(num_bytes=7), limit_bytes=100), Work()
    for uses in range(1, 6):
        assert cache.run("a", work) is work.count
        assert work.count.item() == uses  # capturing itself does nothing
    assert work.num_calls == 2
    counters = cache.counters
    assert (counters.eager_parts, counters.captures, counters.replays) == (1, 1, 4)
    assert counters.graph_bytes == 7


def test_a_graph_beyond_the_limit_goes_and_the_others_are_made_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pool gives memory back only with all of its graphs, so all are dropped once."""
    tape = TapeCapture(num_bytes=30)
    cache, one, other = GraphCache(tape, limit_bytes=50), Work(), Work()
    with caplog.at_level(logging.WARNING, "specctl.graphs"):
        for _ in range(5):
            cache.run("one", one)
            cache.run("other", other)
    assert (one.count.item(), other.count.item()) == (5, 5)
    counters = cache.counters
    assert (counters.captures, counters.failed_captures, tape.num_forgotten) == (3, 1, 1)
    assert (cache.keys, counters.graph_bytes) == (("one",), 30)
    assert [r.getMessage() for r in caplog.records] == [
        "no graph for other, which runs eagerly: with it graphs would hold 60 of 50 bytes"
    ]


def test_memory_that_ran_out_beside_graphs_halves_their_limit() -> None:
    """Else they would take it again, round after round. Refused keys are tried once more."""
    tape = TapeCapture(num_bytes=40)
    cache, work = GraphCache(tape, limit_bytes=100), Work()
    for key in ("a", "a", "b", "b", "c", "c"):  # c passes the limit, so a and b are dropped
        cache.run(key, work)
    cache.run("a", work)
    cache.run("b", work)
    assert cache.keys == ("a", "b")
    cache.clear()
    assert (cache.keys, cache.limit_bytes) == ((), 40)
    cache.run("c", work)
    cache.run("a", work)
    assert cache.keys == ("c",)
    assert work.count.item() == 10


def test_a_failed_capture_frees_its_memory_before_the_work_is_done_again() -> None:
    """The error's traceback would keep what the capture had taken."""
    alive = list[bool]()

    class Failing(TapeCapture):
        def record(self, function: Callable[[], Any]) -> Recording:
            taken = torch.empty(1)
            self.taken = weakref.ref(taken)
            raise torch.OutOfMemoryError("no room")

    failing = Failing()
    cache = GraphCache(failing, limit_bytes=100)
    cache.run("a", lambda: None)
    gc.disable()
    try:
        cache.run("a", lambda: alive.append(failing.taken() is not None))
    finally:
        gc.enable()
    assert alive == [False]


class Ended:
    """What `torch.cuda.graph` does where ending a capture that failed raises an error too."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture\nand more")


@pytest.mark.parametrize(
    ("cause", "told", "stays"),
    [
        (torch.OutOfMemoryError("tried to allocate"), "OutOfMemoryError: tried to allocate", True),
        (RuntimeError("a wait\nadvice"), "RuntimeError: a wait; this loop captures nothing", False),
    ],
)
def test_the_reason_of_a_failed_capture_is_its_first_error(
    cause: RuntimeError, told: str, caplog: pytest.LogCaptureFixture, *, stays: bool
) -> None:
    """The error that ending the capture raises would hide that memory ran out."""

    class Failing(TapeCapture):
        def record(self, function: Callable[[], Any]) -> Recording:
            with Ended():
                raise cause

    cache = GraphCache(Failing(), limit_bytes=100)
    for _ in range(2):
        cache.run("a", Work())
    assert told in caplog.text
    assert (cache.counters.eager_parts, cache.counters.failed_captures) == (2, 1)
    cache.run("b", Work())
    cache.run("b", Work())
    assert cache.counters.failed_captures == (2 if stays else 1)


@pytest.mark.parametrize("wrong", [{"limit_bytes": -1}, {"flat_tokens": 0}, {"stop_waits": "no"}])
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="stop_waits"):
        GraphSettings(**wrong)  # type: ignore[arg-type]
