"""From a device to the host: exact, bounded, and with no memory or source let go too early."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specctl.collect import transfer
from specctl.collect.transfer import CudaLane, Lane, Ready, Transfer
from tests.collect.lanes import FakeLane
from tests.kernels.helpers import no_sync

Landed = list[tuple[int, dict[str, Tensor]]]


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


BATCH_BYTES = sum(tensor.nbytes for tensor in batch(0).values())


def landing(
    lane: Lane, max_bytes: int = 4 * BATCH_BYTES, batches: list[dict[str, Tensor]] | None = None
) -> Landed:
    """A stream of batches, up to four under way."""
    ship: Transfer[int] = Transfer(lane, max_bytes)
    there = [batch(seed) for seed in range(12)] if batches is None else batches
    landed = []
    for seed in range(len(there)):
        with lane.after([lane.mark()]):
            landed += ship.send(there.pop(0), seed)
        landed += ship.land(num_left=3)
    landed += ship.land()
    assert ship.size_bytes == 0
    return landed


def exact(landed: Landed) -> bool:
    """Whether batches arrived as they were sent, in order."""
    return [seed for seed, _ in landed] == list(range(len(landed))) and all(
        tensors.keys() == batch(seed).keys()
        and all(torch.equal(tensors[name], value) for name, value in batch(seed).items())
        for seed, tensors in landed
    )


@pytest.mark.parametrize("lane", [FakeLane(early=False), FakeLane(early=True), Lane()])
def test_what_is_sent_arrives(lane: Lane) -> None:
    assert exact(landing(lane))


@pytest.mark.parametrize(("room", "most"), [(0.0, 1), (1.0, 1), (2.5, 2), (9.0, 4)])
def test_host_memory_is_bounded(room: float, most: int) -> None:
    """A parcel above the bound goes alone."""
    lane = FakeLane()
    assert exact(landing(lane, int(room * BATCH_BYTES)))
    assert lane.most_bytes == most * BATCH_BYTES


def broken_by(lane: Lane) -> bool:
    try:
        return not exact(landing(lane))
    except AssertionError as error:
        return "freed before" in str(error)


PARCEL = transfer.Parcel
MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "a source freed too early": (transfer, "Parcel", lambda *given: PARCEL(*given[:-1], ())),
    "no wait": (transfer, "Parcel", lambda a, b, c, _, e: PARCEL(a, b, c, Ready(), e)),
    "rows left in host memory of the lane": (torch.Tensor, "clone", lambda tensor: tensor),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    assert broken_by(FakeLane())


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
        "no pinned host memory (CUDA error: out of memory): traces are copied to pageable memory"
    )


@pytest.mark.cuda
def test_a_device_sends_what_a_host_sends() -> None:
    device = torch.device("cuda")
    there = [{name: t.to(device) for name, t in batch(seed).items()} for seed in range(20)]
    with no_sync():
        landed = landing(CudaLane(device), batches=there)
    assert exact(landed)
