"""Chat prompts for a target's own text, from a folder of data sets."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .own_text import Row

MAX_CHARACTERS = 1_100
WORDINGS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("wordings.json").read_text("utf-8")
)


def chat_prompts(folder: Path, tokenizer: Any) -> list[Row]:
    """Every message of the folder's data sets that is short enough, in the chat template.

    Args:
        folder: holds `instructions.jsonl`, `gsm8k_train.jsonl`, `spec_bench_dev.jsonl`,
            `humaneval_dev.jsonl` and books as `*.txt`.
    """
    texts = {text: source for source, text in messages(folder) if len(text) <= MAX_CHARACTERS}
    return [Row(source, chat_ids(tokenizer, text)) for text, source in texts.items()]


def chat_ids(tokenizer: Any, message: str) -> tuple[int, ...]:
    """Token ids of the chat template around one user message, up to the answer's first token."""
    turns = [{"role": "user", "content": message}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def messages(folder: Path) -> Iterator[tuple[str, str]]:
    """Pairs of a data set's name and a user's message, of any length."""
    for row in read_lines(folder / "instructions.jsonl"):
        yield row["source"], row["prompt"]
    for row in read_lines(folder / "gsm8k_train.jsonl"):
        yield "gsm8k", row["question"]
    for row in read_lines(folder / "spec_bench_dev.jsonl"):
        yield "spec_bench", row["turns"][0]
    for row in read_lines(folder / "humaneval_dev.jsonl"):
        yield "humaneval", f"Complete this Python function.\n```python\n{row['prompt']}\n```"
    rng = random.Random(0)
    for book in sorted(folder.glob("*.txt")):
        for passage in book.read_text("utf-8").split("\n\n"):
            text = passage.strip().replace("\n", " ")
            if 200 < len(text) < 900:
                yield "book", rng.choice(WORDINGS["passages"]) + text
    for topic in WORDINGS["topics"]:
        for question in WORDINGS["questions"]:
            yield "topic", question.format(topic)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
