"""Sampled drafts in the production loop: each text is the one that a loop of a few lines writes.

The models are tables, whose distributions are known for any context; the reference draws from them
with the same noise, one token at a time (`tests/policy/ratio_reference.py`). The enumeration of
`tests/policy/test_ratio.py` says that those draws follow the target.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.collect.prompts import load_prompts
from specctl.errors import ModelError
from specctl.policy import Chain, Policy, Ratio, SignalStop, ratio
from specctl.policy.ratio import RatioRule
from specctl.policy.verification import Verification
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import load_pair
from specctl.runtime.requests import Request, Sampling
from specctl.runtime.round import Round
from tests.policy.ratio_reference import text_of
from tests.runtime import table
from tests.runtime.toy import Failing, Kept, decode, mixed_requests, texts_of

PROMPT, SIZE = (0, 2, 1), 12
SEEDS = range(16)
Patch = pytest.MonkeyPatch


def law_at(law: table.Law, temperature: float = 1.0, top_k: int = 0) -> Callable[..., list[float]]:
    def probs(context: tuple[int, ...]) -> list[float]:
        weights = [float(w) ** (1 / temperature) for w in law(list(context))]
        if top_k:
            least = sorted(weights)[-top_k]
            weights = [w if w >= least else 0.0 for w in weights]
        return [w / sum(weights) for w in weights]

    return probs


def texts(
    length: int, sampling: Sampling, batch_size: int = 1, seeds: Any = SEEDS, **more: Any
) -> dict[int, tuple[int, ...]]:
    policy = Policy(shape=Chain(num_draft_tokens=length), acceptance=Ratio())
    requests = [
        Request(str(seed), PROMPT, SIZE, sampling=replace(sampling, seed=seed)) for seed in seeds
    ]
    done = table.table_loop(policy, batch_size, **more).run(requests)
    return {int(one.request.request_id): tuple(one.token_ids) for one in done}


def reference(length: int, sampling: Sampling, seeds: Any = SEEDS) -> dict[int, tuple[int, ...]]:
    target, drafter = (
        law_at(law, sampling.temperature, sampling.top_k)
        for law in (table.target_law, table.drafter_law)
    )
    return {seed: text_of(target, drafter, PROMPT, length, SIZE, seed) for seed in seeds}


@pytest.mark.parametrize(("length", "batch_size"), [(1, 1), (3, 1), (5, 1), (4, 5)])
def test_texts_are_those_of_the_reference(length: int, batch_size: int) -> None:
    assert texts(length, Sampling(1.0), batch_size) == reference(length, Sampling(1.0))


@pytest.mark.parametrize("sampling", [Sampling(0.6), Sampling(1.7), Sampling(1.3, top_k=2)])
def test_the_drafter_draws_with_the_settings_of_the_run(sampling: Sampling) -> None:
    """Of tables with ties, top-k keeps all, as for the target."""
    seeds = range(10)
    assert texts(3, sampling, 5, seeds) == reference(3, sampling, seeds)


def test_greedy_requests_take_the_likeliest_tokens_beside_sampled_ones() -> None:
    shape = SignalStop(signal="sqrt_entropy", threshold=1.4, window=4, keep_last=False)
    sampled = Policy(shape=shape, acceptance=Ratio())
    alone = texts_of(decode(sampled, mixed_requests()).values())
    assert texts_of(decode(sampled, mixed_requests(), batch_size=4).values()) == alone
    strict = texts_of(decode(Policy(shape=shape), mixed_requests()).values())
    greedy = [one.request_id for one in mixed_requests() if one.sampling.greedy]
    assert {name: strict[name] for name in greedy} == {name: alone[name] for name in greedy}
    assert strict != alone, "of sampled requests only the distribution is the same"


def test_texts_of_the_embedded_pair_do_not_depend_on_the_batch() -> None:
    """The EAGLE-3 head says a part of the vocabulary, which the target is not bound to."""
    pair = load_pair("embedded", "embedded", device="cpu", dtype="float32")
    shape = SignalStop(signal="sqrt_entropy", threshold=1.5, window=4, keep_last=False)
    settings = DecodeSettings(12, Sampling(1.2, top_p=0.95, seed=3))
    requests = [
        next_request(pair.target.tokenizer, Conversation(prompt), settings)
        for prompt in load_prompts("embedded")[::60]
    ]
    found = [
        texts_of(
            DecodeLoop(
                pair.target.model,
                pair.drafter,
                Policy(shape=shape, acceptance=Ratio()),
                batch_size=size,
                max_text_tokens=512,
                eos_ids=(),
            ).run(requests)
        )
        for size in (1, 3)
    ]
    assert found[0] == found[1]
    said = set(pair.drafter.to_target_ids(torch.arange(pair.drafter.vocab_size)).tolist())
    emitted = {token for text in found[0].values() for token in text}
    assert emitted - said, "replaced by tokens that no draft can hold"


# --------------------------------------------------------------------------- bugs put in

MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(install: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[install.__name__] = install
    return install


def judging(patch: Patch, change: Callable[[Verification], Verification]) -> None:
    original = RatioRule.judge
    patch.setattr(RatioRule, "judge", lambda self, given: original(self, change(given)))


@mutant
def drafts_of_the_plain_temperature(patch: Patch) -> None:
    """The drafter draws at T = 1 while its distribution is taken at the run's temperature."""
    original = Round._draw_drafts

    def draw(self: Round, rows: Any, logits: Any, level: int) -> Any:
        processed, _ = original(self, rows, logits, level)
        plain = logits * self.state.samplings.temperature[:, None].float()
        return processed, original(self, rows, plain, level)[1]

    patch.setattr(Round, "_draw_drafts", draw)


@mutant
def draft_law_before_the_processors(patch: Patch) -> None:
    original = Round._draw_drafts

    def draw(self: Round, rows: Any, logits: Any, level: int) -> Any:
        return logits, original(self, rows, logits, level)[1]

    patch.setattr(Round, "_draw_drafts", draw)


@mutant
def target_law_before_the_processors(patch: Patch) -> None:
    judging(patch, lambda given: replace(given, processed=given.logits))


@mutant
def one_noise_for_draft_and_residual(patch: Patch) -> None:
    patch.setattr(ratio, "RESIDUAL_STREAM", ratio.DRAFT_STREAM)


@mutant
def coins_of_the_position_behind(patch: Patch) -> None:
    judging(patch, lambda given: replace(given, positions=given.positions + 1))


@mutant
def bonus_from_the_row_above(patch: Patch) -> None:
    original = RatioRule.judge

    def judge(self: RatioRule, given: Verification) -> Any:
        found, own = original(self, given), given.target_ids
        moved = torch.cat([found.target_ids[:, :-1], own[:, -2:-1]], 1)
        return replace(found, target_ids=moved)

    patch.setattr(RatioRule, "judge", judge)


@pytest.mark.parametrize("name", MUTANTS)
def test_bugs_are_seen(name: str, monkeypatch: Patch) -> None:
    MUTANTS[name](monkeypatch)
    sampling, seeds = Sampling(0.5), range(12)
    assert texts(3, sampling, seeds=seeds) != reference(3, sampling, seeds)


# --------------------------------------------------------------------------- failures


@pytest.mark.policy_faults
@pytest.mark.parametrize(("method", "at"), [("begin", 1), ("grow", 1), ("grow", 2), ("select", 1)])
def test_a_failure_verifies_what_was_drawn(method: str, at: int) -> None:
    """Drawn tokens are never thrown away for others: that would be an unpredictable stop. The
    static plan draws the same ones again, up to the longest chain, whatever the rule looked at
    before it failed in its `at`-th call."""
    kept, calls = Kept(), itertools.count(1)
    loop = table.table_loop(
        Policy(shape=Chain(num_draft_tokens=3), acceptance=Ratio()), observer=kept
    )
    fails = Failing(loop.rules.shape, method, lambda: next(calls) % at == 0)
    loop.round.rules = replace(loop.rules, shape=fails)
    seeds = range(8)
    for seed in seeds:
        loop.submit(Request(str(seed), PROMPT, SIZE, sampling=Sampling(1.0, seed=seed)))
    found = {int(done.request.request_id): tuple(done.token_ids) for done in drained(loop)}
    assert found == reference(3, Sampling(1.0), seeds)
    drafted = [n - 1 for r in kept.records for n in (r.submitted >= 0).sum(1).tolist()]
    assert set(drafted) == {3}
    assert loop.faults.total == len(drafted)


def drained(loop: DecodeLoop) -> Any:
    while loop.busy:
        yield from loop.step()


def test_a_drafter_without_a_distribution_is_named(monkeypatch: Patch) -> None:
    law = table.drafter_law
    monkeypatch.setattr(table, "_logits", spoiled(table._logits, law))
    with pytest.raises(ModelError, match="drafter logits"):
        texts(2, Sampling(1.0), seeds=range(1))


def spoiled(original: Any, law: table.Law) -> Any:
    def logits(of: table.Law, context: tuple[int, ...]) -> list[float]:
        return [float("nan")] * 3 if of is law else original(of, context)

    return logits
