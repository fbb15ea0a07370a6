"""The tape is as strict as a graph, so that what passes on it means something."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.runtime.tape import HostReadError, TapeCapture


def test_replay_reads_and_writes_the_same_memory() -> None:
    given, taken = torch.arange(4.0), torch.zeros(4)

    def work() -> Tensor:
        doubled = given * 2
        taken.copy_(doubled.flip(0) + 1)
        return doubled

    recording = TapeCapture().record(work)
    assert taken.tolist() == [0.0] * 4  # recording leaves no trace
    given += 10
    recording.replay()
    assert taken.tolist() == [27.0, 25.0, 23.0, 21.0]
    assert recording.found.tolist() == [20.0, 22.0, 24.0, 26.0]


def test_what_python_read_is_baked_in() -> None:
    width, taken = [2], torch.zeros(4)
    recording = TapeCapture().record(lambda: taken[: width[0]].fill_(1.0))
    width[0] = 4
    recording.replay()
    assert taken.tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda values: values.sum().item(),
        lambda values: bool(values.any()),
        lambda values: values.tolist(),
        lambda values: values[values > 1],
        lambda values: values.nonzero(),
        lambda values: torch.tensor([1, 2]) + values[:2],
        lambda values: values.numpy(),
        lambda values: values.__setitem__(1, -1),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(HostReadError):
        TapeCapture().record(lambda: read(torch.arange(4)))
