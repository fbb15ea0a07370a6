"""Budgets that take the likeliest nodes of a batch: by hand, and against every other choice."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl import policy
from specctl.errors import UsageError
from specctl.features import DraftPool
from specctl.policy.budgets import best_rate, best_surplus, calibration_table, draft_log_odds
from specctl.tree import TokenTree, gather, take
from tests.policy import drafts
from tests.trees import check_tree

TREE = policy.StaticTree(depth=2, top_k=2, num_tokens=6)
PAIR = (policy.Chain(num_draft_tokens=2), [drafts.sure, drafts.unsure])
"""Two chains: .9 and .72 of the sure request, .6 and .3 of the unsure one."""


def shared(budget: policy.Budget, pool: DraftPool, submitted: torch.Tensor) -> drafts.Choice:
    """What a budget keeps of requests that submit six nodes at most, the size of `TREE`."""
    rule = policy.build_budget(budget, batch_size=len(submitted), max_tokens=6)
    kept = drafts.share(rule, pool, submitted)
    assert kept.shape == submitted.shape
    check_tree(take(pool.tree, kept))
    return drafts.chosen(kept)


def survival(**fields: object) -> policy.SurvivalBudget:
    return policy.SurvivalBudget(**fields)  # type: ignore[arg-type]


def marginal(tokens_per_us: float, costs: policy.StepCost | None) -> policy.MarginalBudget:
    return policy.MarginalBudget(tokens_per_s=tokens_per_us * 1e6, costs=costs)


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        (survival(costs=drafts.STAIRS), 2),
        (survival(costs=drafts.VALLEY), 4),
        (survival(costs=drafts.STEEP), 0),
        # A cap binds the search; neither 3 nor 4 tokens beat the roots alone.
        (survival(costs=drafts.VALLEY, max_tokens=5), 3),
        (survival(costs=drafts.VALLEY, max_tokens=4), 0),
        # m                    0      1      2      3      4      (as in tests/policy/drafts.py)
        # tokens             2.0    2.9   3.62   4.22   4.52
        # less .2 · us       0.0    0.5   1.22   0.22   0.52
        (marginal(0.2, drafts.STAIRS), 2),
        # less .01 · us      1.9   2.78   3.50   4.02   4.32
        (marginal(0.01, drafts.STAIRS), 4),
        # less 1 · us         -8   -9.1   -8.4  -15.8  -15.5
        (marginal(1.0, drafts.STAIRS), 0),
    ],
)
def test_the_size_is_the_global_best(budget: policy.Budget, size: int) -> None:
    assert drafts.num_tokens(shared(budget, *drafts.draft(*PAIR))) == 2 + size


def test_of_equal_rates_the_smaller_size_wins_and_of_equal_surplus_the_larger() -> None:
    assert int(best_rate(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0]))) == 0
    tokens, cost = torch.tensor([2.0, 2.5, 2.75]), torch.tensor([4.0, 5.0, 6.0])
    assert int(best_surplus(tokens, cost, 0.5)) == 1
    assert int(best_surplus(tokens, cost, 0.25)) == 2


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_of_that_size_expects_more(seed: int) -> None:
    drafted = drafts.draft(TREE, [drafts.random_law(seed), drafts.random_law(100 + seed)])
    choices = drafts.all_choices(*drafted)
    for size in (2, 4, 7, 10):
        kept = shared(survival(max_tokens=size), *drafted)
        assert kept in choices, "closed, rooted, and of what was submitted"
        assert drafts.num_tokens(kept) == size
        best = max(
            drafts.expected_tokens(drafted[0], c) for c in choices if drafts.num_tokens(c) == size
        )
        assert drafts.expected_tokens(drafted[0], kept) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_no_other_choice_has_a_better_rate_or_surplus(seed: int) -> None:
    """On a staircase with one captured size a stair, and a line beyond the last.

    Dinkelbach: with the best rate of the round as the price, that round achieves it.
    """
    stairs = policy.StepCost(
        token_counts=(2, 4, 7, 8), step_us=(30.0, 31.0 + seed, 45.0, 49.0 + seed)
    )
    drafted = drafts.draft(TREE, [drafts.random_law(seed), drafts.random_law(200 + seed)])
    us = stairs.step_table(12).tolist()
    found = {
        c: (drafts.expected_tokens(drafted[0], c), us[drafts.num_tokens(c)])
        for c in drafts.all_choices(*drafted)
    }
    for cap in (6, 12):
        best = max(tokens / us for c, (tokens, us) in found.items() if drafts.num_tokens(c) <= cap)
        tokens, spent = found[shared(survival(costs=stairs, max_tokens=cap), *drafted)]
        assert tokens / spent == pytest.approx(best, rel=1e-12)
    for price in (0.01, 0.05, 0.2, best):
        most = max(tokens - price * us for tokens, us in found.values())
        tokens, spent = found[shared(marginal(price, stairs), *drafted)]
        assert tokens - price * spent == pytest.approx(most, abs=1e-12)
    assert tokens / spent == pytest.approx(best)


LINEAR = policy.StepCost(token_counts=(1, 2), step_us=(100.0, 110.0))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bar", [0.02, 0.1, 0.3, 0.7])
def test_a_line_makes_it_a_threshold(seed: int, bar: float) -> None:
    """Each token costs 10 us: a node is verified iff its probability is at least rate · 10 us."""
    pool, submitted = drafts.draft(TREE, [drafts.random_law(seed), drafts.random_law(50 + seed)])
    prob = pool.joint_logp.double().exp()
    wanted = tuple(
        frozenset(node for node in nodes if node == 0 or prob[row, node] >= bar)
        for row, nodes in enumerate(submitted.tolist())
    )
    assert shared(marginal(bar / 10, LINEAR), pool, submitted) == wanted


def certain(path: tuple[int, ...]) -> list[float]:
    return [1.0, 0.0]


def test_ties_go_to_the_shallower_then_to_the_earlier_request() -> None:
    drafted = drafts.draft(policy.Chain(num_draft_tokens=3), [certain, certain, certain])
    assert [len(row) for row in shared(survival(max_tokens=8), *drafted)] == [3, 3, 2]


def test_padding_is_never_taken() -> None:
    pool, submitted = drafts.draft(policy.Chain(num_draft_tokens=3), [drafts.sure, drafts.unsure])
    submitted[0, 2:] = -1
    assert shared(survival(max_tokens=50), pool, submitted) == ({0, 1}, {0, 1, 2, 3})


def test_wide_batches_take_the_same_nodes() -> None:
    """Enough slots that top-k of keys ranks them; one request alone is sorted whole."""
    laws = [drafts.random_law(seed) for seed in range(300)]
    pool, submitted = drafts.draft(policy.StaticTree(depth=3, top_k=3, num_tokens=16), laws)
    assert submitted.numel() > 4096
    logp = pool.joint_logp.gather(1, submitted)
    bar = logp[:, 1:].flatten().sort(descending=True).values[699]
    wanted = submitted.masked_fill(logp < bar, -1)
    assert shared(survival(max_tokens=1000), pool, submitted) == drafts.chosen(wanted)


def test_per_request_leaves_all_as_it_is() -> None:
    pool, submitted = drafts.draft(TREE, [drafts.random_law(1)])
    same = policy.build_budget(policy.PerRequest(), batch_size=1, max_tokens=6)
    assert drafts.share(same, pool, submitted) is submitted


def acceptance_prob(record: policy.Calibration, tree: TokenTree) -> torch.Tensor:
    return calibration_table(record, torch.device("cpu")).acceptance_logp(tree).exp()


def test_a_calibrated_path_by_hand() -> None:
    """Depth 1: logit .9 = 2.197, halved 1.099, sigmoid .75. Depth 2: logit .8 = 1.386, less 1,
    sigmoid .5954. Depth 3 has no entry of its own: as depth 2."""
    pool, _ = drafts.draft(policy.Chain(num_draft_tokens=3), [drafts.sure])
    record = policy.Calibration(slopes=(0.5, 1.0), intercepts=(0.0, -1.0))
    own = 1 / (1 + math.exp(1 - math.log(4)))
    wanted = [1.0, 0.75, 0.75 * own, 0.75 * own**2]
    assert acceptance_prob(record, pool.tree)[0].tolist() == pytest.approx(wanted, rel=1e-6)


NUMBERS = st.floats(-30, 30, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5), st.integers(0, 50))
def test_no_child_is_likelier_than_its_parent(lines: list[tuple[float, float]], seed: int) -> None:
    pool, _ = drafts.draft(
        policy.StaticTree(depth=3, top_k=3, num_tokens=10), [drafts.random_law(seed)]
    )
    slopes, intercepts = zip(*lines, strict=True)
    prob = acceptance_prob(policy.Calibration(slopes=slopes, intercepts=intercepts), pool.tree)
    assert bool(torch.isfinite(prob).all())
    assert bool((prob <= gather(prob, pool.tree.parent, 1.0)).all())


def test_odds_of_certain_and_impossible_tokens_are_finite() -> None:
    odds = draft_log_odds(torch.tensor([0.0, -0.0, -1e-12, -1e3, float("-inf"), math.log(0.5)]))
    assert odds.tolist() == pytest.approx([16, 16, 16, -16, -16, 0], abs=1e-6)


def test_calibration_reorders_across_depths() -> None:
    """Depth 2 is known to hold far less than the drafter says: .72 falls behind the other's .6."""
    doubt = policy.Calibration(slopes=(1.0, 0.5), intercepts=(0.0, -0.5))
    # Depth 2 of the sure request: logit .8 = 1.386, halved less .5 = .193, sigmoid .548; .9 · .548.
    kept = shared(survival(max_tokens=4, calibration=doubt), *drafts.draft(*PAIR))
    assert kept == ({0, 1}, {0, 1})


def test_an_identity_calibration_changes_nothing() -> None:
    drafted = drafts.draft(TREE, [drafts.random_law(1), drafts.random_law(2)])
    same = policy.Calibration(slopes=(1.0,), intercepts=(0.0,))
    for size in (3, 6, 9):
        plain = shared(survival(max_tokens=size), *drafted)
        assert shared(survival(max_tokens=size, calibration=same), *drafted) == plain


FLAT = policy.StepCost(token_counts=(1, 8), step_us=(10.0, 10.0))
FLAT_END = policy.StepCost(token_counts=(1, 2, 4), step_us=(10.0, 20.0, 20.0))


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (survival(), "specctl profile"),
        (survival(max_tokens=1), "at least the batch size, 2"),
        (survival(costs=FLAT), "flat"),
        (marginal(0.1, None), "specctl profile"),
        (marginal(0.1, FLAT_END), "flat"),
    ],
)
def test_what_cannot_be_decided_is_refused(budget: policy.Budget, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        policy.build_budget(budget, batch_size=2, max_tokens=6)
