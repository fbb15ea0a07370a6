"""From a device to the host: exact, bounded, and with no buffer or source let go too early."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from specctl.collect import shipping
from specctl.collect.shipping import (
    MIN_BYTES,
    READY,
    BufferPool,
    CudaLane,
    Lane,
    Shipping,
    pack,
    unpack,
)
from tests.collect.lanes import FakeLane


def batch(seed: int, rows: int = 40) -> dict[str, Tensor]:
    """Tensors of all widths, some of them views with gaps, one empty."""
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randint(1 << 40, (rows, 70), generator=draw)
    return {
        "flag": torch.rand(rows, 3, generator=draw) < 0.5,
        "ids": wide[:, :33],
        "one": wide[:, 5],
        "logp": torch.randn(rows, 33, generator=draw),
        "none": torch.empty(0, 7),
    }


def send(ship: Shipping, seed: int) -> list[tuple[int, dict[str, Tensor]]]:
    with ship.lane.after([ship.lane.mark()]):
        return ship.send(batch(seed), seed)


def exact(lane: Lane, count: int = 12) -> bool:
    """Whether a stream of batches, up to four under way, arrives as it was sent, in order."""
    ship = Shipping(lane, max_bytes=4 * MIN_BYTES)
    landed = []
    for seed in range(count):
        landed += send(ship, seed)
        landed += ship.land(num_left=3)
    landed += ship.land()
    assert ship.pool.num_taken == 0
    return [seed for seed, _ in landed] == list(range(count)) and all(
        tensors.keys() == batch(seed).keys()
        and all(torch.equal(tensors[name], value) for name, value in batch(seed).items())
        for seed, tensors in landed
    )


@pytest.mark.parametrize("early", [False, True])
def test_what_is_sent_arrives(*, early: bool) -> None:
    assert exact(FakeLane(early))
    assert exact(Lane())


def broken_by(lane: Lane) -> bool:
    try:
        return not exact(lane)
    except AssertionError as error:
        return "freed before" in str(error)


def test_a_buffer_that_is_given_back_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    take = BufferPool.take

    def generous(pool: BufferPool, size_bytes: int) -> Tensor | None:
        buffer = take(pool, size_bytes)
        if buffer is not None:
            pool._free.append(buffer)  # the next one may have it too
        return buffer

    monkeypatch.setattr(BufferPool, "take", generous)
    assert broken_by(FakeLane(early=True))


def test_a_source_that_is_freed_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    parcel = shipping.Parcel
    monkeypatch.setattr(shipping, "Parcel", lambda *given: parcel(*given[:-1], ()))
    assert broken_by(FakeLane())


def test_reading_without_waiting_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    parcel = shipping.Parcel
    monkeypatch.setattr(shipping, "Parcel", lambda a, b, c, _, e: parcel(a, b, c, READY, e))
    assert broken_by(FakeLane())


def test_rows_that_stay_in_the_buffer_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: tensor)
    assert broken_by(FakeLane())


def test_packing_aligns_without_padding() -> None:
    tensors = batch(3)
    data, fields = pack(tensors)
    assert data.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    found = unpack(data, fields)
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_the_pool_keeps_to_its_bound_and_uses_buffers_again() -> None:
    made: list[int] = []

    def allocate(size_bytes: int) -> Tensor:
        made.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    pool = BufferPool(allocate, max_bytes=5 * MIN_BYTES // 2)
    first, second = pool.take(10), pool.take(MIN_BYTES)
    assert first is not None
    assert second is not None
    assert pool.take(1) is None, "two buffers fill it"
    pool.give(first)
    assert pool.take(20) is first
    pool.give(first)
    assert pool.take(MIN_BYTES + 1) is None, "beside the second there is no room for two more"
    pool.give(second)
    large = pool.take(2 * MIN_BYTES)
    assert large is not None
    assert pool.size_bytes == large.nbytes == 2 * MIN_BYTES
    assert made == [MIN_BYTES, MIN_BYTES, 2 * MIN_BYTES]


def test_a_batch_above_the_bound_goes_alone() -> None:
    pool = BufferPool(lambda n: torch.empty(n, dtype=torch.uint8), max_bytes=MIN_BYTES)
    small = pool.take(1)
    assert small is not None
    assert pool.take(3 * MIN_BYTES) is None
    pool.give(small)
    huge = pool.take(3 * MIN_BYTES)
    assert huge is not None
    assert huge.nbytes >= 3 * MIN_BYTES
    assert pool.take(1) is None
    pool.give(huge)
    assert pool.take(1) is huge


def test_host_memory_that_cannot_be_pinned_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lane = CudaLane.__new__(CudaLane)  # no device is needed to ask for memory
    lane._is_pageable = False
    empty = torch.empty

    def unpinned(*size: int, dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand much more text")
        return empty(*size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", unpinned)
    with caplog.at_level(logging.WARNING, "specctl.collect"):
        assert [lane.host_bytes(size).nbytes for size in (5, 7)] == [5, 7]
    [said] = caplog.messages
    assert said == (
        "no pinned host memory (CUDA error: out of memory): traces leave through pageable memory"
    )


@pytest.mark.cuda
def test_a_device_sends_what_a_host_sends() -> None:
    device = torch.device("cuda")
    ship = Shipping(CudaLane(device), max_bytes=4 * MIN_BYTES)
    landed = []
    there = [{name: t.to(device) for name, t in batch(seed).items()} for seed in range(20)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in range(20):
            with ship.lane.after([ship.lane.mark()]):
                landed += ship.send(there.pop(0), seed)
        landed += ship.land()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [seed for seed, _ in landed] == list(range(20))
    for seed, tensors in landed:
        assert all(torch.equal(tensors[name], value) for name, value in batch(seed).items())
