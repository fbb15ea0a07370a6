"""Greedy text of many prompts, fp32: plain decoding's equals that of what shares none of our code,
and every strategy's, with either drafter, equals plain decoding's.

An uncached causal forward over the whole text, and transformers' own `generate`: a bug that both
sides of a comparison share hides from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

from specctl.runtime.attention import ATTENTION
from specctl.runtime.load import Pair
from specctl.runtime.requests import Request
from tests.runtime.captured import small_pair
from tests.runtime.equality import (
    CASES,
    NEW_TOKENS,
    PLAIN,
    Texts,
    requests_of,
    sampled,
    texts_of,
    texts_of_case,
)

WITH_SMALL = ("chain, 1", "hetero, 4", "eagle2+survival, 16", "echo+echo_budget, 16")


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    return requests_of(pair)


@pytest.fixture(scope="module")
def plain(pair: Pair, requests: list[Request]) -> Texts:
    return texts_of(pair, PLAIN, requests, batch_size=1)


@contextmanager
def own_attention(pair: Pair) -> Iterator[PreTrainedModel]:
    """The target as transformers would run it."""
    model = pair.target.model.model
    model.set_attn_implementation("sdpa")
    try:
        yield model
    finally:
        model.set_attn_implementation(ATTENTION)


@torch.inference_mode()
def test_plain_decoding_equals_an_uncached_forward(
    pair: Pair, requests: list[Request], plain: Texts
) -> None:
    with own_attention(pair) as model:
        for request in requests:
            text = plain[request.request_id]
            ids = torch.tensor([[*request.prompt_ids, *text]])
            logits = model(input_ids=ids, use_cache=False).logits[0]
            wanted = logits[len(request.prompt_ids) - 1 : -1].argmax(-1).tolist()
            assert list(text) == wanted, request.request_id


def test_plain_decoding_equals_transformers_generate(
    pair: Pair, requests: list[Request], plain: Texts
) -> None:
    with own_attention(pair) as model:
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


@pytest.mark.parametrize("batch_size", [4, 8])
def test_plain_decoding_does_not_depend_on_the_batch(
    batch_size: int, pair: Pair, requests: list[Request], plain: Texts
) -> None:
    assert texts_of(pair, PLAIN, requests, batch_size) == plain


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
    assert texts_of_case(used, CASES[name], requests, monkeypatch) == plain


def test_seeded_text_does_not_depend_on_the_batch(
    pair: Pair, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled: alone and plainly, or in a packed batch that they join late.

    A text of 24 tokens turns by rounding once in some 10^5 (docs/LOG.md).
    """
    drawn = sampled(requests)
    alone = texts_of(pair, PLAIN, drawn, batch_size=1)
    assert texts_of_case(pair, CASES["eagle2+survival, 16"], drawn, monkeypatch) == alone
