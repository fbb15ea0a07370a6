"""Comparing policies: equality with plain decoding, divergences explained by their logit gap."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specctl.cli.running import answer_of, equality_line
from specctl.collect.prompts import load_prompts
from specctl.runtime import compare
from specctl.runtime.api import Decoder
from specctl.runtime.attention import ATTENTION
from specctl.runtime.compare import (
    Paired,
    RunResult,
    checked_against_plain,
    compare_policies,
    paired,
    top2_gap,
    verdict,
    write_results,
)
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Metrics, Sampling
from specctl.runtime.words import resolve_policies
from specctl.stats import Interval

SPECS = "ar,chain,eagle2:4x4/12"


def compared(pair: Pair, settings: DecodeSettings, specs: str = SPECS) -> list[RunResult]:
    prompts = load_prompts("embedded")[::48]
    return compare_policies(pair, resolve_policies(specs), prompts, settings).results


def test_without_plain_decoding_equality_is_unknown(pair: Pair) -> None:
    [only] = compared(pair, DecodeSettings(4), "chain")
    assert only.summary()["equal_to_ar"] is None


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
def test_sampled_divergences_claim_no_tie(sampling: Sampling, pair: Pair) -> None:
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
    ("gaps", "words"), [([0.25, 0.5], "gap at most 0.5"), ([None], "rounding of --dtype")]
)
def test_the_line_under_the_table_explains_differences(gaps: list, words: str) -> None:
    divergences = [{"request_id": "r", "position": 3, "top2_gap": gap} for gap in gaps]
    row = {"policy": "chain", "is_lossless": True, "equal_to_ar": False, "divergences": divergences}
    plain = {"policy": "ar", "is_lossless": True, "equal_to_ar": True, "divergences": []}
    assert words in equality_line([plain, row])
    assert f"chain: {len(gaps)} texts" in equality_line([plain, row])
    assert "lossy" in equality_line([plain, row | {"is_lossless": False}])


def result(name: str, turns: np.ndarray, plain: np.ndarray | None = None) -> RunResult:
    """Of made-up times."""
    [named] = resolve_policies(name)
    beside = None if plain is None else paired(turns, plain)
    return RunResult(named, [], Metrics(), turns, beside)


def times(
    rng: np.random.Generator, speed: float, num_turns: int = 12, noise: float = 0.05
) -> np.ndarray:
    """`[T, 2]` tokens and seconds, of prompts that differ by more than policies do."""
    tokens = np.full(num_turns, 64.0)
    seconds = np.random.default_rng(5).uniform(1, 3, num_turns) / speed
    return np.stack([tokens, seconds * rng.lognormal(0, noise, num_turns)], 1)


@pytest.mark.parametrize(
    ("speeds", "says"),
    [
        ({"chain": 1.47, "eagle2": 0.9}, r"Fastest: chain, × 1\.\d\d \[.*\] of plain decoding"),
        ({"chain": 1.3, "eagle2": 1.3}, "; not told apart from (chain|eagle2)\\.$"),
        ({"chain": 0.7, "eagle2": 0.8}, "did not pay here: the best, eagle2, was × 0"),
        (
            {"chain": 0.7, "eagle2": 1.0},
            r"Not told apart from plain decoding: eagle2 × 1.*, p 0\.\d+; a verdict needs",
        ),
    ],
)
def test_the_line_under_the_table_is_what_the_times_bear_out(
    speeds: dict[str, float], says: str
) -> None:
    rng = np.random.default_rng(1)
    plain = times(rng, 1.0)
    results = [result("ar", plain)]
    results += [result(name, times(rng, speed), plain) for name, speed in speeds.items()]
    assert re.search(says, verdict(results)), verdict(results)


@pytest.mark.parametrize(
    ("gain", "p_value", "says"),
    [
        (
            (0.77, 0.66, 0.90),
            0.012,
            "eagle2, × 0.77 [0.66, 0.90], is slower by its interval, but",
        ),
        ((1.20, 1.05, 1.40), 0.02, "eagle2, × 1.20 [1.05, 1.40], is faster by its interval, but"),
        ((0.90, 0.75, 1.08), 0.2, "Not told apart from plain decoding: eagle2 × 0.90 [0.75, 1.08]"),
    ],
)
def test_an_interval_clear_of_1_is_not_called_no_difference(
    gain: tuple[float, float, float], p_value: float, says: str
) -> None:
    [named], turns = resolve_policies("eagle2"), np.ones((9, 2))
    runs = [
        result("ar", turns),
        RunResult(named, [], Metrics(), turns, Paired(Interval(*gain), 9, p_value)),
    ]
    assert says in verdict(runs)


@pytest.mark.parametrize(
    ("speed", "says"),
    [(1.5, "Fastest: b, × 1.* of chain"), (1.0, "told apart from chain: b"), (0.5, ": chain;")],
)
def test_without_plain_decoding_the_first_policy_is_the_baseline(
    speed: float, says: str, pair: Pair
) -> None:
    rng = np.random.default_rng(1)
    runs = [result("chain", times(rng, 1.0)), result("b=chain", times(rng, speed))]
    assert re.search(says, verdict(checked_against_plain(runs, pair)))


def test_few_prompts_give_no_verdict() -> None:
    rng = np.random.default_rng(2)
    plain, fast = times(rng, 1.0, num_turns=7), times(rng, 3.0, num_turns=7)
    assert paired(fast, plain).verdict == "not told apart"
    assert verdict([result("ar", plain), result("chain", fast, plain)]) == (
        "No verdict on speed: 7 turns of each policy, 8 are needed."
    )


@pytest.mark.parametrize("num_turns", [8, 24])
def test_the_same_policy_twice_is_not_told_apart(num_turns: int) -> None:
    """In at least 95 of 100 comparisons, on a machine whose noise comes in bursts; and a policy
    that is a tenth faster is told apart in most."""
    rng, found, widths = np.random.default_rng(3), {1.0: 0, 1.1: 0}, []
    for _ in range(100):
        burst = 1 + 2 * (rng.random((num_turns, 1)) < 0.2)  # other work, over a whole turn
        for speed in found:
            one, other = (times(rng, value, num_turns, 0.04) for value in (1.0, speed))
            one[:, 1:] *= burst
            other[:, 1:] *= burst
            beside = paired(other, one)
            found[speed] += beside.verdict != "not told apart"
            widths.append(beside.speedup.high / beside.speedup.low)
    assert np.median(widths) < 1.15, "paired by turn: prompts differ by a factor of 3"
    assert found[1.0] <= 5
    assert found[1.1] >= (60 if num_turns == 8 else 95)


def test_policies_take_turns_in_an_order_that_is_shuffled(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt under every policy before the next one; the prompts, too, come in an order from
    the run's seed, which `turns` keeps, while the texts stay in the order of the file."""
    taken: list[tuple[str, str]] = []
    original = compare.take_turn

    def noted(decoder: Decoder, prompts: Any, *rest: Any) -> Any:
        taken.append((prompts[0].prompt_id, decoder.policy.name))
        return original(decoder, prompts, *rest)

    monkeypatch.setattr(compare, "take_turn", noted)
    prompts, orders = load_prompts("embedded")[::60], []
    ids = [one.prompt_id for one in prompts]
    for seed in (0, 0, 1):
        taken.clear()
        settings = DecodeSettings(2, Sampling(seed=seed))
        found = compare_policies(pair, resolve_policies(SPECS), prompts, settings)
        assert sorted(name for name, _ in taken[::3]) == sorted(ids)
        assert all(len({name for name, _ in taken[i : i + 3]}) == 1 for i in range(0, 12, 3))
        orders.append(taken.copy())
        rows = [(row, run.named.label) for run in found.results for row in run.summary()["turns"]]
        places = {row["place"]: (row["prompt_ids"][0], name) for row, name in rows}
        assert [
            (name, resolve_policies(policy)[0].policy.name)
            for name, policy in (places[place] for place in range(len(taken)))
        ] == taken
        shown = answer_of(found, "", []).parts
        assert any("of 2 verdicts, one is false by chance in at most 2%" in str(p) for p in shown)
        for run in found.results:
            assert [talk.prompt.prompt_id for talk in run.conversations] == ids
        assert [len(run.turns) for run in found.results] == [len(prompts)] * 3
        assert all(not run.divergences for run in found.results)
    assert orders[0] == orders[1] != orders[2]
    policies = [policy for _, policy in orders[0]]
    assert len({tuple(policies[i : i + 3]) for i in range(0, 12, 3)}) > 1
    assert ids not in ([name for name, _ in orders[0][::3]], [name for name, _ in orders[2][::3]])


def test_the_turns_that_are_kept_give_the_figures_again(pair: Pair) -> None:
    """Ratio, interval and p-value, of turns joined by their number."""
    prompts = load_prompts("embedded", limit=9)
    settings = DecodeSettings(4)
    for batch_size, num_turns in ((1, 9), (2, 2)):
        found = compare_policies(
            pair, resolve_policies("ar,chain"), prompts, settings, batch_size=batch_size
        )
        rows = [run.summary() for run in found.results]
        plain, ours = (
            np.array([(turn["num_tokens"], turn["time_us"] / 1e6) for turn in row["turns"]])
            for row in rows
        )
        assert [turn["turn"] for turn in rows[1]["turns"]] == list(range(num_turns))
        again = json.dumps(paired(ours, plain).to_json())
        assert again == pytest.approx(json.dumps(rows[1]["paired"]))
        for name in ("num_tokens", "calls", "verified_tokens", "num_accepted", "verify_us"):
            total = sum(turn[name] for turn in rows[1]["turns"])
            assert total == pytest.approx(rows[1][name])
        assert rows[0]["draft_us"] == 0 < rows[0]["other_us"], "plain decoding drafts nothing"
        same = [turn["prompt_ids"] for turn in rows[0]["turns"]]
        assert same == [turn["prompt_ids"] for turn in rows[1]["turns"]]


def test_waiting_for_a_processor_is_said(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = iter([0.0, 1e12])
    monkeypatch.setattr(compare, "waited_us", lambda: next(waited))
    prompts = load_prompts("embedded", limit=1)
    found = compare_policies(pair, resolve_policies("ar,chain"), prompts, DecodeSettings(2))
    shown = answer_of(found, "", []).parts
    assert not any("false by chance" in str(line) for line in shown), "of one verdict"
    assert any("decoding waited 100% of the time" in str(line) for line in shown)


def test_an_interrupted_comparison_is_of_a_random_part_and_says_so(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original, num_turns = compare.take_turn, 0

    def interrupted(*given: Any) -> Any:
        nonlocal num_turns
        num_turns += 1
        if num_turns == 6:
            raise KeyboardInterrupt
        return original(*given)

    monkeypatch.setattr(compare, "take_turn", interrupted)
    policies = resolve_policies("ar,chain")
    prompts, settings = load_prompts("embedded", limit=40), DecodeSettings(4)
    found = compare_policies(pair, policies, prompts, settings)
    assert found.is_interrupted
    assert [len(run.conversations) for run in found.results] == [2, 2]
    decoded = {talk.prompt.prompt_id for talk in found.results[0].conversations}
    assert decoded != {prompt.prompt_id for prompt in prompts[:2]}, "the first of a sorted file"
    shown = "\n".join(map(str, answer_of(found, "", []).parts))
    assert "a random part, 2 prompts" in shown
    write_results(tmp_path, found, pair, settings, 1)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["num_prompts"], facts["num_prompts_given"]) == (2, 40)


def test_drawn_drafts_have_a_text_of_their_own(pair: Pair) -> None:
    words = "ar,chain:2,chain:2+ratio"
    for temperature, own in ((1.0, None), (0.0, True)):
        runs = compared(pair, DecodeSettings(6, Sampling(temperature)), words)
        rows = [run.summary() for run in runs]
        assert [row["equal_to_ar"] for row in rows] == [True, True, own]
        assert ("only the distribution is the same" in equality_line(rows)) == (own is None)
