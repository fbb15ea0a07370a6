"""Choice between an op's implementations, by device and logged once.

    tensors on CUDA      fused (Triton)
    tensors elsewhere    reference (torch)

`SPECCTL_KERNELS=reference` or `=fused` forces one for the whole process, `forced` for a block.
A forced backend that cannot run is refused; on CUDA without Triton the reference runs, with one
warning for each op. Under `TRITON_INTERPRET=1` fused kernels can be forced on a CPU too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from specctl.errors import UsageError

Backend = Literal["auto", "reference", "fused"]
VARIABLE = "SPECCTL_KERNELS"

log = logging.getLogger("specctl.kernels")
_forced: list[Backend] = []


def implementation(package: str, op: str, *tensors: Tensor | None) -> Any:
    """The module that computes an op on these tensors: the package's `reference` or `fused`.

    Raises:
        UsageError: tensors on several devices, or a forced backend that cannot run on theirs.
    """
    is_fused = runs_fused(op, *[tensor for tensor in tensors if tensor is not None])
    return _module(f"{package}.{'fused' if is_fused else 'reference'}")


def runs_fused(op: str, *tensors: Tensor) -> bool:
    """Whether an op on these tensors runs its Triton kernel; raises as `implementation`."""
    device, *others = set(map(_device_of, tensors))
    if others:
        raise UsageError(
            f"kernel {op}: tensors must be on one device, not on "
            f"{', '.join(sorted(map(str, (device, *others))))}",
            hint="move them together",
        )
    backend = wanted_backend()
    if backend == "fused":
        _check_fused(op, device.type)
    is_fused = backend == "fused" or (backend == "auto" and device.type == "cuda" and has_triton())
    _log_choice(op, device.type, is_fused, backend)
    return is_fused


def wanted_backend() -> Backend:
    """The forced backend, or `auto`."""
    return _forced[-1] if _forced else _from_environment()


@contextmanager
def forced(backend: Backend) -> Iterator[None]:
    """Forces a backend for a block, over the environment variable."""
    _forced.append(backend)
    try:
        yield
    finally:
        _forced.pop()


def current(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the current one for a block, as Triton launches kernels there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_module, _device_of = cache(import_module), attrgetter("device")


@cache
def has_triton() -> bool:
    """Whether Triton can be imported; macOS and Windows have none."""
    return find_spec("triton") is not None


@cache
def is_interpreted() -> bool:
    """Whether Triton kernels run as Python, which works on any device."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _from_environment() -> Backend:
    word = os.environ.get(VARIABLE, "auto")
    for known in get_args(Backend):
        if word == known:
            return known  # type: ignore[no-any-return]
    raise UsageError(f"{VARIABLE} must be {' or '.join(get_args(Backend))}, not {word!r}")


def _check_fused(op: str, device: str) -> None:
    """Rejects a forced fused kernel that cannot run here."""
    if not has_triton():
        raise UsageError(
            f"fused kernel {op} needs triton, which is not installed",
            hint="install it (Linux only), or do not force fused kernels",
        )
    if device != "cuda" and not is_interpreted():
        raise UsageError(
            f"fused kernel {op} needs CUDA, and its tensors are on {device}",
            hint="move them, set TRITON_INTERPRET=1 to debug, or do not force fused kernels",
        )


@cache
def _log_choice(op: str, device: str, is_fused: bool, backend: Backend) -> None:  # noqa: FBT001
    if device == "cuda" and not is_fused and backend == "auto":
        log.warning("kernel %s: reference on cuda, as triton is missing; expect it slower", op)
    else:
        log.info("kernel %s: %s on %s", op, "fused" if is_fused else "reference", device)
