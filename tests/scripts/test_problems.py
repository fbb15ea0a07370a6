"""The generated problems: distinct, right, and the packaged ones unseen by training."""

import json

import pytest

from scripts.embedded_pair.corpus import HELD_OUT_SEED, Document, check_unseen, problem_documents
from scripts.embedded_pair.problems import generate
from specctl.answers import is_correct
from specctl.embedded import PROMPTS

CATEGORIES = ("arithmetic", "strings")


@pytest.mark.parametrize("category", CATEGORIES)
def test_problems_are_distinct_and_end_in_their_answer(category: str) -> None:
    problems = generate(category, 1, 2000)
    assert len({p.prompt for p in problems}) == len(problems)
    assert all(is_correct(p.solution, p.answer) for p in problems)


@pytest.mark.parametrize("category", CATEGORIES)
def test_training_never_sees_a_held_out_prompt(category: str) -> None:
    held_out = {problem.prompt for problem in generate(category, HELD_OUT_SEED, 2000)}
    train = {document.question for document in problem_documents(category)}
    assert len(train) > 2000
    assert not held_out & train


def test_packaged_problems_are_the_first_held_out_ones() -> None:
    rows = [json.loads(line) for line in PROMPTS.read_text("utf-8").splitlines()]
    for category in CATEGORIES:
        packaged = [(r["prompt"], r["answer"]) for r in rows if r["category"] == category]
        made = generate(category, HELD_OUT_SEED, len(packaged))
        assert packaged == [(problem.prompt, problem.answer) for problem in made]


def test_a_packaged_prompt_in_a_training_text_is_refused() -> None:
    code = json.loads(PROMPTS.read_text("utf-8").splitlines()[-60])["prompt"]
    with pytest.raises(ValueError, match="prompts that training saw"):
        check_unseen(PROMPTS, {"prose": [Document("prose", f"Before. {code} After.")]})
