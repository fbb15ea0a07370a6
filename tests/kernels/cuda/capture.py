"""Graphs and synchronisations, as every op must stand them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

CUDA = torch.device("cuda")
Found = TypeVar("Found")


@contextmanager
def no_sync() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(run: Callable[[], Found]) -> tuple[torch.cuda.CUDAGraph, Found]:
    """The graph of a call, and where its results will stand.

    The call runs twice before: once to be compiled, once to show that it waits for nothing.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        with no_sync():
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def overwrite(inputs: Sequence[Tensor], fresh: Sequence[Tensor]) -> None:
    """New values where a graph reads."""
    for there, values in zip(inputs, fresh, strict=True):
        there.copy_(values)
