"""ECHO's elastic budget: drawn batches by hand, and Algorithm 1 told plainly, node by node."""

from __future__ import annotations

from itertools import pairwise

import pytest

from specctl import policy
from specctl.errors import UsageError
from specctl.tree import take
from tests.policy.drafts import Choice, Probabilities, Round, chosen, num_tokens, play, random_law
from tests.trees import check_tree


def round_of(shape: policy.Shape, laws: list[Probabilities]) -> Round:
    return play(policy.build_shape(shape), laws)


def share(given: Round, max_tokens: int, **fields: object) -> Choice:
    budget = policy.ElasticBudget(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    rule = policy.build_budget(budget, batch_size=len(given[2]), max_tokens=given[2].shape[1])
    kept = rule.share(*given[:3])
    assert kept.shape == given[2].shape
    check_tree(take(given[1].tree, kept))
    return chosen(kept)


def sure(path: tuple[int, ...]) -> list[float]:
    return [0.9, 0.06, 0.04]


def fair(path: tuple[int, ...]) -> list[float]:
    return [0.7, 0.2, 0.1]


def lost(path: tuple[int, ...]) -> list[float]:
    return [0.4, 0.35, 0.25]


GATED = policy.SparseGates(depth=3, width=1, max_width=3, gate_levels=(1,), thresholds=(0.5,))
# Pool indices: level 1 at 1 to 3, level 2 at 4 to 6, level 3 at 7 to 9. `lost` is truncated at
# level 1 and may be widened there to 1, 2, 3; the others deepen along 1, 4, 7.
LOST, FAIR, SURE = 0, 1, 2


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
    given = round_of(GATED, [lost, fair, sure])
    assert given[0].stopped_at.tolist() == [1, 0, 0]
    assert share(given, max_tokens, default_width=1, max_width=3) == tuple(kept)


def test_ties_go_to_the_earlier_row() -> None:
    given = round_of(policy.Chain(num_draft_tokens=2), [fair, fair, fair])
    assert share(given, 5, default_width=1) == ({0, 1}, {0, 1}, {0})


def told_plainly(
    given: Round, max_tokens: int, default_width: int, max_width: int, *, by_row: bool
) -> Choice:
    """Algorithm 1 with the settled repairs, over Python lists, one request and node at a time."""
    plan, pool, submitted, _ = given
    rows = range(len(submitted))
    nodes = [[n for n in row if n > 0] for row in submitted.tolist()]
    depth, parent = pool.tree.depth.tolist(), pool.tree.parent.tolist()
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
LAWS = [random_law(seed, sharpness=1.0 + seed % 4) for seed in range(9)]


@pytest.mark.parametrize("order", ["confidence", "row"])
@pytest.mark.parametrize("widths", [(1, 1), (2, 5), (3, 2)])
@pytest.mark.parametrize("name", SHAPES)
def test_budgets_equal_the_plain_telling(name: str, widths: tuple[int, int], order: str) -> None:
    given = round_of(SHAPES[name], LAWS)
    fields = {"default_width": widths[0], "max_width": widths[1]}
    total = int((given[2] >= 0).sum())
    for max_tokens in {9, 10, 13, 20, 31, total - 3, total, total + 50}:
        kept = share(given, max_tokens, order=order, **fields)
        assert kept == told_plainly(given, max_tokens, **fields, by_row=order == "row")
        assert num_tokens(kept) == min(max_tokens, total), "all of it is used, never more"


@pytest.mark.parametrize("name", SHAPES)
def test_more_budget_takes_no_node_away(name: str) -> None:
    given = round_of(SHAPES[name], LAWS)
    choices = [share(given, size, default_width=2) for size in range(9, 80, 5)]
    for less, more in pairwise(choices):
        assert all(few <= many for few, many in zip(less, more, strict=True))


def test_a_budget_below_the_batch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"echo_budget.*at least the batch size, 4"):
        policy.build_budget(policy.ElasticBudget(max_tokens=3), batch_size=4, max_tokens=12)
