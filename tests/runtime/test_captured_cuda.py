"""Captured rounds on a CUDA device; skipped, and counted as skipped, without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch

from specctl.policy import JointThreshold, Mars, Policy, RootOnly, SurvivalBudget
from specctl.runtime.capture import GraphSettings
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Sampling
from tests.kernels.rounds import SHAPES
from tests.runtime.captured import decode, make_loop, requests, run
from tests.runtime.toy_loops import Kept

pytestmark = pytest.mark.cuda
DRAWN = (Sampling(), Sampling(0.8), Sampling(1.0, top_k=20), Sampling(1.1, top_p=0.8))
NAMES = ("eagle2", "hetero", "echo", "threshold", "c2t joint")


@cache
def cuda_pair() -> Pair:
    return load_pair("embedded", "embedded", device="cuda", dtype="float32")


@contextmanager
def no_unplanned_synchronisation() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_cuda_graphs_give_the_cpus_greedy_text(name: str, batch_size: int) -> None:
    given = requests(8)
    plain = decode(Policy(shape=RootOnly()), given, None, batch_size=1)
    policy = Policy(shape=SHAPES[name])
    found = decode(policy, given, GraphSettings(), of=cuda_pair(), batch_size=batch_size)
    eager = decode(policy, given, None, of=cuda_pair(), batch_size=batch_size)
    assert found.texts == plain.texts
    assert found.counts == eager.counts
    counters = found.loop.graph_counters
    assert counters.failed_captures == 0
    assert counters.replays > counters.captures > 0


@pytest.mark.parametrize(
    "policy",
    [
        Policy(shape=SHAPES["eagle2"], budget=SurvivalBudget(max_tokens=30)),
        Policy(shape=SHAPES["eagle2"], acceptance=Mars(form="margin", theta=1.0)),
        Policy(shape=RootOnly()),
    ],
    ids=["survival", "mars", "ar"],
)
def test_cuda_graphs_capture_every_part(policy: Policy) -> None:
    given = requests(6, DRAWN)
    found = decode(policy, given, GraphSettings(), of=cuda_pair())
    eager = decode(policy, given, None, of=cuda_pair())
    assert found.texts == eager.texts
    assert found.loop.graph_counters.failed_captures == 0


@pytest.mark.parametrize("stop_waits", ["always", "never"])
@pytest.mark.parametrize("name", NAMES)
def test_cuda_rounds_synchronise_where_planned_alone(name: str, stop_waits: str) -> None:
    """Warm rounds under torch's own detector; waiting for an event is no synchronisation to it,
    and the counter tells of those."""
    given = requests(2, new_tokens=96)
    settings = GraphSettings(stop_waits=stop_waits)  # type: ignore[arg-type]
    loop = make_loop(Policy(shape=SHAPES[name]), given, settings, of=cuda_pair(), batch_size=2)
    for request in given:
        loop.submit(request)
    warm_up(loop)
    before = replace(loop.graph_counters)
    with no_unplanned_synchronisation():
        loop.step()
    after = loop.graph_counters
    assert (after.captures, after.eager_parts) == (before.captures, before.eager_parts)
    waited = after.planned_waits - before.planned_waits
    assert waited == 1 if stop_waits == "never" else waited >= 1


def test_cuda_observed_rounds_do_not_synchronise() -> None:
    given, kept = requests(2, new_tokens=96), Kept()
    policy = Policy(shape=SHAPES["echo"])
    loop = make_loop(policy, given, GraphSettings(), of=cuda_pair(), batch_size=2, observer=kept)
    for request in given:
        loop.submit(request)
    warm_up(loop)
    with no_unplanned_synchronisation():
        loop.step()
    assert len(kept.records) >= 5


def test_cuda_records_are_those_of_rounds_without_graphs() -> None:
    """Graphs of several tiers and kinds of sampling share their scratch memory."""
    given, policy = requests(8, DRAWN), Policy(shape=SHAPES["threshold"])
    seen, wanted = Kept(), Kept()
    for capture, kept in (("auto", seen), ("none", wanted)):
        settings = GraphSettings(capture=capture, flat_tokens=1)  # type: ignore[arg-type]
        decode(policy, given, settings, of=cuda_pair(), batch_size=4, observer=kept)
    assert len(seen.records) == len(wanted.records) > 5
    for found, plain in zip(seen.records, wanted.records, strict=True):
        assert torch.equal(found.submitted, plain.submitted)
        for name in ("target_ids", "path"):
            assert torch.equal(getattr(found, name), getattr(plain, name)), name
        assert torch.equal(found.tree.token_ids, plain.tree.token_ids)
        verified = plain.submitted >= 0
        torch.testing.assert_close(found.target_logits[verified], plain.target_logits[verified])


def warm_up(loop: DecodeLoop) -> None:
    """Rounds until two in a row were all replayed."""
    quiet = 0
    while quiet < 2:
        before = replace(loop.graph_counters)
        loop.step()
        after = loop.graph_counters
        same = (after.captures, after.eager_parts) == (before.captures, before.eager_parts)
        quiet = quiet + 1 if same else 0
    assert loop.busy, "the texts ended before all was captured"


def test_cuda_memory_limit_keeps_rounds_eager() -> None:
    given, policy = requests(3), Policy(shape=SHAPES["eagle2"])
    found = decode(policy, given, GraphSettings(limit_bytes=0), of=cuda_pair())
    assert found.loop.graph_counters.captures == 0
    assert found.loop.graph_counters.failed_captures > 0
    assert found.texts == decode(policy, given, None, of=cuda_pair()).texts


def test_cuda_out_of_memory_during_capture_falls_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that asks for more than there is, but only while it is captured; what it had
    taken until then is given back."""
    given, policy = requests(2), Policy(shape=SHAPES["eagle2"])
    law, held = "specctl.runtime.verifying.link_tree", []

    def greedy(logits: torch.Tensor, *_: object) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            free, _ = torch.cuda.mem_get_info()
            held.append(torch.empty(int(0.9 * free), dtype=torch.uint8, device=logits.device))
            try:
                torch.empty(1 << 45, device=logits.device)
            finally:
                held.clear()
        return logits

    monkeypatch.setattr(law, greedy)
    found = decode(policy, given, GraphSettings(), of=cuda_pair())
    assert found.loop.graph_counters.failed_captures > 0
    assert found.loop.graph_counters.captures > 0  # of the other parts
    free, total = torch.cuda.mem_get_info()
    assert free > total // 2
    assert found.texts == decode(policy, given, None, of=cuda_pair()).texts


def test_cuda_reload_writes_the_buffer_under_live_graphs() -> None:
    given = requests(6)
    old, new = (JointThreshold(depth=4, top_k=5, min_prob=p, num_tokens=24) for p in (0.1, 0.4))
    loop = make_loop(Policy(shape=old), given, GraphSettings(), of=cuda_pair())
    run(loop, given[:3])
    graphs = loop.round
    loop.reload(Policy(shape=new))
    assert loop.round is graphs
    found = run(loop, given[3:])
    fresh = decode(Policy(shape=new), given[3:], GraphSettings(), of=cuda_pair())
    assert (found.texts, found.counts) == (fresh.texts, fresh.counts)
