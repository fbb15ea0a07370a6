"""Decoding on a CUDA device, with graphs and without; skipped, and counted so, without one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from specctl.kernels.tree_build import BuiltTree, link_tree
from specctl.noise import gumbels, noise_keys, uniforms
from specctl.policy import (
    Chain,
    ElasticBudget,
    Mars,
    Policy,
    RootOnly,
    SurvivalBudget,
)
from specctl.runtime.capture import CudaCapture, GraphSettings
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Sampling
from specctl.tree import DraftPool
from tests.kernels.helpers import no_sync
from tests.kernels.rounds import SHAPES
from tests.runtime.captured import (
    assert_same_rounds,
    decode,
    make_loop,
    ordinary,
    requests,
)
from tests.runtime.toy import Kept

pytestmark = pytest.mark.cuda
DRAWN = (Sampling(), Sampling(0.8), Sampling(1.0, top_k=20), Sampling(1.1, top_p=0.8))
NAMES = ("eagle2", "hetero", "echo", "threshold", "c2t joint")
POLICIES = {
    "ar": Policy(shape=RootOnly()),
    "chain": Policy(shape=Chain(num_draft_tokens=4)),
    **{name: Policy(shape=SHAPES[name]) for name in NAMES},
    "echo, budget": Policy(shape=SHAPES["echo"], budget=ElasticBudget(max_tokens=20)),
}


@cache
def cuda_pair() -> Pair:
    return load_pair("embedded", "embedded", device="cuda", dtype="float32")


def test_cuda_noise_has_the_bits_of_the_cpu() -> None:
    """And Gumbel numbers that differ by a few units in their last place at most."""
    seeds, positions = torch.arange(64)[:, None] - 32, torch.arange(16)
    cpu = noise_keys(seeds, positions)
    cuda = noise_keys(seeds.cuda(), positions.cuda())
    assert torch.equal(cuda.cpu(), cpu)
    assert torch.equal(uniforms(cuda, 500).cpu(), uniforms(cpu, 500))
    torch.testing.assert_close(gumbels(cuda, 500).cpu(), gumbels(cpu, 500), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["chain", "eagle2", "hetero"])
def test_cuda_seeded_text_depends_on_neither_policy_nor_batch(name: str) -> None:
    given = requests(16, (Sampling(0.8, top_p=0.95),), new_tokens=24)
    plain = decode(POLICIES["ar"], given, None, of=cuda_pair(), batch_size=1)
    assert decode(POLICIES[name], given, None, of=cuda_pair(), batch_size=4).texts == plain.texts


# --------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("name", POLICIES)
def test_cuda_greedy_text_is_the_cpus_with_graphs_and_without(name: str, batch_size: int) -> None:
    given = requests(8)
    plain = ordinary(POLICIES["ar"], given, batch_size=1)
    found, eager = (
        decode(POLICIES[name], given, graphs, of=cuda_pair(), batch_size=batch_size)
        for graphs in (GraphSettings(), None)
    )
    assert found.texts == eager.texts == plain.texts
    if (name, batch_size) != ("c2t joint", 8):  # its trees may outgrow a tier, which cuts them
        assert found.counts == eager.counts
    counters = found.loop.graph_counters
    assert counters.failed_captures == 0
    assert counters.replays > counters.captures > 0


@pytest.mark.parametrize(
    "policy",
    [
        Policy(shape=SHAPES["eagle2"], budget=SurvivalBudget(max_tokens=30)),
        Policy(shape=SHAPES["eagle2"], acceptance=Mars(form="margin", theta=1.0)),
        POLICIES["ar"],
    ],
    ids=["survival", "mars", "ar"],
)
def test_cuda_graphs_capture_every_part(policy: Policy) -> None:
    given = requests(6, DRAWN)
    found = decode(policy, given, GraphSettings(), of=cuda_pair())
    eager = decode(policy, given, None, of=cuda_pair())
    assert found.texts == eager.texts
    assert found.loop.graph_counters.failed_captures == 0


def warm_loop(policy: Policy, settings: GraphSettings) -> DecodeLoop:
    """A loop of two long requests, after two rounds in a row of which all was replayed."""
    given, quiet = requests(2, new_tokens=96), 0
    loop = make_loop(policy, given, settings, of=cuda_pair(), batch_size=2)
    for request in given:
        loop.submit(request)
    while quiet < 2:
        before = replace(loop.graph_counters)
        loop.step()
        after = loop.graph_counters
        same = (after.captures, after.eager_parts) == (before.captures, before.eager_parts)
        quiet = quiet + 1 if same else 0
    assert loop.busy, "the texts ended before all was captured"
    return loop


@pytest.mark.parametrize("stop_waits", ["always", "never"])
@pytest.mark.parametrize("name", NAMES)
def test_cuda_rounds_synchronise_where_planned_alone(name: str, stop_waits: str) -> None:
    """Warm rounds under torch's own detector; waiting for an event is no synchronisation to it,
    and the counter tells of those."""
    settings = GraphSettings(stop_waits=stop_waits)  # type: ignore[arg-type]
    loop = warm_loop(Policy(shape=SHAPES[name]), settings)
    before = replace(loop.graph_counters)
    with no_sync():
        loop.step()
    after = loop.graph_counters
    assert (after.captures, after.eager_parts) == (before.captures, before.eager_parts)
    waited = after.planned_waits - before.planned_waits
    assert waited == 1 if stop_waits == "never" else waited >= 1


def test_cuda_records_are_those_of_rounds_without_graphs() -> None:
    """Graphs of several tiers and kinds of sampling share their scratch memory."""
    given, policy = requests(8, DRAWN), Policy(shape=SHAPES["threshold"])
    seen, wanted = Kept(), Kept()
    for capture, kept in (("auto", seen), ("none", wanted)):
        settings = GraphSettings(capture=capture, flat_tokens=1)  # type: ignore[arg-type]
        decode(policy, given, settings, of=cuda_pair(), batch_size=4, observer=kept)
    assert_same_rounds(seen, wanted, at_least=6)


def test_cuda_records_again_after_a_capture_that_failed() -> None:
    """torch 2.11 captures nothing more in a process unless the failed one is ended by hand."""
    capture, value = CudaCapture(torch.device("cuda")), torch.zeros(1, device="cuda")
    with pytest.raises(RuntimeError):
        capture.record(value.item)
    recording = capture.record(lambda: value.add_(1))
    recording.replay()
    assert value.item() == 1


def test_cuda_out_of_memory_during_capture_falls_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that asks for more than there is, but only while it is captured; what it had
    taken until then is given back."""
    given, policy = requests(2), Policy(shape=SHAPES["eagle2"])
    held: list[torch.Tensor] = []

    def greedy(pool: DraftPool, *args: Any, **options: Any) -> BuiltTree:
        if torch.cuda.is_current_stream_capturing():
            device = pool.parent.device
            # Other processes test on this device, so not all that is free.
            held.append(torch.empty(1 << 30, dtype=torch.uint8, device=device))
            try:
                torch.empty(1 << 45, device=device)
            finally:
                held.clear()
        return link_tree(pool, *args, **options)

    monkeypatch.setattr("specctl.runtime.verifying.link_tree", greedy)
    reserved = torch.cuda.memory_reserved()
    found = decode(policy, given, GraphSettings(), of=cuda_pair())
    assert found.loop.graph_counters.failed_captures > 0
    assert found.loop.graph_counters.captures > 0  # of the other parts
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved + (1 << 29)  # the GiB was given back
    assert found.texts == decode(policy, given, None, of=cuda_pair()).texts
