"""The generated problems: distinct, right, and the packaged ones unseen by training."""

import json
import sys
from itertools import islice
from pathlib import Path

import pytest

from specctl.answers import is_correct
from specctl.embedded import PROMPTS

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from embedded_pair.corpus import (
    HELD_OUT_SEED,
    Document,
    check_unseen,
    held_out_problems,
    problem_documents,
)
from embedded_pair.problems import generate

CATEGORIES = ("arithmetic", "strings")


@pytest.mark.parametrize("category", CATEGORIES)
def test_problems_are_distinct_and_end_in_their_answer(category: str) -> None:
    problems = generate(category, 1, 2000)
    assert len({p.prompt for p in problems}) == len(problems)
    assert all(is_correct(p.solution, p.answer) for p in problems)


@pytest.mark.parametrize("category", CATEGORIES)
def test_training_never_sees_a_held_out_prompt(category: str) -> None:
    held = {d.turns[0][0] for d in held_out_problems(category, 2000)}
    train = {d.turns[0][0] for d in islice(problem_documents(category), 20000)}
    assert not held & train
    assert {p.prompt for p in generate(category, HELD_OUT_SEED, 100)} <= held


def test_packaged_problems_are_the_first_held_out_ones() -> None:
    rows = [json.loads(line) for line in PROMPTS.read_text("utf-8").splitlines()]
    for category in CATEGORIES:
        packaged = [(r["prompt"], r["answer"]) for r in rows if r["category"] == category]
        made = generate(category, HELD_OUT_SEED, len(packaged))
        assert packaged == [(problem.prompt, problem.answer) for problem in made]


def test_a_packaged_prompt_in_a_training_text_is_refused() -> None:
    code = json.loads(PROMPTS.read_text("utf-8").splitlines()[-60])["prompt"]
    check_unseen(PROMPTS, {"prose": [Document("prose", text=code, held_out=True)]})
    with pytest.raises(ValueError, match="prompts that training saw"):
        check_unseen(PROMPTS, {"prose": [Document("prose", text=f"Before. {code} After.")]})
