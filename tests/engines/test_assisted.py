"""Exports to transformers, decoded with by its own assisted generation on the embedded pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from specctl.collect.prompts import load_prompts
from specctl.embedded import embedded_path
from specctl.policy import Policy
from specctl.runtime.conversations import conversation_ids
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Request
from specctl.runtime.words import resolve_policy
from tests.cli.command import passes
from tests.runtime.toy import Kept

NUM_PROMPTS, NEW_TOKENS = 3, 24
POLICIES = ("chain:5", "confidence:threshold=0.4:window=5")
Rounds = list[tuple[int, int]]
"""Draft tokens submitted and admitted, round by round."""


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("embedded", "embedded:small", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def prompts(pair: Pair) -> list[tuple[int, ...]]:
    loaded = load_prompts("embedded", format="auto", limit=None)
    spread = loaded[:: len(loaded) // NUM_PROMPTS][:NUM_PROMPTS]
    return [tuple(conversation_ids(pair.target.tokenizer, one, ())) for one in spread]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """Target and assistant as transformers loads them; no token ends a text."""
    found = []
    for name in ("target", "small"):
        model = AutoModelForCausalLM.from_pretrained(embedded_path(name), dtype=torch.float32)
        model.generation_config.eos_token_id = None
        found.append(model)
    return found[0], found[1]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    """What assisted generation drafted and accepted, noted where it is told."""
    module, noted = "transformers.generation.candidate_generator", Rounds()
    # With it, transformers moves the threshold after every round.
    monkeypatch.setattr(f"{module}.is_sklearn_available", lambda: False)

    def note(_: Any, input_ids: Any, scores: Any, num_matches: Any) -> None:
        del input_ids
        noted.append((scores.shape[1] - 1, int(num_matches)))

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", note)
    return noted


def ours(pair: Pair, policy: Policy, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], Rounds]:
    seen, size = Kept(), len(prompt) + NEW_TOKENS
    sizes = {"batch_size": 1, "max_text_tokens": size + 1}
    loop = DecodeLoop(pair.target.model, pair.drafter, policy, eos_ids=(), observer=seen, **sizes)
    [done] = loop.run([Request("0", prompt, NEW_TOKENS)])
    drafted = [int((record.submitted[0] >= 0).sum()) - 1 for record in seen.records]
    accepted = [int(record.path_length[0]) for record in seen.records]
    return done.token_ids, list(zip(drafted, accepted, strict=True))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("words", POLICIES)
def test_assisted_generation_drafts_as_exported(
    words: str,
    pair: Pair,
    prompts: list[tuple[int, ...]],
    models: tuple[Any, Any],
    rounds: Rounds,
    tmp_path: Path,
) -> None:
    """Equal texts, and in every round equally many tokens drafted and accepted.

    Our first token comes with the prompt, transformers' with its first round: so it is given ours.
    transformers drafts no more than what is left of the text, less one.
    """
    passes("export", words, "--to", "transformers", "-o", tmp_path)
    exported = GenerationConfig.from_pretrained(tmp_path)
    target, assistant = models
    for name, value in exported.to_diff_dict().items():
        setattr(assistant.generation_config, name, value)
    policy, lengths = resolve_policy(words).policy, set[int]()
    for prompt in prompts:
        text, expected = ours(pair, policy, prompt)
        rounds.clear()
        given = torch.tensor([[*prompt, text[0]]])
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS - 1}
        options |= {"assistant_model": assistant, "attention_mask": torch.ones_like(given)}
        out = target.generate(given, **options)
        assert tuple(out[0, len(prompt) :].tolist()) == text
        left, capped = NEW_TOKENS - 1, Rounds()
        for drafted, accepted in expected:
            most = min(drafted, left - 1)
            capped.append((most, min(accepted, most)))
            left -= accepted + 1
        assert rounds == capped
        lengths |= {drafted for drafted, _ in expected}
    assert (len(lengths) > 1) == words.startswith("confidence")
