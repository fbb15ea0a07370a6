"""Text of strangers, fit for one line of a terminal."""

from __future__ import annotations

MAX_CHARS = 400
"""Of each part of an error: a path, a digest and some words fit; a list of features does."""


def shown(text: str, *, max_chars: int = MAX_CHARS) -> str:
    """Text without control, format and surrogate characters, which are escaped; not endless.

    What is too long loses its middle: a path keeps its file, a list its last word. Shown text
    stays as it is when it is shown again.

    Args:
        max_chars: of the result.
    """
    return _cut(_escaped(_cut(text, max_chars)), max_chars)


def one_line(text: str) -> str:
    """`shown`, with white space of any kind as single spaces: messages of libraries have lines."""
    return shown(" ".join(_cut(text, 2 * MAX_CHARS).split()))


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    tail = max_chars // 3
    return f"{text[: max_chars - tail - 1]}…{text[-tail:]}"
