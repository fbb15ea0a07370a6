"""Comparing policies: equality with plain decoding, divergences explained by their logit gap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specctl.cli.running import equality_line, fastest_lines
from specctl.collect.prompts import load_prompts
from specctl.runtime.attention import ATTENTION
from specctl.runtime.compare import (
    RunResult,
    checked_against_plain,
    compare_policies,
    top2_gap,
)
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.policy_spec import resolve_policies
from specctl.runtime.requests import Sampling

SPECS = "ar,chain,eagle2:depth=4:top_k=4:num_tokens=12"


def compared(pair: Pair, settings: DecodeSettings, specs: str = SPECS) -> list[RunResult]:
    prompts = load_prompts("embedded")[::48]
    return compare_policies(pair, resolve_policies(specs), prompts, settings).results


def test_without_plain_decoding_equality_is_unknown(pair: Pair) -> None:
    [only] = compared(pair, DecodeSettings(4), "chain")
    assert only.summary()["equal_to_ar"] is None


def test_sampled_texts_are_equal_where_rounding_is_negligible() -> None:
    """float64: borders move by 1e-15, and no difference is allowed."""
    pair = load_pair("embedded", "embedded", device="cpu")
    pair.target.model.model.double()
    pair.drafter.head.double()
    results = compared(pair, DecodeSettings(16, Sampling(0.7, top_p=0.9, seed=11)))
    assert [result.summary()["equal_to_ar"] for result in results] == [True, True, True]
    assert results[1].metrics.num_accepted > 0


def test_bfloat16_divergences_are_ties() -> None:
    pair = load_pair("embedded", "embedded", device="cpu", dtype="bfloat16")
    results = compared(pair, DecodeSettings(24))
    tolerance = rounding_of(pair)
    for result in results:
        for divergence in result.divergences or []:
            assert divergence.top2_gap <= tolerance


def rounding_of(pair: Pair) -> float:
    """How far one row's logits move when they are computed among other rows, as verification
    does: the largest difference seen over a text, read at once and token by token."""
    [prompt] = load_prompts("embedded", limit=1)
    tokenizer, model = pair.target.tokenizer, pair.target.model
    ids = next_request(tokenizer, Conversation(prompt), DecodeSettings(1)).prompt_ids
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        model.allocate(1, len(ids))
        together = model.extend(0, 0, tokens, last_only=False).logits
        alone = [model.extend(0, i, tokens[:, i : i + 1]).logits[-1] for i in range(len(ids))]
    # Two best logits may each move by the largest difference, towards each other.
    return 2 * float((together - torch.stack(alone)).abs().max())


def test_the_gap_is_the_targets_own(pair: Pair) -> None:
    text = [0, 50, 60, 70]
    model = pair.target.model.model
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
    finally:
        model.set_attn_implementation(ATTENTION)
    best = logits.topk(2).values
    assert top2_gap(pair, text) == pytest.approx(float(best[0] - best[1]), abs=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)])
def test_sampled_divergences_claim_no_tie(
    sampling: Sampling, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run of another policy emits other tokens in one place, on any machine."""
    settings = DecodeSettings(8, sampling)
    prompts = load_prompts("embedded", limit=2)
    policies = resolve_policies("ar,eagle2")
    plain, other = compare_policies(pair, policies, prompts, settings).results
    done = other.conversations[1].completions[0]
    ids = (*done.token_ids[:3], done.token_ids[3] + 1, *done.token_ids[4:])
    other.conversations[1].completions[0] = replace(done, token_ids=ids)
    [_, found] = checked_against_plain([plain, other], pair)
    [divergence] = found.divergences or []
    assert divergence.position == 3
    assert (divergence.top2_gap is None) == (not sampling.greedy)


@pytest.mark.parametrize(
    ("gaps", "is_lossless", "words"),
    [
        ([0.25, 0.5], True, "gap at most 0.5"),
        ([None], True, "rounding of --dtype"),
        ([0.25, 0.5], False, "lossy"),
        ([None], False, "lossy"),
    ],
)
def test_the_line_under_the_table_explains_differences(
    gaps: list, words: str, *, is_lossless: bool
) -> None:
    divergences = [{"request_id": "r", "position": 3, "top2_gap": gap} for gap in gaps]
    rows = [
        {"policy": "ar", "equal_to_ar": True, "divergences": []},
        {"policy": "chain", "equal_to_ar": False, "divergences": divergences},
    ]
    rows = [{"is_lossless": is_lossless, **row} for row in rows]
    assert words in equality_line(rows)
    assert ("lossy" in equality_line(rows)) != is_lossless
    assert f"chain: {len(gaps)} texts" in equality_line(rows)


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ({"ar": 100, "chain": 147, "eagle2": 90}, "Fastest: chain, 1.47 times as fast as plain"),
        ({"ar": 100, "chain": 80, "eagle2": 90}, "did not pay here: the best of it, eagle2, ran"),
        ({"chain": 80, "eagle2": 90}, ""),
        ({"ar": 100}, ""),
    ],
)
def test_the_fastest_is_named_and_where_drafting_does_not_pay(rates: dict, says: str) -> None:
    rows = [{"policy": name, "tokens_per_s": rate} for name, rate in rates.items()]
    lines = fastest_lines(rows)
    assert (len(lines), says in "".join(lines)) == (bool(says), True)


def test_drawn_drafts_have_a_text_of_their_own(pair: Pair) -> None:
    words = "ar,chain:num_draft_tokens=2,chain:num_draft_tokens=2+ratio"
    for temperature, own in ((1.0, None), (0.0, True)):
        runs = compared(pair, DecodeSettings(6, Sampling(temperature)), words)
        rows = [run.summary() for run in runs]
        assert [row["equal_to_ar"] for row in rows] == [True, True, own]
        assert ("only the distribution is the same" in equality_line(rows)) == (own is None)
