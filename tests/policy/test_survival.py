"""Budgets that take the likeliest slots of a batch: by hand, and against every other choice."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.policy import (
    Calibration,
    Chain,
    PerRequest,
    StaticTree,
    StepCost,
    SurvivalBudget,
    build_budget,
)
from specctl.policy.rules import BudgetRule
from specctl.policy.survival import best_rate
from specctl.tree import take
from tests.policy.drafts import (
    STAIRS,
    STEEP,
    VALLEY,
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
from tests.trees import check_tree

TREE = StaticTree(depth=2, top_k=2, num_tokens=6)


def rule(batch_size: int = 2, **fields: object) -> BudgetRule:
    """Of requests that submit six nodes at most, the size of `TREE`."""
    return build_budget(SurvivalBudget(**fields), batch_size=batch_size, max_tokens=6)


@pytest.mark.parametrize(
    ("max_tokens", "kept"),
    [
        # Two chains: .9 and .72 of the sure request, .6 and .3 of the unsure one; two roots.
        (2, [[0], [0]]),
        (3, [[0, 1], [0]]),
        (4, [[0, 1, 2], [0]]),
        (5, [[0, 1, 2], [0, 1]]),
        (6, [[0, 1, 2], [0, 1, 2]]),
        (99, [[0, 1, 2], [0, 1, 2]]),
    ],
)
def test_likeliest_slots_of_the_batch(max_tokens: int, kept: list[list[int]]) -> None:
    pool, submitted = draft(Chain(num_draft_tokens=2), [sure, unsure])
    found = share(rule(max_tokens=max_tokens), pool, submitted)
    assert [[node for node in row if node >= 0] for row in found.tolist()] == kept
    assert found.shape == submitted.shape


@pytest.mark.parametrize(("costs", "size"), [(STAIRS, 2), (VALLEY, 4), (STEEP, 0)])
def test_size_is_the_global_best_of_tokens_per_time(costs: StepCost, size: int) -> None:
    pool, submitted = draft(Chain(num_draft_tokens=2), [sure, unsure])
    kept = share(rule(costs=costs), pool, submitted)
    assert int((kept >= 0).sum()) == 2 + size


def test_a_cap_binds_the_search() -> None:
    pool, submitted = draft(Chain(num_draft_tokens=2), [sure, unsure])
    kept = share(rule(costs=VALLEY, max_tokens=5), pool, submitted)
    assert int((kept >= 0).sum()) == 5
    steep = share(rule(costs=VALLEY, max_tokens=4), pool, submitted)
    assert int((steep >= 0).sum()) == 2, "neither 3 nor 4 tokens beat the roots alone"


def test_of_equal_rates_the_smaller_size_wins() -> None:
    assert int(best_rate(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0]))) == 0


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_of_that_size_expects_more(seed: int) -> None:
    pool, submitted = draft(TREE, [random_law(seed), random_law(100 + seed)])
    choices = all_choices(pool, submitted)
    for size in (2, 4, 7, 10):
        kept = chosen(share(rule(max_tokens=size), pool, submitted))
        assert kept in choices, "closed, rooted, and of what was submitted"
        assert num_tokens(kept) == size
        best = max(expected_tokens(pool, c) for c in choices if num_tokens(c) == size)
        assert expected_tokens(pool, kept) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("cap", [6, 12])
@pytest.mark.parametrize("seed", range(8))
def test_no_other_choice_has_a_better_rate(seed: int, cap: int) -> None:
    """On a staircase with one captured size a stair, and a line beyond the last."""
    stairs = StepCost(token_counts=(2, 4, 7, 8), step_us=(30.0, 31.0 + seed, 45.0, 49.0 + seed))
    pool, submitted = draft(TREE, [random_law(seed), random_law(200 + seed)])
    table = stairs.step_table(12).tolist()
    rates = {
        choice: expected_tokens(pool, choice) / table[num_tokens(choice)]
        for choice in all_choices(pool, submitted)
        if num_tokens(choice) <= cap
    }
    kept = chosen(share(rule(costs=stairs, max_tokens=cap), pool, submitted))
    assert rates[kept] == pytest.approx(max(rates.values()), rel=1e-12)


def certain(path: tuple[int, ...]) -> list[float]:
    return [1.0, 0.0]


def test_ties_go_to_the_shallower_then_to_the_earlier_request() -> None:
    pool, submitted = draft(Chain(num_draft_tokens=3), [certain, certain, certain])
    kept = share(rule(batch_size=3, max_tokens=8), pool, submitted)
    assert (kept >= 0).sum(1).tolist() == [3, 3, 2]
    check_tree(take(pool.tree, kept))


def test_ragged_submissions() -> None:
    """A row that submits less pads; padding is never taken, whatever the budget."""
    pool, submitted = draft(Chain(num_draft_tokens=3), [sure, unsure])
    submitted[0, 2:] = -1
    kept = share(rule(max_tokens=50), pool, submitted)
    assert chosen(kept) == ({0, 1}, {0, 1, 2, 3})


def test_wide_batches_take_the_same_nodes() -> None:
    """Enough slots that top-k of keys ranks them; one request alone is sorted whole."""
    laws = [random_law(seed) for seed in range(300)]
    pool, submitted = draft(StaticTree(depth=3, top_k=3, num_tokens=16), laws)
    assert submitted.numel() > 4096
    kept = share(rule(batch_size=300, max_tokens=1000), pool, submitted)
    logp = pool.joint_logp.gather(1, submitted)
    bar = logp[:, 1:].flatten().sort(descending=True).values[699]
    wanted = submitted.masked_fill(logp < bar, -1).tolist()
    assert chosen(kept) == tuple(frozenset(set(row) - {-1}) for row in wanted)


# --------------------------------------------------------------------------- calibration


def test_calibration_reorders_across_depths() -> None:
    """Depth 2 is known to hold far less than the drafter says: .72 falls behind the other's .6."""
    pool, submitted = draft(Chain(num_draft_tokens=2), [sure, unsure])
    doubt = Calibration(slopes=(1.0, 0.5), intercepts=(0.0, -0.5))
    # Depth 2 of the sure request: logit .8 = 1.386, halved less .5 = .193, sigmoid .548; .9 · .548.
    kept = share(rule(max_tokens=4, calibration=doubt), pool, submitted)
    assert chosen(kept) == ({0, 1}, {0, 1})


def test_an_identity_calibration_changes_nothing() -> None:
    pool, submitted = draft(TREE, [random_law(1), random_law(2)])
    same = Calibration(slopes=(1.0,), intercepts=(0.0,))
    for size in (3, 6, 9):
        plain = share(rule(max_tokens=size), pool, submitted)
        assert torch.equal(share(rule(max_tokens=size, calibration=same), pool, submitted), plain)


# --------------------------------------------------------------------------- refusals


def test_what_cannot_be_decided_is_refused() -> None:
    with pytest.raises(UsageError, match="specctl profile"):
        rule()
    with pytest.raises(UsageError, match="at least the batch size, 2"):
        rule(max_tokens=1)
    flat = StepCost(token_counts=(1, 8), step_us=(10.0, 10.0))
    with pytest.raises(UsageError, match="flat"):
        rule(costs=flat)


def test_per_request_leaves_all_as_it_is() -> None:
    pool, submitted = draft(TREE, [random_law(1)])
    same = build_budget(PerRequest(), batch_size=1, max_tokens=6)
    assert share(same, pool, submitted) is submitted
