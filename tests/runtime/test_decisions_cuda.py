"""The same decisions where onnxruntime computes on a CUDA device; skipped where it cannot."""

from __future__ import annotations

import pytest
import torch

from specctl.artifacts.onnx_twin import twin_bytes
from specctl.errors import UsageError
from specctl.policy import Policy, ScoredTree
from specctl.runtime import twins
from specctl.runtime.api import Decoder
from specctl.runtime.load import load_pair
from specctl.runtime.twins import TwinSession
from tests.artifacts.examples import HETERO
from tests.policy.scorers import random_trees
from tests.runtime.cases_decisions import (
    SHAPES,
    check_bins,
    check_gates,
    check_network,
    check_sigmoid_border,
)

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def device() -> torch.device:
    """CUDA, where onnxruntime is installed and can use it."""
    for package in ("onnxruntime",):
        pytest.importorskip(package)
    found = torch.device("cuda", torch.cuda.current_device())
    try:
        open_bins(found)
    except UsageError as error:
        pytest.skip(f"onnxruntime without CUDA: {error}")
    return found


def open_bins(device: torch.device) -> TwinSession:
    model = twin_bytes(Policy(shape=HETERO))
    assert model is not None
    return TwinSession(model, twins.BINS, device)


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


def test_the_host_waits_for_nothing(device: torch.device) -> None:
    session, phi = open_bins(device), torch.linspace(0, 12, 1000, device=device)
    session(phi)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    session(phi)
    done.record()
    assert not done.query(), "the call came back before the device had begun it"


@pytest.mark.parametrize("num_edges", [1, 7, 255])
def test_bins(num_edges: int, device: torch.device) -> None:
    check_bins(num_edges, device)


def test_gates(device: torch.device) -> None:
    check_gates(device)


@pytest.mark.parametrize("hidden", [2, 16, 48, 64])
def test_networks(hidden: int, device: torch.device) -> None:
    check_network(hidden, device)


def test_the_border_of_the_sigmoid(device: torch.device) -> None:
    check_sigmoid_border(device)


def test_trees_have_no_cuda_kernel_there(device: torch.device) -> None:
    shape = ScoredTree(scorer=random_trees(0, 2, 3), beta=0.5, depth=2)
    model = twin_bytes(Policy(shape=shape))
    assert model is not None
    with pytest.raises(UsageError, match="boosted trees have no CUDA kernel"):
        TwinSession(model, twins.SCORER, device)


@pytest.mark.parametrize("name", ["hetero", "echo", "network"])
def test_texts_are_those_of_torch(name: str, device: torch.device) -> None:
    pair = load_pair("embedded", "embedded", device=str(device), dtype="float32")
    policy, prompts = Policy(shape=SHAPES[name]), ["def add(a, b):", "How much is 12 + 30?"]
    by_torch, by_onnx = (
        Decoder(pair, policy, batch_size=2, decisions=decisions).generate(
            prompts, max_new_tokens=24
        )
        for decisions in ("torch", "onnx")
    )
    for ours, theirs in zip(by_onnx, by_torch, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.metrics.calls == theirs.metrics.calls
        assert ours.metrics.verified_tokens == theirs.metrics.verified_tokens
