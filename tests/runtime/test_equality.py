"""Greedy text of many prompts, fp32: plain decoding's equals that of what shares none of our code,
and every strategy's, with either drafter, equals plain decoding's.

The reference is an uncached causal forward over the whole text (transformers' `generate`:
test_models.py): a bug that both sides of a comparison share hides from it. A case decodes requests
that join late, at random moments, wherever its batch is larger than one; unequal trees are packed,
and the cases that are here for packing say so and are held to it.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from specctl.policy import (
    Chain,
    ElasticBudget,
    EntropyBins,
    Policy,
    RootOnly,
    SparseGates,
    SurvivalBudget,
)
from specctl.runtime.attention import ATTENTION, Pass
from specctl.runtime.cached_model import CachedModel, ForwardResult
from specctl.runtime.conversations import request_seed
from specctl.runtime.load import Pair
from specctl.runtime.requests import Request, Sampling, pooled
from tests.policy.scorers import SCORED
from tests.runtime.captured import BASE, decode, make_loop, small_pair, spread_requests
from tests.runtime.toy import Texts, join_at_random, texts_of

PLAIN = Policy(shape=RootOnly())
CHAIN, TREE = Policy(shape=Chain(num_draft_tokens=4)), Policy(shape=BASE)
# Edges inside the range of Φ at depth 5, so that several bins occur.
HETERO = Policy(shape=EntropyBins(base=BASE, edges=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)))
SURVIVAL = Policy(shape=BASE, budget=SurvivalBudget(max_tokens=80))
GATES = SparseGates(depth=5, gate_levels=(1, 2), thresholds=(0.5, 0.3), num_tokens=24)


CASES: dict[str, tuple[Policy, int]] = {
    "chain, 1": (CHAIN, 1),
    "eagle2, 1": (TREE, 1),
    "hetero, 4": (HETERO, 4),
    "c2t, 16": (Policy(shape=SCORED["c2t conditional"]), 16),
    "eagle2+survival, 16": (SURVIVAL, 16),
    "echo+echo_budget, 16": (Policy(shape=GATES, budget=ElasticBudget(max_tokens=96)), 16),
}
"""A policy and a batch size; with a shared budget most passes must have been packed."""
WITH_SMALL = ("chain, 1", "eagle2+survival, 16")


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return spread_requests()


@pytest.fixture(scope="module")
def plain(requests: list[Request]) -> Texts:
    return decode(PLAIN, requests, None, batch_size=1).texts


def texts_of_case(
    used: Pair, name: str, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> Texts:
    """Texts of requests that join late; checks that speculation and packing took place."""
    (policy, batch_size), uneven, forward = CASES[name], list[bool](), CachedModel.forward

    def watched(self: CachedModel, reads: Pass) -> ForwardResult:
        if self is used.target.model:
            uneven.append(not reads.is_even)
        return forward(self, reads)

    monkeypatch.setattr(CachedModel, "forward", watched)
    loop = make_loop(policy, requests, None, batch_size=batch_size, of=used)
    done = join_at_random(loop, requests, Random(batch_size), joining=(0, 1, 2, 3))
    accepted = pooled(completion.metrics for completion in done).num_accepted
    assert accepted > 0, "nothing was ever accepted: equality would prove nothing"
    if policy.budget.kind != "per_request":
        assert sum(uneven) > len(uneven) / 2, "hardly a verification was uneven"
    return texts_of(done)


@torch.inference_mode()
def test_plain_decoding_equals_an_uncached_forward(
    pair: Pair, requests: list[Request], plain: Texts
) -> None:
    model = pair.target.model.model
    model.set_attn_implementation("sdpa")  # as transformers would run it
    try:
        for request in requests:
            text = plain[request.request_id]
            ids = torch.tensor([[*request.prompt_ids, *text]])
            logits = model(input_ids=ids, use_cache=False).logits[0]
            wanted = logits[len(request.prompt_ids) - 1 : -1].argmax(-1).tolist()
            assert list(text) == wanted, request.request_id
    finally:
        model.set_attn_implementation(ATTENTION)


@pytest.mark.parametrize("batch_size", [4, 8])
def test_plain_decoding_does_not_depend_on_the_batch(
    batch_size: int, requests: list[Request], plain: Texts
) -> None:
    assert decode(PLAIN, requests, None, batch_size=batch_size).texts == plain


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        *(("eagle3", name) for name in CASES if name != "chain, 1"),
        *(("small", name) for name in WITH_SMALL),
    ],
)
def test_every_strategy_emits_plain_text(
    drafter: str,
    name: str,
    pair: Pair,
    requests: list[Request],
    plain: Texts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = pair if drafter == "eagle3" else small_pair()
    assert texts_of_case(used, name, requests, monkeypatch) == plain


def test_seeded_text_does_not_depend_on_the_batch(
    pair: Pair, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled: alone and plainly, or in a packed batch that they join late.

    A text of 24 tokens turns by rounding once in some 10^5 (docs/LOG.md).
    """
    drawn = [
        replace(r, sampling=Sampling(0.7, top_p=0.95, seed=request_seed(3, r.request_id)))
        for r in requests
    ]
    alone = decode(PLAIN, drawn, None, batch_size=1).texts
    assert texts_of_case(pair, "eagle2+survival, 16", drawn, monkeypatch) == alone
