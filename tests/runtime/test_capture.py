"""Bookkeeping of graphs: what is captured when, what stays eager and why."""

from __future__ import annotations

import logging

import pytest
import torch

from specctl.errors import UsageError
from specctl.runtime.capture import (
    GraphCache,
    GraphSettings,
    TierChoice,
    bucket_of,
    token_tiers,
)
from specctl.runtime.runnable import PolicyFault
from tests.runtime.tape import TapeCapture


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


def test_limit_keeps_the_next_ones_eager_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    cache, one, other = GraphCache(TapeCapture(num_bytes=60), limit_bytes=50), Work(), Work()
    with caplog.at_level(logging.WARNING, "specctl.graphs"):
        for _ in range(4):
            cache.run("one", one)
            cache.run("other", other)
    assert (one.count.item(), other.count.item()) == (4, 4)
    counters = cache.counters
    assert (counters.captures, counters.failed_captures, counters.graph_bytes) == (1, 1, 60)
    assert counters.eager_parts == 1 + 4
    assert [r.getMessage() for r in caplog.records] == [
        "no graph for other, which runs eagerly: graphs hold 60, it 0 of 50 bytes"
    ]


def test_out_of_memory_gives_up_the_other_graphs_and_makes_them_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They would keep the memory that the failed one took, which its eager run needs."""
    tape = TapeCapture(num_bytes=7)
    cache, one, other = GraphCache(tape, limit_bytes=100), Work(), Work()
    for _ in range(3):
        cache.run("one", one)
    cache.run("other", other)
    tape.fails = 1
    cache.run("other", other)
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 EiB." in caplog.text
    assert (tape.num_forgotten, cache.keys, cache.counters.graph_bytes) == (1, (), 0)
    for _ in range(2):
        cache.run("one", one)
        cache.run("other", other)
    assert (one.count.item(), other.count.item()) == (5, 4)
    assert (cache.keys, cache.counters.graph_bytes) == (("one",), 7)
    assert (cache.counters.captures, cache.counters.failed_captures) == (2, 1)


def test_work_beyond_the_limit_is_never_captured() -> None:
    """Its memory was seen when it ran as it is; refused keys are tried after a clearing."""
    tape = TapeCapture(num_bytes=1, peak_bytes=200)
    cache, work = GraphCache(tape, limit_bytes=100), Work()
    for _ in range(3):
        cache.run("a", work)
    assert (cache.counters.captures, cache.counters.failed_captures, tape.num_launches) == (
        0,
        1,
        [],
    )
    cache.limit_bytes = 300
    cache.run("a", work)
    assert cache.counters.captures == 0
    cache.clear()
    cache.run("a", work)
    assert cache.counters.captures == 1
    assert work.count.item() == 5


def test_a_policys_failure_is_no_use_of_its_key() -> None:
    cache = GraphCache(TapeCapture(), limit_bytes=100)

    def failing() -> None:
        raise PolicyFault("exception", "no")

    for _ in range(3):
        with pytest.raises(PolicyFault):
            cache.run("a", failing)
    assert (cache.counters.captures, cache.counters.eager_parts) == (0, 3)


def test_buckets_are_powers_of_two_up_to_the_slots() -> None:
    assert [bucket_of(n, 6) for n in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    assert bucket_of(9, 32) == 16


def test_tiers_are_powers_of_two_and_end_at_the_most() -> None:
    assert token_tiers(20) == (1, 2, 4, 8, 16, 20)
    assert token_tiers(100, 64) == (64, 100)
    assert token_tiers(48, 64) == (48,)
    assert token_tiers(2048, 64) == (64, 128, 256, 512, 1024, 2048)
    assert token_tiers(1) == (1,)


def test_choice_covers_the_last_rounds_by_request() -> None:
    choice, tiers = TierChoice(), (8, 16, 32)
    assert choice.choose(tiers, 1) == 32  # nothing is known yet
    choice.note(9, 1)
    assert choice.choose(tiers, 1) == 16
    assert choice.choose(tiers, 1, known=3) == 8
    assert choice.choose(tiers, 3) == 32  # two have joined
    choice.note(40, 2)
    assert (choice.choose(tiers, 1), choice.choose(tiers, 2)) == (32, 32)
    for _ in range(4):
        choice.note(8, 2)
    assert (choice.choose(tiers, 1), choice.choose(tiers, 4)) == (8, 16)


@pytest.mark.parametrize("wrong", [{"limit_bytes": -1}, {"flat_tokens": 0}, {"stop_waits": "no"}])
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="stop_waits"):
        GraphSettings(**wrong)  # type: ignore[arg-type]
