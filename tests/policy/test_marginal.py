"""The marginal rule: by hand, against every other choice, and at its fixed point."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.policy import Chain, MarginalBudget, StaticTree, StepCost, build_budget
from specctl.policy.rules import BudgetRule
from specctl.policy.survival import best_surplus
from tests.policy.drafts import (
    STAIRS,
    all_choices,
    chosen,
    draft,
    expected_tokens,
    num_tokens,
    random_law,
    share,
    sure,
    unsure,
)

TREE = StaticTree(depth=2, top_k=2, num_tokens=6)


def rule(tokens_per_us: float, costs: StepCost | None, max_tokens: int = 6) -> BudgetRule:
    budget = MarginalBudget(tokens_per_s=tokens_per_us * 1e6, costs=costs)
    return build_budget(budget, batch_size=2, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("tokens_per_us", "size"),
    [
        # m                    0      1      2      3      4      (as in tests/policy/drafts.py)
        # tokens             2.0    2.9   3.62   4.22   4.52
        # less .2 · us       0.0    0.5   1.22   0.22   0.52
        (0.2, 2),
        # less .01 · us      1.9   2.78   3.50   4.02   4.32
        (0.01, 4),
        # less 1 · us         -8   -9.1   -8.4  -15.8  -15.5
        (1.0, 0),
    ],
)
def test_size_by_hand(tokens_per_us: float, size: int) -> None:
    pool, submitted = draft(Chain(num_draft_tokens=2), [sure, unsure])
    kept = share(rule(tokens_per_us, STAIRS, max_tokens=3), pool, submitted)
    assert int((kept >= 0).sum()) == 2 + size


LINEAR = StepCost(token_counts=(1, 2), step_us=(100.0, 110.0))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bar", [0.02, 0.1, 0.3, 0.7])
def test_a_line_makes_it_a_threshold(seed: int, bar: float) -> None:
    """Each token costs 10 us: a node is verified iff its probability is at least rate · 10 us."""
    pool, submitted = draft(TREE, [random_law(seed), random_law(50 + seed)])
    prob = pool.joint_logp.double().exp()
    wanted = tuple(
        frozenset(node for node in nodes if node == 0 or prob[row, node] >= bar)
        for row, nodes in enumerate(submitted.tolist())
    )
    assert chosen(share(rule(bar / 10, LINEAR), pool, submitted)) == wanted


def test_a_node_that_just_pays_is_verified() -> None:
    tokens, cost = torch.tensor([2.0, 2.5, 2.75]), torch.tensor([4.0, 5.0, 6.0])
    assert int(best_surplus(tokens, cost, 0.5)) == 1
    assert int(best_surplus(tokens, cost, 0.25)) == 2


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("tokens_per_us", [0.01, 0.05, 0.2])
def test_no_other_choice_has_a_larger_surplus(seed: int, tokens_per_us: float) -> None:
    stairs = StepCost(token_counts=(2, 4, 7, 8), step_us=(30.0, 31.0 + seed, 45.0, 49.0 + seed))
    pool, submitted = draft(TREE, [random_law(seed), random_law(70 + seed)])
    table = stairs.step_table(12).tolist()
    surplus = {
        choice: expected_tokens(pool, choice) - tokens_per_us * table[num_tokens(choice)]
        for choice in all_choices(pool, submitted)
    }
    kept = chosen(share(rule(tokens_per_us, stairs), pool, submitted))
    assert surplus[kept] == pytest.approx(max(surplus.values()), abs=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_the_price_that_it_achieves_is_the_best_rate(seed: int) -> None:
    """Dinkelbach: with the best rate of one round as the price, that round achieves it."""
    pool, submitted = draft(TREE, [random_law(seed), random_law(90 + seed)])
    table = STAIRS.step_table(12).tolist()
    choices = all_choices(pool, submitted)
    best = max(expected_tokens(pool, c) / table[num_tokens(c)] for c in choices)
    kept = chosen(share(rule(best, STAIRS), pool, submitted))
    assert expected_tokens(pool, kept) / table[num_tokens(kept)] == pytest.approx(best)


def test_costs_are_required() -> None:
    with pytest.raises(UsageError, match="specctl profile"):
        rule(0.1, None)
    flat_end = StepCost(token_counts=(1, 2, 4), step_us=(10.0, 20.0, 20.0))
    with pytest.raises(UsageError, match="flat"):
        rule(0.1, flat_end)
