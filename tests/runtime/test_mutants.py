"""The law tests must be able to fail: each of these bugs, put in on purpose, has to be seen.

The list is notes/reliability.md 1.4, as far as it applies to point-mass verification.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specctl.policy.rules import BaseShape
from specctl.policy.verification import StrictAcceptance
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.round import Round
from specctl.tree import TokenTree
from tests.runtime import table
from tests.runtime.inversion import CellDraw
from tests.runtime.test_exact_law import POLICIES, loop_law, true_law

Patch = pytest.MonkeyPatch
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


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name: str, monkeypatch: Patch) -> None:
    MUTANTS[name](monkeypatch)
    assert any(differs(policy) for policy in ("chain", "eagle2-wide"))


def differs(policy: str) -> bool:
    """Whether the law under the mutant is not the target's; a crash would prove nothing."""
    return loop_law(POLICIES[policy]) != true_law()
