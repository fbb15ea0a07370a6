"""From a device to the host: exact, and with no memory or source let go too early."""

from __future__ import annotations

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


def landing(lane: Lane, batches: list[dict[str, Tensor]] | None = None) -> Landed:
    """A stream of batches, four under way at a time."""
    ship: Transfer[int] = Transfer(lane)
    there = [batch(seed) for seed in range(12)] if batches is None else batches
    landed = []
    for seed in range(len(there)):
        with lane.after([lane.mark()]):
            ship.send(there.pop(0), seed)
        landed += ship.land() if seed % 4 == 3 else []
    return landed + ship.land()


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


@pytest.mark.cuda
def test_a_device_sends_what_a_host_sends() -> None:
    device = torch.device("cuda")
    there = [{name: t.to(device) for name, t in batch(seed).items()} for seed in range(20)]
    with no_sync():
        landed = landing(CudaLane(device), batches=there)
    assert exact(landed)
