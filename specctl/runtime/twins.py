"""Decisions by the ONNX twin of an artifact, run by onnxruntime where the tensors lie.

A rule with a learned scorer keeps all of its code but the log-odds of nodes. The graph is that of
`policy.onnx` in the artifact, built from the record by the same function. Input and output are
torch tensors given by address, on the CPU as on CUDA: nothing is copied, and on CUDA the host waits
for nothing. There the session computes on a stream of torch's, and is refused unless CUDA runs all
of it: onnxruntime leaves CUDA out in silence where a library is missing, and gives single nodes to
the CPU where it has no kernel.
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
"""Without the first a run on CUDA ends with the host waiting for the stream. The second says that
nothing is captured, as by default; left out, its look-up throws in every run, 30 us."""
ELEMENTS = {torch.float32: np.float32, torch.int64: np.int64}


@dataclass(frozen=True)
class Port:
    """The one input and the one output of a twin that are bound."""

    given: str  # name of the input, float32 `[n]` or `[n, F]`
    found: str  # name of the output, `[n]` of `dtype`
    dtype: torch.dtype


class TwinSession:
    """The outputs of a twin for tensors on one device.

    Args:
        model: bytes of the twin.
    """

    def __init__(self, model: bytes, port: Port, device: torch.device) -> None:
        import onnxruntime as ort

        self.port, self.device, self.stream = port, device, _stream_on(device)
        self.session = _open(model, device, self.stream)
        self.binding = self.session.io_binding()
        self.options = ort.RunOptions()
        for entry in RUN_ENTRIES.items():
            self.options.add_run_config_entry(*entry)

    def __call__(self, given: Tensor) -> Tensor:
        """`[n]` of the port's dtype.

        Args:
            given: float32 `[n]` or `[n, F]`, on the session's device.
        """
        given, found = given.contiguous(), self._empty(given)
        if len(given):  # onnxruntime takes no address of nothing
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
    """A session all of which runs on that device."""
    import onnxruntime as ort

    options, wanted = ort.SessionOptions(), PROVIDERS[device.type]
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # decisions are small
    if stream is not None:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = wanted if stream is None else (wanted, cuda_options(stream))
    try:
        session = ort.InferenceSession(model, options, providers=[provider], enable_fallback=False)
    except Exception as error:  # onnxruntime's errors share no base but this one
        raise _refused(wanted, str(error).splitlines()[0]) from error
    found = session.get_providers()
    if found[0] != wanted:
        raise _refused(wanted, ", ".join(found))
    return session


def cuda_options(stream: torch.cuda.Stream) -> dict[str, str]:
    """Of the CUDA provider; without the last one a network's factors lose 13 of their 23 bits."""
    return {
        "device_id": str(stream.device.index),
        "user_compute_stream": str(stream.cuda_stream),
        "use_tf32": "0",
    }


def _stream_on(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that a session computes on, None on the CPU.

    onnxruntime takes stream 0 for none (its PR 19619) and would use one of its own, out of order.
    Stream 0 is torch's default, so then the session gets another one, whose order we keep.
    """
    if device.type not in PROVIDERS:
        raise _refused(" or ".join(PROVIDERS.values()), f"device {device.type}")
    if device.type == "cpu":
        return None
    current = torch.cuda.current_stream(device)
    return current if current.cuda_stream else torch.cuda.Stream(device)


@contextmanager
def _in_order(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on `stream` within comes behind torch's work so far and before what follows."""
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
    """The rule with its scorer computed by onnxruntime; `ar` has nothing to decide.

    Raises:
        UsageError: a shape without a learned scorer, onnxruntime or onnx not installed, or a device
            that onnxruntime does not compute all of the twin on.
    """
    if isinstance(shape, RootOnly):
        return rule
    if not isinstance(shape, ScoredTree):
        raise UsageError(
            f"decisions onnx: shape {shape.kind} has no learned scorer, as fit c2t and "
            "survival give",
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
    """Log-odds by the twin of a network.

    NaN stays NaN, which the round's guard must see. Whether a ReLU lets it through is up to the
    provider.
    """

    def log_odds(features: Tensor) -> Tensor:
        return session(features).masked_fill_(features.isnan().any(1), math.nan)

    return log_odds
