"""Plain greedy decoding, many prompts, fp32, against what shares none of our code.

An uncached causal forward over the whole text, and transformers' own `generate`: a bug that both
sides of a comparison share hides from it. Speculative texts are held against this one in
`test_equality_eagle3.py` and `test_equality_small.py`.
"""

from __future__ import annotations

import pytest
import torch

from specctl.runtime.load import Pair
from specctl.runtime.requests import Request
from tests.runtime.equality import NEW_TOKENS, PLAIN, Texts, plain_texts, requests_of, texts_of


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    return requests_of(pair)


@pytest.fixture(scope="module")
def plain(pair: Pair, requests: list[Request]) -> Texts:
    return texts_of(pair, PLAIN, requests, batch_size=1)


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
    assert texts_of(pair, PLAIN, requests, batch_size=4) == plain


def test_plain_texts_of_the_other_modules_are_these(
    pair: Pair, requests: list[Request], plain: Texts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """They were decoded in batches of 8."""
    assert plain_texts(pair, requests, tmp_path_factory) == plain
