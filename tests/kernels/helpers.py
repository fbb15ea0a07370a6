"""Poisoned memory, moves to a device, comparisons and graphs: what every op's tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

CPU = torch.device("cpu")
Found = TypeVar("Found")


@contextmanager
def poisoned() -> Iterator[None]:
    """`torch.empty` gives NaN, the largest integer, or True, on every device."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def moved(values: Iterable[Tensor | None], device: torch.device) -> list[Any]:
    return [None if value is None else value.to(device) for value in values]


def spread(values: Tensor, device: torch.device) -> Tensor:
    """On the device, every second column of something wider."""
    return torch.stack([values, torch.zeros_like(values)], 2).to(device).flatten(1)[:, ::2]


def assert_same(found: NamedTuple, wanted: NamedTuple, what: str) -> None:
    for name, value in found._asdict().items():
        expected = getattr(wanted, name)
        if value is None or expected is None:
            assert value is expected, f"{what}, {name}"
            continue
        assert value.dtype == expected.dtype, f"{what}, {name}: {value.dtype}"
        assert value.shape == expected.shape, f"{what}, {name}: {value.shape}, {expected.shape}"
        same = torch.equal(value.cpu(), expected)
        assert same, f"{what}, {name}: {value.cpu()}, not {expected}"


def tensors_of(*parts: object) -> list[Tensor]:
    """All tensors of some arguments, in order."""
    found: list[Tensor] = []
    for part in parts:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, tuple | list):
            found += tensors_of(*part)
        elif isinstance(part, dict):
            found += tensors_of(*part.values())
        elif hasattr(part, "__dict__"):
            found += tensors_of(*vars(part).values())
    return found


def on_device(value: Found, device: torch.device) -> Found:
    """A copy; its tensors are moved one by one, so that views stay as they lie."""
    memo = {id(tensor): tensor.clone().to(device) for tensor in tensors_of(value)}
    return copy.deepcopy(value, memo)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- graphs


@contextmanager
def no_sync() -> Iterator[None]:
    """Whatever waits for the device raises, in every thread; events are no wait to torch."""
    before = torch.cuda.get_sync_debug_mode()
    try:  # the mode is set even where torch's warning of it is an error
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


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
