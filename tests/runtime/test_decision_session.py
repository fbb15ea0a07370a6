"""The session of a twin: tensors bound where they lie, and CUDA that is really used."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specctl.artifacts.onnx_twin import twin_bytes
from specctl.errors import InvariantError, UsageError
from specctl.policy import Policy
from specctl.runtime import twins
from specctl.runtime.twins import TwinSession, cuda_options
from tests.artifacts.examples import HETERO
from tests.runtime.onnx_devices import BINS, NEEDS_ONNXRUNTIME, open_bins, open_device

pytestmark = NEEDS_ONNXRUNTIME
CPU = torch.device("cpu")


@pytest.fixture
def session() -> TwinSession:
    return open_bins(CPU)


class Remembering:
    """A binding that remembers what it was given."""

    def __init__(self, binding: Any) -> None:
        self.binding, self.bound = binding, []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.binding, name)
        if name not in ("bind_input", "bind_output"):
            return found
        return lambda *given: (self.bound.append(given), found(*given))


def test_tensors_are_bound_where_they_lie(session: TwinSession) -> None:
    session.binding = Remembering(session.binding)
    phi = torch.tensor([0.05, 2.0, 50.0])
    found = session(phi)
    assert found.tolist() == [0, 2, 7]
    assert session.binding.bound == [
        ("phi", "cpu", 0, np.float32, (3,), phi.data_ptr()),
        ("bin", "cpu", 0, np.int64, (3,), found.data_ptr()),
    ]


def test_the_session_says_what_the_artifact_says(session: TwinSession) -> None:
    phi = torch.linspace(0, 12, 500).view(250, 2)[:, 1]
    assert not phi.is_contiguous()
    wanted = np.searchsorted(np.float32(HETERO.edges), phi.numpy()).tolist()
    for rows in (250, 1, 0, 7):  # a binding is used again for any size
        assert session(phi[:rows]).tolist() == wanted[:rows]


@pytest.mark.parametrize("given", [torch.zeros(3).double(), torch.zeros(3, device="meta")])
def test_other_tensors_are_refused(session: TwinSession, given: Tensor) -> None:
    with pytest.raises(InvariantError, match="not float32 on cpu"):
        session(given)


def test_nan_stays_nan_whatever_a_provider_makes_of_it() -> None:
    """One whose ReLU turns NaN into 0 gives some score; the guard must see that it is none."""
    session: Any = lambda features: torch.full((len(features),), 0.5)  # noqa: E731
    features = torch.tensor([[1.0, 2.0], [torch.nan, 2.0], [1.0, torch.inf]])
    assert twins.network_by(session)(features).isnan().tolist() == [False, True, False]


def test_a_device_without_a_provider_is_refused() -> None:
    with pytest.raises(UsageError, match="device meta"):
        TwinSession(b"", BINS, torch.device("meta"))


# --------------------------------------------------------------------------- CUDA, without one


CUDA_1 = torch.device("cuda", 1)


@dataclass(eq=False)
class FakeStream:
    """A stream that notes what waits for what."""

    name: str
    cuda_stream: int
    log: list[str]
    device: torch.device = CUDA_1

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeStream, FakeStream]:
    """Torch's default stream, which has the number 0, and the next one that is made."""
    log: list[str] = []
    default, own = FakeStream("torch", 0, log), FakeStream("session", 7, log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: default)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: own)
    return default, own


def test_a_session_computes_on_torchs_stream_or_waits_for_it(
    streams: tuple[FakeStream, FakeStream],
) -> None:
    """Its own one, in order with torch's, where that is the default stream."""
    default, own = streams
    used: Any = twins._stream_on(torch.device("cuda"))
    assert used is own
    with twins._in_order(used):
        own.log.append("run")
    assert own.log == ["session waits for torch", "run", "torch waits for session"]
    wanted = {"device_id": "1", "user_compute_stream": "7", "use_tf32": "0"}
    assert cuda_options(used) == wanted
    default.cuda_stream = 5
    assert twins._stream_on(torch.device("cuda")) is default  # type: ignore[comparison-overlap]
    assert twins._stream_on(CPU) is None


@pytest.mark.parametrize("providers", [["CPUExecutionProvider"], ["CUDAExecutionProvider"]])
def test_a_session_that_left_cuda_out_in_silence_is_refused(
    providers: list[str], streams: tuple[FakeStream, FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def opened(model: bytes, options: Any, **settings: Any) -> Any:
        given.update(settings, fallback=options.get_session_config_entry(NO_FALLBACK))
        return SimpleNamespace(get_providers=lambda: providers)

    monkeypatch.setattr("onnxruntime.InferenceSession", opened)
    _, own = streams
    refused = pytest.raises(UsageError, match="wholly on CUDAExecutionProvider: CPUExec")
    with refused if providers[0].startswith("CPU") else nullcontext():
        twins._open(b"", torch.device("cuda"), own)  # type: ignore[arg-type]
    assert given["fallback"] == "1"
    assert given["enable_fallback"] is False
    assert given["providers"] == [("CUDAExecutionProvider", cuda_options(own))]  # type: ignore[arg-type]


NO_FALLBACK = "session.disable_cpu_ep_fallback"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stream is made up")
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_cuda_that_does_not_load_is_refused(streams: tuple[FakeStream, FakeStream]) -> None:
    model = twin_bytes(Policy(shape=HETERO))
    assert model is not None
    with pytest.raises(UsageError, match="onnxruntime does not run wholly on CUDA") as found:
        twins._open(model, torch.device("cuda"), streams[1])  # type: ignore[arg-type]
    assert "--decisions torch" in str(found.value)


# --------------------------------------------------------------------------- CUDA, with one


@pytest.fixture
def device() -> torch.device:
    return open_device("cuda")


@pytest.mark.cuda
def test_cuda_is_used_on_a_stream_of_torchs(device: torch.device) -> None:
    session = open_bins(device)
    assert session.session.get_providers()[0] == "CUDAExecutionProvider"
    assert session.stream is not None
    options = session.session.get_provider_options()["CUDAExecutionProvider"]
    assert options["user_compute_stream"] == str(session.stream.cuda_stream)
    assert options["use_tf32"] == "0"
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        assert open_bins(device).stream == side


@pytest.mark.cuda
def test_a_run_stands_in_the_order_of_any_stream(device: torch.device) -> None:
    """A session of one stream, called on another behind work that is still under way."""
    session, edges = open_bins(device), torch.tensor(HETERO.edges, device=device)
    for stream in (torch.cuda.default_stream(device), torch.cuda.Stream(device)):
        with torch.cuda.stream(stream):
            for number in range(50):
                phi = torch.zeros(10_000, device=device)
                torch.cuda._sleep(200_000)  # what follows must wait for it
                phi += 0.2 * number
                found = session(phi).clone()
                assert torch.equal(found, torch.bucketize(phi, edges))


@pytest.mark.cuda
def test_the_host_waits_for_nothing(device: torch.device) -> None:
    session, phi = open_bins(device), torch.linspace(0, 12, 1000, device=device)
    session(phi)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    session(phi)
    done.record()
    assert not done.query(), "the call came back before the device had begun it"
