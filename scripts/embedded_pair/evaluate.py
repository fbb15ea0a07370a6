"""What is reported of the pair: acceptance, exact match, loss and repetition, by category."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specctl.answers import is_correct
from specctl.runtime.api import Decoder
from specctl.runtime.eagle3 import Eagle3Head

from .generate import continue_batch
from .head import target_features
from .reference_tree import NUM_LEVELS, walk
from .tokenizer import encode

NUM_NEW_TOKENS = 128
BATCH = 30


@dataclass(frozen=True)
class Prompt:
    """One prompt of an evaluation, with its answer where it can be checked."""

    category: str
    text: str
    answer: str = ""


def read_prompts(path: Path) -> list[Prompt]:
    """The package's prompt file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Prompt(r["category"], _rendered(r["prompt"], raw=r.get("raw", False)), r.get("answer", ""))
        for r in rows
    ]


def read_eval_file(path: Path, count: int = 30) -> list[Prompt]:
    """The first rows of a GSM8K (`question`) or HumanEval (`prompt`) file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    if "question" in rows[0]:
        return [Prompt(path.stem, _rendered(r["question"], raw=False), r["answer"]) for r in rows]
    return [Prompt(path.stem, _rendered(r["prompt"].rstrip(), raw=True)) for r in rows]


def _rendered(prompt: str, *, raw: bool) -> str:
    if raw:
        return f"<|bos|>{prompt}"
    return f"<|bos|><|user|>\n{prompt}<|eos|>\n<|assistant|>\n"


@dataclass(frozen=True)
class Text:
    """A prompt's ids and the target's greedy continuation, `NUM_LEVELS` tokens longer than used."""

    prompt: Prompt
    ids: list[int]
    continuation: list[int]

    def used(self) -> list[int]:
        """The part that is evaluated."""
        return self.continuation[:NUM_NEW_TOKENS]


def greedy_texts(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[Prompt]
) -> list[Text]:
    """Greedy continuations, batched by prompt length."""
    encoded = sorted(
        ((encode(tokenizer, p.text), p) for p in prompts), key=lambda pair: len(pair[0])
    )
    texts = []
    for start in range(0, len(encoded), BATCH):
        part = encoded[start : start + BATCH]
        written = continue_batch(
            target, [ids for ids, _ in part], NUM_NEW_TOKENS + NUM_LEVELS, sampled=False
        )
        texts += [Text(p, ids, out) for (ids, p), out in zip(part, written, strict=True)]
    return texts


def rounds_of(head: Eagle3Head, target: LlamaForCausalLM, texts: list[Text]) -> list[list[int]]:
    """Accepted lengths of every round of each text."""
    rounds = []
    for start in range(0, len(texts), BATCH):
        part = texts[start : start + BATCH]
        ids = _padded(part)
        layers = head.config.resolve_aux_layers(target.config.num_hidden_layers)
        features, _ = target_features(target, ids.clamp(min=0), layers)
        ends = [len(t.ids) + len(t.used()) for t in part]
        rounds += walk(head, ids, features, [len(t.ids) for t in part], ends)
    return rounds


def _padded(texts: list[Text]) -> Tensor:
    width = max(len(t.ids) + len(t.continuation) for t in texts) + NUM_LEVELS + 1
    rows = [t.ids + t.continuation for t in texts]
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def repeated_frac(ids: list[int], size: int = 4) -> tuple[int, int]:
    """How many 4-grams of a text occurred in it before, and how many there are."""
    grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return len(grams) - len(set(grams)), len(grams)


def evaluate_pair(
    target: LlamaForCausalLM,
    head: Eagle3Head,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[Prompt],
) -> dict[str, dict[str, float]]:
    """By category and over all: prompts, tokens, tau, exact match and repeated 4-grams."""
    texts = greedy_texts(target, tokenizer, prompts)
    rounds = rounds_of(head, target, texts)
    groups: dict[str, list[tuple[Text, list[int]]]] = defaultdict(list)
    for text, accepted in zip(texts, rounds, strict=True):
        groups[text.prompt.category].append((text, accepted))
        groups["all"].append((text, accepted))
    return {name: _summary(tokenizer, pairs) for name, pairs in sorted(groups.items())}


def runtime_acceptance(path: Path, drafter: str, *, batch_size: int = 16) -> dict[str, float]:
    """Mean acceptance length by category as specctl's own runtime has it, for `drafter`.

    A cross-check of `evaluate_pair`: a last round cut by the token limit counts what it kept.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [
        r["prompt"] if r.get("raw") else [{"role": "user", "content": r["prompt"]}] for r in rows
    ]
    decoder = Decoder.from_pretrained("embedded", drafter, batch_size=batch_size)
    done = decoder.generate(prompts, max_new_tokens=NUM_NEW_TOKENS)
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row, generation in zip(rows, done, strict=True):
        for name in (row["category"], "all"):
            totals[name][0] += generation.metrics.num_accepted
            totals[name][1] += generation.metrics.calls
    return {n: round(1 + accepted / calls, 3) for n, (accepted, calls) in sorted(totals.items())}


def _summary(
    tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[Text, list[int]]]
) -> dict[str, float]:
    accepted = [count for _, rounds in pairs for count in rounds]
    repeats, grams = map(sum, zip(*(repeated_frac(t.used()) for t, _ in pairs), strict=True))
    checked = [t for t, _ in pairs if t.prompt.answer]
    correct = [
        is_correct(tokenizer.decode(t.used(), skip_special_tokens=True), t.prompt.answer)
        for t in checked
    ]
    summary = {
        "num_prompts": len(pairs),
        "num_tokens": sum(len(t.used()) for t, _ in pairs),
        "mean_acceptance_length": round(1 + sum(accepted) / max(1, len(accepted)), 3),
        "repeated_4gram_frac": round(repeats / max(1, grams), 3),
    }
    return summary | (
        {"exact_match_frac": round(sum(correct) / len(correct), 3)} if correct else {}
    )
