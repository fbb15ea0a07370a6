"""The law tests must be able to fail: each of these bugs, put in on purpose, has to be seen.

The list is notes/reliability.md 1.4, as far as it applies to point-mass verification. Bugs of
packed passes are put in and seen in `test_packing.py`, bugs of the race in `test_race.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.policy import Policy, build_budget, build_shape
from specctl.policy.rules import BaseShape, fresh_start
from specctl.policy.verification import StrictAcceptance
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.observe import RoundRecord, Sampling
from specctl.runtime.round import Round, trim
from specctl.tree import TokenTree
from tests.runtime import table
from tests.runtime.inversion import CellDraw
from tests.runtime.loops import ALL_SEEDS, BUDGETS, POLICIES, loop_texts, text_of

Patch = pytest.MonkeyPatch
SEEDS = ALL_SEEDS[::3]
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(install: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[install.__name__] = install
    return install


@mutant
def always_accept_first_child(patch: Patch) -> None:
    def admit(self: StrictAcceptance, tree: TokenTree, target_ids: Tensor) -> Tensor:
        first = torch.ones_like(tree.parent, dtype=torch.bool)
        first[:, 1:] = tree.parent[:, 1:] != tree.parent[:, :-1]
        return first & (tree.parent >= 0)

    patch.setattr(StrictAcceptance, "admit", admit)


@mutant
def verify_with_own_logits(patch: Patch) -> None:
    def admit(self: StrictAcceptance, tree: TokenTree, target_ids: Tensor) -> Tensor:
        return (tree.token_ids == target_ids) & (tree.parent >= 0)

    patch.setattr(StrictAcceptance, "admit", admit)


@mutant
def bonus_always_argmax(patch: Patch) -> None:
    original = Round.judge

    def judge(
        self: Round, state: object, draft: object, tree: TokenTree, *answer: Tensor
    ) -> object:
        logits, warped, ids = answer
        has_child = torch.zeros_like(ids, dtype=torch.bool)
        has_child.scatter_(1, tree.parent.clamp(min=0), tree.parent >= 0)
        ids = torch.where(has_child, ids, logits.argmax(-1))
        return original(self, state, draft, tree, logits, warped, ids)

    patch.setattr(Round, "judge", judge)


@mutant
def one_coin_for_all_positions(patch: Patch) -> None:
    def same(law: Tensor, seed: int, positions: Tensor, draw: CellDraw) -> Tensor:
        return original(draw, law, seed, positions[:1].expand_as(positions))

    original = CellDraw.__call__
    patch.setattr(CellDraw, "__call__", lambda draw, *given: same(*given, draw))


@mutant
def coin_of_the_position_before(patch: Patch) -> None:
    original = DecodeLoop._state

    def shifted(self: DecodeLoop) -> object:
        state = original(self)
        state.positions -= 1
        return state

    patch.setattr(DecodeLoop, "_state", shifted)


@mutant
def rows_swapped_between_requests(patch: Patch) -> None:
    original = Round.draw_target

    def swapped(self: Round, logits: Tensor, samplings: list, positions: Tensor) -> object:
        return original(self, logits.roll(1, 0), samplings, positions)

    patch.setattr(Round, "draw_target", swapped)


@mutant
def stale_kv_after_accepting(patch: Patch) -> None:
    patch.setattr(table._TextCache, "commit", lambda *_: None)


@mutant
def policy_drops_a_drawn_token(patch: Patch) -> None:
    """The look-ahead of finding 1: what is verified depends on what the target drew."""

    def admit(self: StrictAcceptance, tree: TokenTree, target_ids: Tensor) -> Tensor:
        wanted = target_ids.gather(1, tree.parent.clamp(min=0))
        return (tree.token_ids == wanted) & (tree.parent >= 0)

    def redraw(self: Round, logits: Tensor, samplings: list, positions: Tensor) -> object:
        warped, ids = original(self, logits, samplings, positions)
        return warped, torch.where(ids == 2, logits.argmax(-1), ids)

    original = Round.draw_target
    patch.setattr(StrictAcceptance, "admit", admit)
    patch.setattr(Round, "draw_target", redraw)


@mutant
def prefill_greedy_under_sampling(patch: Patch) -> None:
    original = Round.draw_target

    def first_greedy(self: Round, logits: Tensor, samplings: list, positions: Tensor) -> object:
        warped, ids = original(self, logits, samplings, positions)
        return warped, torch.where(positions == 0, logits.argmax(-1), ids)

    patch.setattr(Round, "draw_target", first_greedy)


@mutant
def tree_not_closed(patch: Patch) -> None:
    original = BaseShape.select

    def select(self: BaseShape, plan: object, pool: object) -> Tensor:
        index = original(self, plan, pool)
        return torch.cat([index[:, :1], index[:, 2:]], 1)

    patch.setattr(BaseShape, "select", select)


@mutant
def coins_of_the_first_request_for_all(patch: Patch) -> None:
    patch_draw(patch, lambda samplings: [samplings[0]] * len(samplings))


@mutant
def coins_by_row_instead_of_by_request(patch: Patch) -> None:
    patch_draw(patch, lambda s: [Sampling(1.0, seed=row) for row in range(len(s))])


def patch_draw(patch: Patch, change: Callable[[list[Sampling]], list[Sampling]]) -> None:
    original = Round.draw_target

    def draw_target(self: Round, logits: Tensor, samplings: list, positions: Tensor) -> object:
        return original(self, logits, change(samplings), positions)

    patch.setattr(Round, "draw_target", draw_target)


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
