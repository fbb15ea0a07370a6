"""Spec-Bench's answer files, summarised: one question a line, its turns pooled.

`evaluation/eval.py` of github.com/hemingkx/Spec-Bench writes `choices[]` with a list per turn of
`decoding_steps`, `new_tokens`, `wall_time` (seconds) and one flat list `accept_lengths` over all
turns, the target's own token counted (plain decoding has 1.0). Its `speed.py` reports a mean of
rates; here rates are Σ tokens / Σ time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specctl.errors import InputError
from specctl.logs.positions import Longs
from specctl.replay.foreign.lines import (
    OnBytes,
    Row,
    Spot,
    counts_of,
    json_objects,
    list_of,
    seconds_of,
    text_of,
)

WHY_NOT_REPLAYED = (
    "these are the rounds that one policy ran; positions where it started no round are not "
    "there, so no other policy can be replayed from them"
)


@dataclass(frozen=True)
class Answer:
    """One question, all choices and turns.

    Attributes:
        accept_lengths: `[rounds]` tokens per round, the bonus token counted.
        num_steps: what the file calls decoding steps, for comparison.
    """

    question_id: str
    category: str
    accept_lengths: Longs
    num_tokens: int
    wall_s: float
    num_steps: int
    num_choices: int


def summarise_answers(
    path: Path, *, questions: Path | None = None, on_bytes: OnBytes | None = None
) -> dict[str, Any]:
    """Figures of an answer file, pooled and by category.

    Args:
        questions: `question.jsonl`; its categories are used, and each answer must be in it.

    Raises:
        InputError: a malformed line, by its number; a question answered twice or unknown.
    """
    known = None if questions is None else _categories(questions)
    answers = list(_answers(path, known, on_bytes))
    names = sorted({answer.category for answer in answers if answer.category})
    by_category = {name: [a for a in answers if a.category == name] for name in names}
    return {
        "replayable": False,
        "why_not_replayed": WHY_NOT_REPLAYED,
        "all": _figures(answers),
        "by_category": {name: _figures(group) for name, group in by_category.items()},
    }


def is_answer(row: Row) -> bool:
    """Whether a record has the keys of this format."""
    return "question_id" in row and isinstance(row.get("choices"), list)


def _answers(
    path: Path, known: Mapping[str, str] | None, on_bytes: OnBytes | None
) -> Iterable[Answer]:
    first: dict[str, Spot] = {}
    for spot, row in json_objects(path, on_bytes):
        answer = _answer(row, spot, known)
        earlier = first.setdefault(answer.question_id, spot)
        if earlier is not spot:
            found = f"{answer.question_id[:80]!r}, which {earlier.unit} {earlier.number} answers"
            raise spot.refuse("a question that is not answered yet", found, "keep one of them")
        yield answer


def _answer(row: Row, spot: Spot, known: Mapping[str, str] | None) -> Answer:
    question = text_of(row, "question_id", spot)
    if known is not None and question not in known:
        raise spot.refuse("a question of --questions", repr(question)[:80], "give its file")
    category = text_of(row, "category", spot) if row.get("category") else ""
    choices = list_of(row.get("choices"), "'choices'", spot)
    if not choices or not all(isinstance(choice, dict) for choice in choices):
        raise spot.refuse("'choices' as a list of objects", f"{len(choices)} others")
    parts = [_choice(choice, spot) for choice in choices]
    return Answer(
        question,
        category if known is None else known[question],
        np.concatenate([lengths for lengths, _, _, _ in parts]),
        sum(tokens for _, tokens, _, _ in parts),
        sum(wall for _, _, wall, _ in parts),
        sum(steps for _, _, _, steps in parts),
        len(parts),
    )


def _choice(choice: Row, spot: Spot) -> tuple[Longs, int, float, int]:
    """Accepted lengths, tokens, seconds and decoding steps of one choice."""
    new_tokens = counts_of(choice.get("new_tokens"), "'new_tokens'", spot)
    wall_s = seconds_of(choice.get("wall_time"), "'wall_time'", spot)
    steps = counts_of(choice.get("decoding_steps"), "'decoding_steps'", spot)
    if not len(new_tokens) == len(wall_s) == len(steps) > 0:
        sizes = f"{len(new_tokens)}, {len(wall_s)} and {len(steps)}"
        names = "'new_tokens', 'wall_time' and 'decoding_steps'"
        raise spot.refuse(f"one entry a turn in {names}", f"{sizes} entries")
    # A 0 would mean a list that leaves the bonus token out, where every figure is another one.
    lengths = counts_of(choice.get("accept_lengths"), "'accept_lengths'", spot, low=1)
    return lengths, int(new_tokens.sum()), sum(wall_s), int(steps.sum())


def _categories(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for spot, row in json_objects(path):
        question = text_of(row, "question_id", spot)
        if question in found:
            raise spot.refuse("each question once", f"{question[:80]!r} twice")
        found[question] = text_of(row, "category", spot)
    return found


def _figures(answers: list[Answer]) -> dict[str, Any]:
    lengths = np.concatenate([answer.accept_lengths for answer in answers])
    if not len(lengths):
        raise InputError(
            "'accept_lengths'",
            expected="at least one round",
            found=f"none in {len(answers)} answers",
            fix="name a file of a speculative run",
        )
    per_question = [a.accept_lengths.mean() for a in answers if len(a.accept_lengths)]
    num_tokens, wall_s = sum(a.num_tokens for a in answers), sum(a.wall_s for a in answers)
    return {
        "num_questions": len(answers),
        "num_choices": sum(a.num_choices for a in answers),
        "num_rounds": len(lengths),
        "num_decoding_steps": sum(a.num_steps for a in answers),
        "num_tokens": num_tokens,
        "num_tokens_in_accept_lengths": int(lengths.sum()),
        "mean_acceptance_length": float(lengths.mean()),
        "mean_of_question_means": float(np.mean(per_question)),
        "wall_s": wall_s,
        "tokens_per_s": num_tokens / wall_s,
        "acceptance_histogram": _histogram(lengths),
    }


def _histogram(lengths: Longs) -> dict[str, int]:
    """Rounds by accepted draft tokens (bonus excluded), those that occur."""
    values, counts = np.unique(lengths - 1, return_counts=True)
    return {str(v): int(c) for v, c in zip(values.tolist(), counts.tolist(), strict=True)}
