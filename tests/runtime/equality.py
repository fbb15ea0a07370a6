"""Texts of many prompts under a policy and a batch: what is held to plain decoding.

`make nightly` takes 200 prompts, by SPECCTL_TEST_PROMPTS; other runs 12, of all categories alike.

A case decodes requests that join late, at random moments, wherever its batch is larger than one;
unequal trees are packed, and the cases that are here for packing say so and are held to it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest

from specctl.collect.prompts import Prompt, load_prompts
from specctl.policy import (
    Chain,
    ElasticBudget,
    EntropyBins,
    Policy,
    RootOnly,
    SparseGates,
    StaticTree,
    SurvivalBudget,
)
from specctl.runtime.api import Decoder
from specctl.runtime.attention import Pass
from specctl.runtime.cached_model import CachedModel, ForwardResult
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request, request_seed
from specctl.runtime.load import Pair
from specctl.runtime.requests import Completion, Request, Sampling, pooled
from tests.policy.scorers import SCORED

NUM_PROMPTS, NEW_TOKENS = int(os.environ.get("SPECCTL_TEST_PROMPTS", "12")), 24
Texts = dict[str, tuple[int, ...]]
BASE = StaticTree(depth=5, top_k=6, num_tokens=24)
PLAIN = Policy(shape=RootOnly())
CHAIN, TREE = Policy(shape=Chain(num_draft_tokens=4)), Policy(shape=BASE)
# Edges inside the range of Φ at depth 5, so that several bins occur.
HETERO = Policy(shape=EntropyBins(base=BASE, edges=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)))
GATES = SparseGates(depth=5, gate_levels=(1, 2), thresholds=(0.5, 0.3), num_tokens=24)


@dataclass(frozen=True)
class Case:
    """A policy at a batch size; `packs`: most of its passes must have been packed."""

    policy: Policy
    batch_size: int
    packs: bool = False


CASES = {
    "chain, 1": Case(CHAIN, 1),
    "eagle2, 1": Case(TREE, 1),
    "hetero, 1": Case(HETERO, 1),
    "chain, 4": Case(CHAIN, 4),
    "hetero, 4": Case(HETERO, 4),
    "c2t, 4": Case(Policy(shape=SCORED["c2t joint"]), 4),
    "eagle2+survival, 4": Case(
        Policy(shape=BASE, budget=SurvivalBudget(max_tokens=24)), 4, packs=True
    ),
    "hetero, 16": Case(HETERO, 16),
    "c2t, 16": Case(Policy(shape=SCORED["c2t conditional"]), 16),
    "eagle2+survival, 16": Case(
        Policy(shape=BASE, budget=SurvivalBudget(max_tokens=80)), 16, packs=True
    ),
    "echo+echo_budget, 16": Case(
        Policy(shape=GATES, budget=ElasticBudget(max_tokens=96)), 16, packs=True
    ),
}


def spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    """As many of them as are wanted, evenly: the set is sorted by category."""
    assert len(prompts) >= NUM_PROMPTS
    return [prompts[place * len(prompts) // NUM_PROMPTS] for place in range(NUM_PROMPTS)]


def requests_of(pair: Pair) -> list[Request]:
    prompts = spread(load_prompts("embedded"))
    settings, tokenizer = DecodeSettings(NEW_TOKENS), pair.target.tokenizer
    return [next_request(tokenizer, Conversation(prompt), settings) for prompt in prompts]


def sampled(requests: Sequence[Request]) -> list[Request]:
    """The same requests, each drawing from its own seed."""
    return [
        replace(r, sampling=Sampling(0.7, top_p=0.95, seed=request_seed(3, r.request_id)))
        for r in requests
    ]


def texts_of(pair: Pair, policy: Policy, requests: Sequence[Request], batch_size: int) -> Texts:
    """Texts of requests that are all there from the start."""
    decoder = Decoder(pair, policy, batch_size=batch_size)
    return {c.request.request_id: c.token_ids for c in decoder.loop(requests).run(requests)}


def texts_of_case(
    pair: Pair, case: Case, requests: Sequence[Request], monkeypatch: pytest.MonkeyPatch
) -> Texts:
    """Texts of requests that join late; checks that speculation and packing took place."""
    uneven: list[bool] = []
    forward = CachedModel.forward

    def watched(self: CachedModel, reads: Pass) -> ForwardResult:
        if self is pair.target.model:
            uneven.append(not reads.is_even)
        return forward(self, reads)

    monkeypatch.setattr(CachedModel, "forward", watched)
    done = join_late(pair, case, requests)
    metrics = pooled(completion.metrics for completion in done)
    assert metrics.num_accepted > 0, "nothing was ever accepted: equality would prove nothing"
    if case.packs:
        assert sum(uneven) > len(uneven) / 2, "hardly a verification was uneven"
    return {completion.request.request_id: completion.token_ids for completion in done}


def join_late(pair: Pair, case: Case, requests: Sequence[Request]) -> list[Completion]:
    """Requests are submitted between rounds, none to three at a time, in a shuffled order."""
    loop = Decoder(pair, case.policy, batch_size=case.batch_size).loop(requests)
    random, done = Random(case.batch_size), []
    waiting = random.sample(requests, len(requests))
    while waiting or loop.busy:
        for _ in range(random.randrange(4) if case.batch_size > 1 else len(waiting)):
            if waiting:
                loop.submit(waiting.pop())
        done += loop.step()
    return done
