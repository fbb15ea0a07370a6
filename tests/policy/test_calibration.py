"""Calibrated acceptance: by hand, monotone along paths, finite at the ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.policy import Calibration, Chain, StaticTree
from specctl.policy.budgets import calibration_table, draft_log_odds
from specctl.tree import TokenTree, gather
from tests.policy.drafts import draft, random_law

CPU = torch.device("cpu")


def acceptance_prob(record: Calibration, tree: TokenTree) -> torch.Tensor:
    return calibration_table(record, CPU).acceptance_logp(tree).exp()


def test_path_by_hand() -> None:
    """Depth 1: logit .9 = 2.197, halved 1.099, sigmoid .75. Depth 2: logit .8 = 1.386, less 1,
    sigmoid .5954. Depth 3 has no entry of its own: as depth 2."""
    laws = [lambda path: [0.9, 0.1] if not path else [0.8, 0.2]]
    pool, _ = draft(Chain(num_draft_tokens=3), laws)
    record = Calibration(slopes=(0.5, 1.0), intercepts=(0.0, -1.0))
    own = 1 / (1 + math.exp(1 - math.log(4)))
    wanted = [1.0, 0.75, 0.75 * own, 0.75 * own**2]
    assert acceptance_prob(record, pool.tree)[0].tolist() == pytest.approx(wanted, rel=1e-6)


NUMBERS = st.floats(-30, 30, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5), st.integers(0, 50))
def test_no_child_is_likelier_than_its_parent(lines: list[tuple[float, float]], seed: int) -> None:
    pool, _ = draft(StaticTree(depth=3, top_k=3, num_tokens=10), [random_law(seed)])
    slopes, intercepts = zip(*lines, strict=True)
    prob = acceptance_prob(Calibration(slopes=slopes, intercepts=intercepts), pool.tree)
    assert bool(torch.isfinite(prob).all())
    assert bool((prob <= gather(prob, pool.tree.parent, 1.0)).all())


def test_certain_and_impossible_tokens_are_finite() -> None:
    odds = draft_log_odds(torch.tensor([0.0, -0.0, -1e-12, -1e3, float("-inf"), math.log(0.5)]))
    assert odds.tolist() == pytest.approx([16, 16, 16, -16, -16, 0], abs=1e-6)
