"""Which drafted nodes the policy submits, with the budget's share, on the device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.kernels.tree_build import Pool, select_nodes
from specctl.policy.budgets import PerRequestRule
from specctl.policy.echo import ElasticRule
from specctl.policy.rules import BudgetRule, Plan
from specctl.policy.survival import MarginalRule, SurvivalRule
from specctl.runtime.graphs.drafting import Drafting
from specctl.runtime.graphs.state import Rows
from specctl.runtime.guard import raising_faults
from specctl.tree import TokenTree


class Selection:
    """The end of drafting.

    Attributes:
        submitted: `[S, N]` int64 pool slots, ascending, -1 padded; of rows without a request, none.
        faulty: `[S]` bool, rows whose policy decided by NaN.
    """

    def __init__(self, drafting: Drafting, budget: BudgetRule, num_slots: int) -> None:
        self.drafting, self.budget = drafting, unasking(budget, drafting.rule.max_depth)
        device, size = drafting.report.device, drafting.rule.max_tokens
        self.submitted = torch.full((num_slots, size), -1, device=device)
        self.faulty = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def select(self, state: Rows) -> None:
        """Chooses what to verify.

        Raises:
            PolicyFault: the shape or the budget failed.
        """
        rows, drafting = len(state.root_ids), self.drafting
        if drafting.rule.max_depth == 0:
            drafting.begin(state)
        pool = drafting.of_rows(rows)
        with raising_faults():
            chosen = self._share(pool, self._chosen(pool, state), rows)
        if chosen.shape[1] < self.submitted.shape[1]:
            self.submitted[:rows].fill_(-1)
        self.submitted[:rows, : chosen.shape[1]] = chosen

    def _chosen(self, pool: Pool, state: Rows) -> Tensor:
        """`[B, N]` the shape's choice; where it is no number, the likeliest of what there is."""
        decider, size = self.drafting.decider, self.drafting.rule.max_tokens
        rank, rows = decider.rank(pool), len(pool.parent)
        chosen = select_nodes(rank.scores, size, limit=rank.limit, min_score=rank.min_score)
        faulty = decider.faulty(rows)
        if faulty is not None:
            self.faulty[:rows] = faulty & ~state.vacant
            chosen = torch.where(faulty[:, None], select_nodes(pool.joint_logp, size), chosen)
        return chosen.masked_fill(state.vacant[:, None], -1)

    def _share(self, pool: Pool, chosen: Tensor, rows: int) -> Tensor:
        if isinstance(self.budget, PerRequestRule):
            return chosen
        stopped_at = self.drafting.decider.stopped_at(rows)
        plan = Plan(rows, torch.zeros_like(chosen[:, 0]), None, stopped_at)
        return self.budget.share(plan, draft_pool(pool), chosen)


def draft_pool(pool: Pool) -> DraftPool:
    """The same columns as budgets and observers know them."""
    tree = TokenTree(pool.token_ids, pool.parent, pool.depth, pool.draft_logp)
    return DraftPool(
        tree, pool.joint_logp, pool.entropy, pool.topk_entropy, pool.sibling_rank, pool.expanded
    )


def unasking(budget: BudgetRule, max_depth: int) -> BudgetRule:
    """The same budget, which need not ask the device how deep trees are."""
    if isinstance(budget, ElasticRule):
        return replace(budget, max_depth=max_depth)
    if isinstance(budget, SurvivalRule | MarginalRule) and budget.calibration is not None:
        return replace(budget, calibration=replace(budget.calibration, max_depth=max_depth))
    return budget
