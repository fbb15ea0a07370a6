"""The ordinary loop on a CUDA device; skipped, and counted as skipped, without one.

That with graphs: `tests/runtime/test_captured_cuda.py`.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from specctl.collect.prompts import load_prompts
from specctl.noise import gumbels, noise_keys, uniforms
from specctl.policy import (
    Chain,
    ElasticBudget,
    EntropyBins,
    Policy,
    RootOnly,
    ScoredTree,
    SparseGates,
    StaticTree,
)
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Request, Sampling
from tests.policy.scorers import random_network

BASE = StaticTree(depth=5, top_k=6, num_tokens=24)
GATES = SparseGates(
    depth=5, width=3, max_width=6, gate_levels=(1, 3), thresholds=(0.5, 0.2), num_tokens=22
)
POLICIES = {
    "ar": Policy(shape=RootOnly()),
    "chain": Policy(shape=Chain(num_draft_tokens=4)),
    "eagle2": Policy(shape=BASE),
    "hetero": Policy(shape=EntropyBins(base=BASE, edges=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0))),
    "c2t": Policy(shape=ScoredTree(scorer=random_network(3), beta=0.3, depth=4, num_tokens=24)),
    "echo": Policy(shape=GATES),
    "echo, budget": Policy(shape=GATES, budget=ElasticBudget(max_tokens=20)),
}


@cache
def loaded(device: str) -> Pair:
    return load_pair("embedded", "embedded", device=device, dtype="float32")


def texts(
    device: str, policy: Policy, sampling: Sampling, batch_size: int
) -> dict[str, tuple[int, ...]]:
    pair = loaded(device)
    settings = DecodeSettings(24, sampling)
    requests: list[Request] = [
        next_request(pair.target.tokenizer, Conversation(prompt), settings)
        for prompt in load_prompts("embedded", limit=16)
    ]
    loop = DecodeLoop(
        pair.target.model,
        pair.drafter,
        policy,
        batch_size=batch_size,
        max_text_tokens=max(len(r.prompt_ids) + r.max_new_tokens for r in requests),
        eos_ids=pair.target.eos_ids,
        graphs=None,
    )
    return {done.request.request_id: done.token_ids for done in loop.run(requests)}


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[int, ...]]:
    """Greedy texts of plain decoding on the CPU."""
    return texts("cpu", POLICIES["ar"], Sampling(), 1)


@pytest.mark.cuda
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_cuda_greedy_text_equals_the_cpu(
    name: str, batch_size: int, plain: dict[str, tuple[int, ...]]
) -> None:
    assert texts("cuda", POLICIES[name], Sampling(), batch_size) == plain


@pytest.mark.cuda
def test_cuda_noise_has_the_bits_of_the_cpu() -> None:
    """And Gumbel numbers that differ by a few units in their last place at most."""
    seeds, positions = torch.arange(64)[:, None] - 32, torch.arange(16)
    cpu = noise_keys(seeds, positions)
    cuda = noise_keys(seeds.cuda(), positions.cuda())
    assert torch.equal(cuda.cpu(), cpu)
    assert torch.equal(uniforms(cuda, 500).cpu(), uniforms(cpu, 500))
    torch.testing.assert_close(gumbels(cuda, 500).cpu(), gumbels(cpu, 500), rtol=1e-13, atol=1e-13)


@pytest.mark.cuda
def test_cuda_seeded_text_depends_on_neither_policy_nor_batch() -> None:
    sampling = Sampling(0.8, top_p=0.95, seed=5)
    plain = texts("cuda", POLICIES["ar"], sampling, 1)
    for name in ("chain", "eagle2", "hetero"):
        assert texts("cuda", POLICIES[name], sampling, 4) == plain
