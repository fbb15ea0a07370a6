"""Greedy text on the embedded pair, fp32, 200 prompts: every strategy emits plain decoding's.

Plain decoding itself is held against two things that share none of our cache code, because a
bug that both sides share hides from the first comparison: an uncached causal forward over the
whole text, and transformers' own `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from specctl.collect.prompts import load_prompts
from specctl.policy import Chain, EntropyBins, Policy, RootOnly, StaticTree
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.metrics import pooled
from specctl.runtime.observe import Request

NUM_PROMPTS, NEW_TOKENS = 200, 24
Texts = dict[str, tuple[int, ...]]
BASE = StaticTree(depth=5, top_k=6, num_tokens=24)
POLICIES = {
    "chain": Policy(shape=Chain(num_draft_tokens=4)),
    "eagle2": Policy(shape=BASE),
    # Edges inside the range of Φ at depth 5, so that several bins occur.
    "hetero": Policy(shape=EntropyBins(base=BASE, edges=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0))),
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("embedded", "embedded", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def small_pair() -> Pair:
    return load_pair("embedded", "embedded:small", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    prompts = load_prompts("embedded", limit=NUM_PROMPTS)
    assert len(prompts) == NUM_PROMPTS
    settings, tokenizer = DecodeSettings(NEW_TOKENS), pair.target.tokenizer
    return [next_request(tokenizer, Conversation(prompt), settings) for prompt in prompts]


def texts_of(pair: Pair, policy: Policy, requests: Sequence[Request], batch_size: int) -> Texts:
    decoder = Decoder(pair, policy, batch_size=batch_size)
    done = list(decoder.loop(requests).run(requests))
    metrics = pooled(completion.metrics for completion in done)
    if policy.shape.kind != "ar":
        assert metrics.num_accepted > 0, "nothing was ever accepted: equality would prove nothing"
    return {completion.request.request_id: completion.token_ids for completion in done}


@pytest.fixture(scope="module")
def plain(pair: Pair, requests: list[Request]) -> Texts:
    return texts_of(pair, Policy(shape=RootOnly()), requests, batch_size=1)


def test_plain_decoding_equals_an_uncached_forward(
    pair: Pair, requests: list[Request], plain: Texts
) -> None:
    model = pair.target.model.model
    model.set_attn_implementation("sdpa")
    try:
        for request in requests:
            text = plain[request.request_id]
            ids = torch.tensor([[*request.prompt_ids, *text]])
            with torch.inference_mode():
                logits = model(input_ids=ids, use_cache=False).logits[0]
            wanted = logits[len(request.prompt_ids) - 1 : -1].argmax(-1).tolist()
            assert list(text) == wanted, request.request_id
    finally:
        model.set_attn_implementation("specctl_tree")


def test_plain_decoding_equals_transformers_generate(
    pair: Pair, requests: list[Request], plain: Texts
) -> None:
    model = pair.target.model.model
    model.set_attn_implementation("sdpa")
    try:
        for request in requests:
            ids = torch.tensor([request.prompt_ids])
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=list(pair.target.eos_ids),
                pad_token_id=pair.target.eos_ids[0],
            )
            assert output[0, ids.shape[1] :].tolist() == list(plain[request.request_id])
    finally:
        model.set_attn_implementation("specctl_tree")


def test_plain_decoding_does_not_depend_on_the_batch(
    pair: Pair, requests: list[Request], plain: Texts
) -> None:
    assert texts_of(pair, Policy(shape=RootOnly()), requests, batch_size=4) == plain


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_eagle3_head_emits_plain_text(
    name: str, batch_size: int, pair: Pair, requests: list[Request], plain: Texts
) -> None:
    assert texts_of(pair, POLICIES[name], requests, batch_size) == plain


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_small_model_emits_plain_text(
    name: str, batch_size: int, small_pair: Pair, requests: list[Request], plain: Texts
) -> None:
    assert texts_of(small_pair, POLICIES[name], requests, batch_size) == plain
