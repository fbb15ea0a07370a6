"""The Python API has the names of other libraries, and its values can be printed."""

from __future__ import annotations

import pytest

from specctl import Decoder
from specctl.errors import UsageError
from specctl.policy import Policy
from tests.artifacts.examples import POLICIES


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder.from_pretrained("embedded", "embedded", policy="chain", device="cpu")


def test_lengths_have_the_names_of_transformers_and_of_vllm(decoder: Decoder) -> None:
    [ours] = decoder.generate("def add(", max_new_tokens=6)
    [theirs] = decoder.generate("def add(", max_tokens=6, top_k=-1)
    assert ours.token_ids == theirs.token_ids
    assert "".join(decoder.stream("def add(", max_tokens=6)) == ours.text
    decoder.generate("def add(", max_tokens=6, max_new_tokens=6)
    with pytest.raises(UsageError, match=r"\(6\) and max_tokens \(7\) mean the same"):
        decoder.generate("def add(", max_new_tokens=6, max_tokens=7)


def test_values_can_be_read(decoder: Decoder) -> None:
    pair = "Pair('embedded', 'embedded', float32 on cpu)"
    assert repr(decoder) == f"Decoder({pair}, policy='chain', batch_size=1)"
    [answer] = decoder.generate("def add(", max_new_tokens=2)
    assert repr(answer).startswith(f"Generation({answer.text!r}, 'length', Metrics(2 tokens, ")


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_policy_shows_no_weights(policy: Policy) -> None:
    assert len(repr(policy)) < 700
    assert repr(policy).startswith("Policy(shape=")
