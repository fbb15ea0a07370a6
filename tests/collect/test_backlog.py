"""The bounded queue: what waits is counted until it is released, and a full queue says so."""

from __future__ import annotations

from threading import Thread

import pytest

from specctl.collect.backlog import Backlog


def queue(max_items: int = 4) -> Backlog:
    return Backlog(max_items=max_items, max_bytes=100, wake_items=2)


def test_full_queue_blocks_and_loses_nothing() -> None:
    backlog = queue()
    producer = Thread(target=lambda: [backlog.put(n, 40) for n in range(50)] and backlog.close())
    producer.start()
    taken, more = [], True
    while more:
        items, more = backlog.take(0.01)
        assert len(items) <= 2  # 100 bytes hold two of 40
        taken += items
        backlog.release()
    producer.join()
    assert taken == list(range(50))


def test_what_was_taken_counts_until_it_is_released() -> None:
    backlog = queue()
    assert backlog.put("a", 60)
    assert backlog.take(0.0) == (["a"], True)
    assert not backlog.put("b", 60, wait=False)
    backlog.release()
    assert backlog.put("b", 60, wait=False)


@pytest.mark.parametrize("size_bytes", [0, 40])
def test_without_waiting_a_full_queue_tells(size_bytes: int) -> None:
    backlog = queue(max_items=2)
    admitted = [backlog.put(n, size_bytes, wait=False) for n in range(5)]
    assert admitted == [True, True, False, False, False]
    assert backlog.take(0.0) == ([0, 1], True)


def test_what_must_be_said_passes_a_full_queue() -> None:
    backlog = queue(max_items=1)
    backlog.put("round", 1)
    backlog.tell("end")
    assert backlog.take(0.0) == (["round", "end"], True)


def test_item_above_the_bound_passes_alone() -> None:
    backlog = queue()
    backlog.put("huge", 1000)
    assert not backlog.put("small", 1, wait=False)
    assert backlog.take(0.0) == (["huge"], True)
