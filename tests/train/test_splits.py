"""Splits are by prompt, deterministic, and leave neither side empty."""

from __future__ import annotations

import pytest

from specctl.errors import TraceEmptyError
from specctl.stats import split_prompts

PROMPTS = [f"prompt-{i}" for i in range(1000)]


def test_sides_are_disjoint_and_cover_all() -> None:
    split = split_prompts(PROMPTS, held_out_frac=0.2, seed=0)
    assert set(split.train) | set(split.held_out) == set(PROMPTS)
    assert not set(split.train) & set(split.held_out)
    assert 150 <= len(split.held_out) <= 250  # 200 expected, standard deviation 12.6


def test_same_seed_same_split_in_any_order() -> None:
    once = split_prompts(PROMPTS, held_out_frac=0.2, seed=7)
    assert once == split_prompts(reversed(PROMPTS * 2), held_out_frac=0.2, seed=7)
    assert once != split_prompts(PROMPTS, held_out_frac=0.2, seed=8)


def test_split_is_the_same_on_every_machine() -> None:
    split = split_prompts(["a", "b", "c", "d", "e", "f"], held_out_frac=0.4, seed=1)
    # sha256 of "1:a" to "1:f" begins 41, 6f, b8, 24, 69, 61: held out below 0.4, so below 0x66
    assert split.held_out == ("a", "d", "f")


def test_new_prompts_move_no_old_one() -> None:
    before = split_prompts(PROMPTS[:500], held_out_frac=0.3, seed=0)
    after = split_prompts(PROMPTS, held_out_frac=0.3, seed=0)
    assert set(before.train) < set(after.train)
    assert set(before.held_out) < set(after.held_out)


@pytest.mark.parametrize("frac", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("seed", range(20))
def test_two_prompts_give_one_each(frac: float, seed: int) -> None:
    split = split_prompts(["a", "b"], held_out_frac=frac, seed=seed)
    assert len(split.train) == len(split.held_out) == 1


@pytest.mark.parametrize("prompts", [[], ["only"], ["only", "only"]])
def test_fewer_than_two_prompts_are_refused(prompts: list[str]) -> None:
    with pytest.raises(TraceEmptyError, match="at least 2 prompts"):
        split_prompts(prompts, held_out_frac=0.5, seed=0)
