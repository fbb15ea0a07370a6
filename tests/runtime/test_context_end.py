"""Text up to the very last position of the model, with both drafters."""

from __future__ import annotations

import pytest

from specctl.policy import Policy, RootOnly, StaticTree
from specctl.runtime.api import Decoder
from specctl.runtime.load import load_pair
from specctl.runtime.requests import Request


@pytest.mark.parametrize("drafter", ["embedded:eagle3", "embedded:small"])
def test_text_may_fill_the_context(drafter: str) -> None:
    pair = load_pair("embedded", drafter, device="cpu")
    context = pair.target.model.context_tokens
    request = Request("long", tuple(5 + i % 200 for i in range(context - 12)), 100)
    texts = []
    for shape in (RootOnly(), StaticTree(depth=6, top_k=2, num_tokens=12)):
        [done] = Decoder(pair, Policy(shape=shape)).loop([request]).run([request])
        assert done.finish_reason in ("context", "eos")
        assert len(done.token_ids) <= 12
        texts.append(done.token_ids)
    assert texts[0] == texts[1]
