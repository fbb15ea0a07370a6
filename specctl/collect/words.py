"""Numbers of things, for a person."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """`1 commit`, `2 commits`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def count_are(number: int, noun: str) -> str:
    """`1 commit is`, `2 commits are`."""
    return f"{count(number, noun)} {'is' if number == 1 else 'are'}"
