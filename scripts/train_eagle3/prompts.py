"""Chat prompts for a target's own text, from the data sets that docs/pair.md names."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .own_text import Prompt

MAX_CHARACTERS = 1_100
PASSAGES = (
    "Summarize this passage: ",
    "Rewrite in modern English: ",
    "Explain what happens here: ",
    "Continue this story: ",
    "Translate to French: ",
)
QUESTIONS = (
    "Explain {} in simple terms.",
    "Write a short essay about {}.",
    "Give me ten tips about {}.",
    "Write a dialogue about {}.",
    "What are common mistakes with {}?",
    "Write an email to a friend about {}.",
    "Compare two views on {}.",
    "Make a table of facts about {}.",
)
TOPICS = [
    "photosynthesis",
    "gravity",
    "budgeting",
    "Python lists",
    "the French Revolution",
    "healthy breakfasts",
    "machine learning",
    "climate change",
    "job interviews",
    "travel to Japan",
    "stock markets",
    "dog training",
    "writing poetry",
    "SQL joins",
    "HTTP",
    "meditation",
    "world war two",
    "chess openings",
    "black holes",
    "gardening",
    "the human heart",
    "email etiquette",
    "solar panels",
    "renting a flat",
    "public speaking",
    "vaccines",
    "jazz",
    "the water cycle",
    "marathon training",
    "home insulation",
    "volcanoes",
    "git branches",
    "negotiation",
    "the Roman Empire",
    "sourdough bread",
    "photography",
    "electric cars",
    "time management",
    "whales",
    "statistics",
    "sleep",
    "customer service",
    "castles",
    "recycling",
    "tennis",
]


def chat_prompts(folder: Path, tokenizer: Any) -> list[Prompt]:
    """Every message of the folder's data sets that is short enough, in the chat template.

    Args:
        folder: holds `instructions.jsonl`, `gsm8k_train.jsonl`, `spec_bench_dev.jsonl`,
            `humaneval_dev.jsonl` and books as `*.txt`.
    """
    texts = {text: source for source, text in messages(folder) if len(text) <= MAX_CHARACTERS}
    return [Prompt(source, chat_ids(tokenizer, text)) for text, source in texts.items()]


def chat_ids(tokenizer: Any, message: str) -> tuple[int, ...]:
    """Token ids of the chat template around one user message, up to the answer's first token."""
    turns = [{"role": "user", "content": message}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def messages(folder: Path) -> Iterator[tuple[str, str]]:
    """Pairs of a data set's name and a user's message, of any length."""
    for row in _lines(folder / "instructions.jsonl"):
        yield row["source"], row["prompt"]
    for row in _lines(folder / "gsm8k_train.jsonl"):
        yield "gsm8k", row["question"]
    for row in _lines(folder / "spec_bench_dev.jsonl"):
        yield "spec_bench", row["turns"][0]
    for row in _lines(folder / "humaneval_dev.jsonl"):
        yield "humaneval", f"Complete this Python function.\n```python\n{row['prompt']}\n```"
    rng = random.Random(0)
    for book in sorted(folder.glob("*.txt")):
        for passage in book.read_text("utf-8").split("\n\n"):
            text = passage.strip().replace("\n", " ")
            if 200 < len(text) < 900:
                yield "book", rng.choice(PASSAGES) + text
    for topic in TOPICS:
        for question in QUESTIONS:
            yield "topic", question.format(topic)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text("utf-8").splitlines():
        yield json.loads(line)
