"""Answers that can be checked: the text after the last `####`, as in GSM8K."""

from __future__ import annotations

MARKER = "####"

__all__ = ["MARKER", "final_answer", "is_correct"]


def final_answer(text: str) -> str | None:
    """The normalised first line after the last `####`; None without one."""
    if MARKER not in text:
        return None
    lines = text.rsplit(MARKER, 1)[1].strip().splitlines()
    return _normalised(lines[0]) if lines else None


def is_correct(text: str, answer: str) -> bool:
    """Whether `text` ends in `answer`, up to commas, a dollar sign and a trailing period."""
    expected = final_answer(answer) if MARKER in answer else _normalised(answer)
    return bool(expected) and final_answer(text) == expected


def _normalised(answer: str) -> str:
    """Without commas, `$`, a trailing period and repeated spaces."""
    plain = answer.replace(",", "").replace("$", "").strip().rstrip(".")
    return " ".join(plain.split())
