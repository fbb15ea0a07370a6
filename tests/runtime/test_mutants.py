"""The law tests must be able to fail: each of these bugs, put in on purpose, has to be seen.

Bugs that others shipped, as far as they apply to point-mass verification. Bugs of
draws are put in and seen in `test_sampling.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.kernels.tree_build import BuiltTree
from specctl.kernels.verify_tree import reference as walk
from specctl.policy import Policy, build_budget, build_shape
from specctl.policy.rules import fresh_start
from specctl.runtime import verifying
from specctl.runtime.requests import RoundRecord
from specctl.runtime.round import Round, trim
from specctl.runtime.state import Rows
from specctl.runtime.verifying import Draft, TargetOutput, Verifier
from specctl.tree import DraftPool
from tests.runtime import table
from tests.runtime.table import ALL_SEEDS, BUDGETS, POLICIES, CellDraw, loop_texts, text_of

Patch = pytest.MonkeyPatch
SEEDS = ALL_SEEDS[::3]
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(install: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[install.__name__] = install
    return install


def admitting(patch: Patch, admit: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Nodes `[B, N]` that the walk follows, by parents, tokens and the target's tokens."""

    def admitted(parent: Tensor, tokens: Tensor, target: Tensor, _: object) -> Tensor:
        return admit(parent, tokens, target) & (parent >= 0)

    patch.setattr(walk, "_admitted", admitted)


@mutant
def always_accept_first_child(patch: Patch) -> None:
    def first(parent: Tensor, tokens: Tensor, target: Tensor) -> Tensor:
        is_first = torch.ones_like(parent, dtype=torch.bool)
        is_first[:, 1:] = parent[:, 1:] != parent[:, :-1]
        return is_first

    admitting(patch, first)


@mutant
def verify_with_own_logits(patch: Patch) -> None:
    admitting(patch, lambda parent, tokens, target: tokens == target)


@mutant
def bonus_always_argmax(patch: Patch) -> None:
    original = Verifier.judge

    def judge(self: Verifier, rows: Rows, draft: Draft, output: TargetOutput, *rest: Any) -> object:
        parent, best = output.tree.parent, output.best_ids[output.laid.node_at]
        is_leaf = torch.ones_like(parent, dtype=torch.bool)
        is_leaf.scatter_(1, parent.clamp(min=0), parent < 0)

        def draw(processed: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
            own = drawn(processed, seeds, positions)
            own[output.laid.node_at[is_leaf]] = best[is_leaf]
            return own

        drawn, self.draw = self.draw, draw
        found = original(self, rows, draft, output, *rest)
        self.draw = drawn
        return found

    patch.setattr(Verifier, "judge", judge)


def drawing(patch: Patch, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> None:
    """Draws from other logits, seeds or positions."""
    original = CellDraw.__call__
    patch.setattr(CellDraw, "__call__", lambda draw, *given: original(draw, *change(*given)))


@mutant
def one_coin_for_all_positions(patch: Patch) -> None:
    drawing(patch, lambda logits, seeds, at: (logits, seeds, at[:1].expand_as(at)))


@mutant
def coin_of_the_position_before(patch: Patch) -> None:
    drawing(patch, lambda logits, seeds, at: (logits, seeds, (at - 1).clamp(min=0)))


@mutant
def rows_swapped_between_requests(patch: Patch) -> None:
    drawing(patch, lambda logits, seeds, at: (logits.roll(1, 0), seeds, at))


@mutant
def coins_of_the_first_request_for_all(patch: Patch) -> None:
    drawing(patch, lambda logits, seeds, at: (logits, seeds[:1].expand_as(seeds), at))


@mutant
def coins_by_row_instead_of_by_request(patch: Patch) -> None:
    rows = lambda seeds: seeds.unique(return_inverse=True)[1]  # noqa: E731
    drawing(patch, lambda logits, seeds, at: (logits, rows(seeds), at))


@mutant
def stale_kv_after_accepting(patch: Patch) -> None:
    patch.setattr(table._TextCache, "commit", lambda *_: None)


@mutant
def policy_drops_a_drawn_token(patch: Patch) -> None:
    """What is verified depends on what the target drew."""
    original = CellDraw.__call__

    def redraw(draw: CellDraw, processed: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        own = original(draw, processed, seeds, positions)
        return torch.where(own == 2, processed.argmax(-1), own)

    patch.setattr(CellDraw, "__call__", redraw)


@mutant
def prefill_greedy_under_sampling(patch: Patch) -> None:
    patch.setattr(Round, "first_token", lambda self, logits, sampling: logits.argmax(-1))


@mutant
def tree_not_closed(patch: Patch) -> None:
    original = verifying.link_tree

    def link(pool: DraftPool, submitted: Tensor, *rest: Any, **named: Any) -> BuiltTree:
        """Nodes whose parent is dropped hang from the root."""
        tree = original(pool, submitted, *rest, **named)
        return tree._replace(parent=tree.parent.clamp(max=0))

    patch.setattr(verifying, "link_tree", link)


@mutant
def requests_that_leave_are_not_moved(patch: Patch) -> None:
    patch.setattr(table._TextCache, "move", lambda *_: None)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name: str, monkeypatch: Patch) -> None:
    MUTANTS[name](monkeypatch)
    assert any(differs(POLICIES[policy]) for policy in ("chain", "eagle2-wide"))


def differs(policy: Policy) -> bool:
    """Whether some text is not the one that its coins mean; a crash would prove nothing."""
    texts = loop_texts(policy, seeds=SEEDS)
    return texts != {seed: text_of(seed) for seed in SEEDS}


class BudgetCheck:
    """Whether each round verified what the budget says of that round's own drafts."""

    def __init__(self, policy: Policy) -> None:
        self.shape = build_shape(policy.shape)
        self.budget = build_budget(policy.budget, batch_size=4, max_tokens=self.shape.max_tokens)
        self.share, self.num_wrong = type(self.budget).share, 0

    def on_round(self, record: RoundRecord) -> None:
        plan = self.shape.begin(fresh_start(len(record.requests)))
        wanted = self.shape.select(plan, record.pool)
        shared = trim(self.share(self.budget, plan, record.pool, wanted))
        self.num_wrong += not torch.equal(shared, record.submitted)


BUDGET = BUDGETS["wide+survival"]


def test_a_round_shares_its_own_budget() -> None:
    check = BudgetCheck(BUDGET)
    loop_texts(BUDGET, 4, SEEDS, observer=check)
    assert check.num_wrong == 0


def test_a_stale_budget_is_seen(monkeypatch: Patch) -> None:
    """Last round's shares, where they fit: texts may come out right, the work does not."""
    check = BudgetCheck(BUDGET)
    last: list[Tensor] = []

    def stale(self: object, plan: object, pool: DraftPool, submitted: Tensor) -> Tensor:
        last.append(check.share(self, plan, pool, submitted))
        before = last[-2] if len(last) > 1 else last[-1]
        return before if before.shape == last[-1].shape else last[-1]

    monkeypatch.setattr(type(check.budget), "share", stale)
    loop_texts(BUDGET, 4, SEEDS, observer=check)
    assert check.num_wrong > 0
