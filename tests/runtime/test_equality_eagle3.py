"""Greedy text with the EAGLE-3 head, fp32, 200 prompts: every strategy emits plain decoding's.

Plain texts are decoded in batches of 8; `test_equality.py` holds that a batch changes none.
"""

from __future__ import annotations

import pytest

from specctl.runtime.load import Pair, load_pair
from specctl.runtime.observe import Request
from tests.runtime.equality import PLAIN, POLICIES, Texts, requests_of, texts_of


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("embedded", "embedded", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    return requests_of(pair)


@pytest.fixture(scope="module")
def plain(pair: Pair, requests: list[Request]) -> Texts:
    return texts_of(pair, PLAIN, requests, batch_size=8)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_eagle3_head_emits_plain_text(
    name: str, batch_size: int, pair: Pair, requests: list[Request], plain: Texts
) -> None:
    assert texts_of(pair, POLICIES[name], requests, batch_size) == plain
