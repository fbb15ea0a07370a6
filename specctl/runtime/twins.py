"""Decisions by the ONNX twin of an artifact, run by onnxruntime on the device of the tensors.

Only the log-odds of nodes come from the twin; the rest of the rule is torch. The graph is that of
`policy.onnx` in the artifact, built from the record by the same function. Input and output are
torch tensors bound by address, so nothing is copied, and on CUDA the host never waits. There the
session computes on a stream of torch and must run wholly on CUDA: onnxruntime silently drops CUDA
if a library is missing, and runs single nodes on the CPU if it has no kernel for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.artifacts.onnx_twin import twin_bytes
from specctl.errors import InvariantError, UsageError
from specctl.policy import (
    Policy,
    RootOnly,
    ScoredTree,
    Shape,
)
from specctl.policy.c2t import score_by
from specctl.policy.pruning import PrunedShape
from specctl.policy.rules import ShapeRule
from specctl.policy.scorers import LogOdds

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
RUN_ENTRIES = {"disable_synchronize_execution_providers": "1", "gpu_graph_id": "-1"}
"""The first keeps the host from waiting for the stream after each run on CUDA. The second is the
default, stated because looking up a missing entry throws, which takes 30 us a run."""
ELEMENTS = {torch.float32: np.float32, torch.int64: np.int64}


@dataclass(frozen=True)
class Port:
    """The input and output of a twin."""

    given: str  # name of the input, float32 `[n]` or `[n, F]`
    found: str  # name of the output, `[n]`
    dtype: torch.dtype  # of the output


class TwinSession:
    """A session of a twin on one device."""

    def __init__(self, model: bytes, port: Port, device: torch.device) -> None:
        import onnxruntime as ort

        self.port, self.device, self.stream = port, device, _stream_on(device)
        self.session = _open(model, device, self.stream)
        self.binding = self.session.io_binding()
        self.options = ort.RunOptions()
        for entry in RUN_ENTRIES.items():
            self.options.add_run_config_entry(*entry)

    def __call__(self, given: Tensor) -> Tensor:
        """`[n]` of the port's dtype, from float32 `[n]` or `[n, F]` on the session's device."""
        given, found = given.contiguous(), self._empty(given)
        if len(given):  # onnxruntime rejects empty tensors
            self._bind(self.binding.bind_input, self.port.given, given)
            self._bind(self.binding.bind_output, self.port.found, found)
            with _in_order(self.stream):
                self.session.run_with_iobinding(self.binding, self.options)
        return found

    def _empty(self, given: Tensor) -> Tensor:
        if given.dtype != torch.float32 or given.device.type != self.device.type:
            raise InvariantError(
                f"the ONNX twin got {self.port.given} as {given.dtype} on {given.device}, "
                f"not float32 on {self.device.type}",
                hint="report this policy",
            )
        return torch.empty(len(given), dtype=self.port.dtype, device=given.device)

    def _bind(self, bind: Any, name: str, tensor: Tensor) -> None:
        place = tensor.device
        size, element = tuple(tensor.shape), ELEMENTS[tensor.dtype]
        bind(name, place.type, place.index or 0, element, size, tensor.data_ptr())


def _open(model: bytes, device: torch.device, stream: torch.cuda.Stream | None) -> Any:
    """A session that runs wholly on the device."""
    import onnxruntime as ort

    options, wanted = ort.SessionOptions(), PROVIDERS[device.type]
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # decisions are small
    if stream is not None:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = wanted if stream is None else (wanted, cuda_options(stream))
    try:
        return ort.InferenceSession(model, options, providers=[provider], enable_fallback=False)
    except Exception as error:  # the only base of onnxruntime's errors
        raise _refused(wanted, str(error).splitlines()[0]) from error


def cuda_options(stream: torch.cuda.Stream) -> dict[str, str]:
    """Options of the CUDA provider; TF32 would drop 13 of the 23 bits of a network's factors."""
    return {
        "device_id": str(stream.device.index),
        "user_compute_stream": str(stream.cuda_stream),
        "use_tf32": "0",
    }


def _stream_on(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that a session computes on; None on the CPU.

    onnxruntime takes stream 0, torch's default, for none (its PR 19619) and would compute out of
    order on its own stream. The session then gets another stream, which `_in_order` synchronises.
    """
    if device.type not in PROVIDERS:
        raise _refused(" or ".join(PROVIDERS.values()), f"device {device.type}")
    if device.type == "cpu":
        return None
    current = torch.cuda.current_stream(device)
    return current if current.cuda_stream else torch.cuda.Stream(device)


@contextmanager
def _in_order(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Orders work on `stream` behind torch's earlier work and before its later work."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    yield
    current.wait_stream(stream)


def _refused(wanted: str, found: str) -> UsageError:
    return UsageError(
        f"decisions onnx: onnxruntime does not run wholly on {wanted}: {found}",
        hint="decide by torch (--decisions torch), or install onnxruntime-gpu and the libraries "
        "that its log asks for",
    )


SCORER = Port("features", "log_odds", torch.float32)


def by_twin(shape: Shape, rule: ShapeRule, device: torch.device) -> ShapeRule:
    """The rule with its scorer computed by onnxruntime; `ar` stays as it is.

    Raises:
        UsageError: the shape has no learned scorer, a package is missing, or onnxruntime cannot run
            the whole twin on the device.
    """
    if isinstance(shape, RootOnly):
        return rule
    if not isinstance(shape, ScoredTree):
        raise UsageError(
            f"decisions onnx: shape {shape.kind} has no learned scorer, as those of fit c2t and "
            "survival have",
            hint="decide it by torch (--decisions torch)",
        )
    for package in ("onnxruntime", "onnx"):
        if find_spec(package) is None:
            raise UsageError(
                f"decisions onnx: {package} is not installed",
                hint="install it, or decide by torch (--decisions torch)",
            )
    model = twin_bytes(Policy(shape=shape))
    assert model is not None
    assert isinstance(rule, PrunedShape)
    log_odds = network_by(TwinSession(model, SCORER, device))
    return replace(rule, score=score_by(shape.scorer.features, log_odds))


def network_by(session: TwinSession) -> LogOdds:
    """Log-odds by the twin of a network. NaN is restored for the round's check, as providers differ
    in whether a ReLU passes it on."""

    def log_odds(features: Tensor) -> Tensor:
        return session(features).masked_fill_(features.isnan().any(1), math.nan)

    return log_odds
