"""Budgets: the likeliest nodes of a batch against every other choice, ECHO's against a telling."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl import policy
from specctl.errors import UsageError
from specctl.policy.budgets import best_rate, best_surplus, calibration_table, draft_log_odds
from specctl.tree import DraftPool, TokenTree, gather, take
from tests.policy import drafts
from tests.trees import check_tree

TREE = policy.StaticTree(depth=2, top_k=2, num_tokens=6)
PAIR = (policy.Chain(num_draft_tokens=2), [drafts.sure, drafts.unsure])
"""Two chains: .9 and .72 of the sure request, .6 and .3 of the unsure one."""


def shared(budget: policy.Budget, pool: DraftPool, submitted: torch.Tensor) -> drafts.Choice:
    """What a budget keeps of requests that submit six nodes at most, the size of `TREE`."""
    rule = policy.build_budget(budget, batch_size=len(submitted), max_tokens=6)
    return checked_choice(pool, submitted, drafts.share(rule, pool, submitted))


def checked_choice(pool: DraftPool, submitted: torch.Tensor, kept: torch.Tensor) -> drafts.Choice:
    assert kept.shape == submitted.shape
    check_tree(take(pool, kept))
    return drafts.chosen(kept)


def survival(**fields: object) -> policy.SurvivalBudget:
    return policy.SurvivalBudget(**fields)  # type: ignore[arg-type]


def marginal(tokens_per_us: float, costs: policy.StepCost | None) -> policy.MarginalBudget:
    return policy.MarginalBudget(tokens_per_s=tokens_per_us * 1e6, costs=costs)


def test_of_equal_rates_the_smaller_size_wins_and_of_equal_surplus_the_larger() -> None:
    assert int(best_rate(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0]))) == 0
    tokens, cost = torch.tensor([2.0, 2.5, 2.75]), torch.tensor([4.0, 5.0, 6.0])
    assert int(best_surplus(tokens, cost, 0.5)) == 1
    assert int(best_surplus(tokens, cost, 0.25)) == 2


@pytest.mark.parametrize("seed", range(6))
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
    """On a staircase with one captured size a stair, and a line beyond the last: rates descend in
    front of the best one.

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


def test_ties_go_to_the_shallower_then_to_the_earlier_request() -> None:
    drafted = drafts.draft(policy.Chain(num_draft_tokens=3), [drafts.certain_law] * 3)
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


def acceptance_prob(record: policy.Calibration, tree: TokenTree) -> torch.Tensor:
    return calibration_table(record, torch.device("cpu")).acceptance_logp(tree).exp()


def test_a_calibrated_path_by_hand() -> None:
    """Depth 1: logit .9 = 2.197, halved 1.099, sigmoid .75. Depth 2: logit .8 = 1.386, less 1,
    sigmoid .5954. Depth 3 has no entry of its own: as depth 2."""
    pool, _ = drafts.draft(policy.Chain(num_draft_tokens=3), [drafts.sure])
    record = policy.Calibration(slopes=(0.5, 1.0), intercepts=(0.0, -1.0))
    own = 1 / (1 + math.exp(1 - math.log(4)))
    wanted = [1.0, 0.75, 0.75 * own, 0.75 * own**2]
    assert acceptance_prob(record, pool)[0].tolist() == pytest.approx(wanted, rel=1e-6)


NUMBERS = st.floats(-30, 30, allow_nan=False)


@settings(max_examples=60)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5), st.integers(0, 50))
def test_no_child_is_likelier_than_its_parent(lines: list[tuple[float, float]], seed: int) -> None:
    pool, _ = drafts.draft(
        policy.StaticTree(depth=3, top_k=3, num_tokens=10), [drafts.random_law(seed)]
    )
    slopes, intercepts = zip(*lines, strict=True)
    prob = acceptance_prob(policy.Calibration(slopes=slopes, intercepts=intercepts), pool)
    assert bool(torch.isfinite(prob).all())
    assert bool((prob <= gather(prob, pool.parent, 1.0)).all())


def test_odds_of_certain_and_impossible_tokens_are_finite() -> None:
    odds = draft_log_odds(torch.tensor([0.0, -0.0, -1e-12, -1e3, float("-inf"), math.log(0.5)]))
    assert odds.tolist() == pytest.approx([16, 16, 16, -16, -16, 0], abs=1e-6)


def test_calibration_reorders_across_depths() -> None:
    """Depth 2 is known to hold far less than the drafter says: .72 falls behind the other's .6."""
    doubt = policy.Calibration(slopes=(1.0, 0.5), intercepts=(0.0, -0.5))
    # Depth 2 of the sure request: logit .8 = 1.386, halved less .5 = .193, sigmoid .548; .9 · .548.
    kept = shared(survival(max_tokens=4, calibration=doubt), *drafts.draft(*PAIR))
    assert kept == ({0, 1}, {0, 1})


FLAT = policy.StepCost(token_counts=(1, 8), step_us=(10.0, 10.0))
FLAT_END = policy.StepCost(token_counts=(1, 2, 4), step_us=(10.0, 20.0, 20.0))


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (survival(), "specctl profile"),
        (survival(max_tokens=1), "below the batch size, 2"),
        (survival(costs=FLAT), "flat"),
        (marginal(0.1, None), "specctl profile"),
        (marginal(0.1, FLAT_END), "flat"),
        (policy.ElasticBudget(max_tokens=1), "echo_budget.*below the batch size, 2"),
    ],
)
def test_what_cannot_be_decided_is_refused(budget: policy.Budget, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        policy.build_budget(budget, batch_size=2, max_tokens=6)


# --------------------------------------------------------------------------- ECHO


def round_of(shape: policy.Shape, laws: list[drafts.Probabilities]) -> drafts.Round:
    return drafts.play(policy.build_shape(shape), laws)


def elastic(given: drafts.Round, max_tokens: int, **fields: object) -> drafts.Choice:
    budget = policy.ElasticBudget(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    rule = policy.build_budget(budget, batch_size=len(given[2]), max_tokens=given[2].shape[1])
    return checked_choice(given.pool, given.submitted, rule.share(*given[:3]))


def always(*law: float) -> drafts.Probabilities:
    return lambda path: list(law)


LOST, FAIR, SURE = always(0.4, 0.35, 0.25), always(0.7, 0.2, 0.1), always(0.9, 0.06, 0.04)
GATED = policy.SparseGates(depth=3, width=1, max_width=3, gate_levels=(1,), thresholds=(0.5,))
# DraftPool indices: level 1 at 1 to 3, level 2 at 4 to 6, level 3 at 7 to 9. `LOST` is truncated at
# level 1 and may be widened there to 1, 2, 3; the others deepen along 1, 4, 7.


@pytest.mark.parametrize(
    ("max_tokens", "kept"),
    [
        (3, [{0}, {0}, {0}]),
        # High load: the surest deepens first although its row is the last one.
        (4, [{0}, {0}, {0, 1}]),
        (5, [{0}, {0, 1}, {0, 1}]),
        (6, [{0}, {0, 1}, {0, 1, 4}]),
        (9, [{0}, {0, 1, 4, 7}, {0, 1, 4, 7}]),
        # Low load: all have deepened as far as they may, the rest widens the truncated one.
        (10, [{0, 1}, {0, 1, 4, 7}, {0, 1, 4, 7}]),
        (12, [{0, 1, 2, 3}, {0, 1, 4, 7}, {0, 1, 4, 7}]),
        (99, [{0, 1, 2, 3}, {0, 1, 4, 7}, {0, 1, 4, 7}]),
    ],
)
def test_what_a_gate_frees_deepens_others_first(max_tokens: int, kept: list[set[int]]) -> None:
    given = round_of(GATED, [LOST, FAIR, SURE])
    assert given[0].stopped_at.tolist() == [1, 0, 0]
    assert elastic(given, max_tokens, default_width=1, max_width=3) == tuple(kept)


def test_ties_go_to_the_earlier_row() -> None:
    given = round_of(policy.Chain(num_draft_tokens=2), [FAIR, FAIR, FAIR])
    assert elastic(given, 5, default_width=1) == ({0, 1}, {0, 1}, {0})


def told_plainly(
    given: drafts.Round, max_tokens: int, default_width: int, max_width: int, *, by_row: bool
) -> drafts.Choice:
    """Algorithm 1 with the settled repairs, over Python lists, one request and node at a time."""
    plan, pool, submitted, _ = given
    rows = range(len(submitted))
    nodes = [[n for n in row if n > 0] for row in submitted.tolist()]
    depth, parent = pool.depth.tolist(), pool.parent.tolist()
    score = pool.joint_logp.tolist()
    stopped = [0] * len(rows) if plan.stopped_at is None else plan.stopped_at.tolist()
    kept = [{0} for _ in rows]
    budget = max_tokens - len(rows)
    active, d = set(rows), 0

    def best(row: int, among: list[int], number: int) -> list[int]:
        return sorted(among, key=lambda n: (-score[row][n], n))[:number]

    def fairly(some: dict[int, list[int]]) -> list[int]:
        """Rows by the probability of their best node, or as they stand."""
        waiting = sorted(row for row, among in some.items() if among)
        if by_row:
            return waiting
        return sorted(waiting, key=lambda row: -score[row][best(row, some[row], 1)[0]])

    while budget > 0 and active:
        d += 1
        active -= {row for row in active if d == stopped[row]}
        wanted = {
            row: [n for n in nodes[row] if depth[row][n] == d and parent[row][n] in kept[row]]
            for row in active
        }
        active = {row for row in active if wanted[row]}
        for row in fairly(wanted):
            taken = best(row, wanted[row], min(default_width, budget))
            kept[row] |= set(taken)
            budget -= len(taken)
    while budget > 0:
        rest = {row: [n for n in nodes[row] if n not in kept[row]] for row in rows}
        if not any(rest.values()):
            break
        # Who has no turn left is not asked; a turn is `max_width` nodes, the same for all.
        for row in fairly(rest):
            taken = best(row, rest[row], min(max_width, budget))
            kept[row] |= set(taken)
            budget -= len(taken)
    return tuple(frozenset(k) for k in kept)


SHAPES = {
    "echo": policy.SparseGates(
        depth=4, width=2, max_width=5, gate_levels=(1, 3), thresholds=(0.3, 0.1)
    ),
    "eagle2": policy.StaticTree(depth=3, top_k=3, num_tokens=12),
    "threshold": policy.JointThreshold(depth=4, top_k=4, min_prob=0.03),
    "chain": policy.Chain(num_draft_tokens=4),
}
LAWS = [drafts.random_law(seed, sharpness=1.0 + seed % 4) for seed in range(9)]


@pytest.mark.parametrize("order", ["confidence", "row"])
@pytest.mark.parametrize("widths", [(1, 1), (2, 5), (3, 2)])
@pytest.mark.parametrize("name", SHAPES)
def test_budgets_equal_the_plain_telling(name: str, widths: tuple[int, int], order: str) -> None:
    given = round_of(SHAPES[name], LAWS)
    fields = {"default_width": widths[0], "max_width": widths[1]}
    total = int((given[2] >= 0).sum())
    for max_tokens in {9, 10, 13, 20, 31, total - 3, total, total + 50}:
        kept = elastic(given, max_tokens, order=order, **fields)
        assert kept == told_plainly(given, max_tokens, **fields, by_row=order == "row")
        assert drafts.num_tokens(kept) == min(max_tokens, total), "all of it is used, never more"
