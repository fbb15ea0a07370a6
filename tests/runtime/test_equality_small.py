"""Greedy text with the small drafter, fp32, many prompts: every strategy emits plain decoding's.

Plain texts are those of batches of 8; `test_equality.py` holds that a batch changes none.
"""

from __future__ import annotations

import pytest

from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Request
from tests.runtime.equality import CASES, Texts, plain_texts, requests_of, texts_of_case


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("embedded", "embedded:small", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    return requests_of(pair)


@pytest.fixture(scope="module")
def plain(pair: Pair, requests: list[Request], tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return plain_texts(pair, requests, tmp_path_factory)


@pytest.mark.parametrize(
    "name", ["chain, 1", "hetero, 4", "eagle2+survival, 16", "echo+echo_budget, 16"]
)
def test_small_model_emits_plain_text(
    name: str,
    pair: Pair,
    requests: list[Request],
    plain: Texts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert texts_of_case(pair, CASES[name], requests, monkeypatch) == plain
