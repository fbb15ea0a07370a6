"""Greedy text with the EAGLE-3 head, fp32, many prompts: every strategy emits plain decoding's.

Plain texts are those of batches of 8; `test_equality.py` holds that a batch changes none.
"""

from __future__ import annotations

import pytest

from specctl.runtime.load import Pair
from specctl.runtime.requests import Request
from tests.runtime.equality import (
    CASES,
    PLAIN,
    Texts,
    plain_texts,
    requests_of,
    sampled,
    texts_of,
    texts_of_case,
)


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    return requests_of(pair)


@pytest.fixture(scope="module")
def plain(pair: Pair, requests: list[Request], tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return plain_texts(pair, requests, tmp_path_factory)


@pytest.mark.parametrize("name", [name for name in CASES if name != "chain, 1"])
def test_eagle3_head_emits_plain_text(
    name: str,
    pair: Pair,
    requests: list[Request],
    plain: Texts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert texts_of_case(pair, CASES[name], requests, monkeypatch) == plain


@pytest.mark.parametrize("name", ["eagle2+survival, 16"])
def test_seeded_text_does_not_depend_on_the_batch(
    name: str, pair: Pair, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled, 60 prompts: alone and plainly, or in a packed batch that requests join late.

    A text of 24 tokens turns by rounding once in some 10^5 (docs/LOG.md).
    """
    drawn = sampled(requests[::3][:60])
    alone = texts_of(pair, PLAIN, drawn, batch_size=1)
    assert texts_of_case(pair, CASES[name], drawn, monkeypatch) == alone
