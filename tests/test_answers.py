"""Final answers: what counts as one, and what makes two of them equal."""

from typing import Any

import pytest

from specctl.answers import final_answer, is_correct


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### $1,250.", "1250"),
        ("#### 3\nno, rather\n#### 4\nand more", "4"),
        ("####5", "5"),
        ("#### 2.50", "2.50"),
        ("#### t  a c ", "t a c"),
        ("no marker 12", None),
        ("#### ", None),
    ],
)
def test_final_answer_is_the_line_after_the_last_marker(text: str, expected: Any) -> None:
    assert final_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [
        ("#### 1,000", "1000", True),
        ("#### 7", "so it is 7\n#### 7", True),
        ("#### 7", "8", False),
        ("seven", "7", False),
        ("#### ", "", False),
        ("#### T", "t", False),
    ],
)
def test_is_correct_compares_normalised_answers(text: str, answer: str, *, correct: bool) -> None:
    assert is_correct(text, answer) is correct
