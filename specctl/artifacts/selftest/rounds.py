"""Made-up rounds through the whole policy: drafting, submitting, sharing, accepting.

A table of 64 laws over 64 tokens, from sure to doubtful, plays drafter and target. All numbers
that the policy sees are stored, so nothing but the policy's own arithmetic is left to a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.artifacts.selftest.rows import allowed
from specctl.errors import UsageError
from specctl.features import ENTROPY_TOP_K, DraftPool
from specctl.policy.build import build_acceptance, build_budget, with_costs
from specctl.policy.growing import Children, PoolBuffers, grow_tree
from specctl.policy.records import Mars, Policy, StepCost
from specctl.policy.rules import BudgetRule, Frontier, RoundStart, ShapeRule
from specctl.policy.sharing import PerRequestRule
from specctl.policy.verification import DraftLaw, Verification
from specctl.suffix import RECENT_TOKENS
from specctl.tree import gather, take

Arrays = dict[str, NDArray[Any]]
MAX_ROWS, NUM_LAWS, NUM_TOKENS = 2, 64, 64
LAWS_PER_ROW = NUM_LAWS // MAX_ROWS
SURE, DOUBTFUL = 20.0, 0.3
"""Spread of the logits of the first law and of the last one, standard deviations."""
SEEN = (24.0, 12.0, 24.0, 12.0, 9.0, 14.0)
"""A request's memory of running means: tokens, weight, sum, each accepted, then rejected."""
OUTPUTS: Final = ("submitted", "admitted", "emitted")
MADE_UP_COSTS = StepCost(token_counts=(1, 16, 64), step_us=(1000.0, 1100.0, 1600.0))


def round_inputs(policy: Policy, shape: ShapeRule, seed: int) -> Arrays:
    """The made-up world: laws, memories, recent text. A function of its arguments alone.

    Args:
        shape: the rule of the policy's shape.
    """
    draws = np.random.default_rng(seed)
    spread = np.geomspace(SURE, DOUBTFUL, NUM_LAWS)[:, None]
    logits = [spread * draws.normal(0, 1, (NUM_LAWS, NUM_TOKENS)) for _ in range(2)]
    acceptance = build_acceptance(policy.acceptance)
    num_rows, _ = sharing(policy, shape)
    laws = {"draft_logits": logits[0]} if acceptance.needs_draft_law else {}
    laws["target_logits"] = logits[0] + 0.5 * logits[1]
    memories = [_memory(num_rows, rule.memory_size) for rule in (shape, acceptance)]
    return {
        **{name: allowed(table) for name, table in laws.items()},
        **_said(logits[0], shape.top_k),
        "shape_memory": memories[0],
        "acceptance_memory": memories[1],
        "recent": draws.integers(0, NUM_TOKENS, (num_rows, RECENT_TOKENS)),
    }


def sharing(policy: Policy, shape: ShapeRule) -> tuple[int, BudgetRule]:
    """As many requests as the budget can be built for, two at most, and its rule.

    A budget of fewer nodes than requests has no rule; nor have step costs that end flat, where
    more tokens are asked for than were measured. Such a budget is not asked.
    """
    budget = with_costs(policy, MADE_UP_COSTS).budget
    for num_rows in (MAX_ROWS, 1):
        try:
            rule = build_budget(budget, batch_size=num_rows, max_tokens=shape.max_tokens)
        except UsageError:
            continue
        return num_rows, rule
    return 1, PerRequestRule()


def _memory(num_rows: int, size: int) -> NDArray[np.float32]:
    """`[B, M]`: the first request is new, the other one has seen some rounds."""
    known = np.array([*SEEN, 3.0, 5.0][:size], np.float32)
    return np.arange(num_rows, dtype=np.float32)[:, None] * known


def _said(logits: NDArray[np.float64], top_k: int) -> Arrays:
    """What the drafter says by each law: its likeliest tokens, and how unsure it is."""
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    order = np.argsort(-logp, axis=1, kind="stable")
    best = np.take_along_axis(logp, order, 1)
    return {
        "draft_ids": order[:, :top_k].astype(np.int64),
        "draft_logp": allowed(best[:, :top_k]),
        "entropy": allowed(_entropy(best)),
        "topk_entropy": allowed(_entropy(best[:, :ENTROPY_TOP_K])),
    }


def _entropy(logp: NDArray[np.float64]) -> NDArray[np.float64]:
    prob = np.exp(logp)
    prob = prob / prob.sum(1, keepdims=True)
    found: NDArray[np.float64] = -(prob * np.log(prob)).sum(1)
    return found


@dataclass(frozen=True)
class World:
    """The inputs as tensors."""

    tables: dict[str, Tensor]

    @classmethod
    def of(cls, inputs: Arrays) -> World:
        """The world of stored arrays."""
        return cls({name: torch.from_numpy(array.copy()) for name, array in inputs.items()})

    def laws(self, slots: Tensor) -> Tensor:
        """`[B, N]` int64: which law speaks after each node; sure requests stand first."""
        rows = torch.arange(len(slots))[:, None]
        return rows * LAWS_PER_ROW + slots.clamp(min=0) % LAWS_PER_ROW

    def children(self, pool: PoolBuffers, frontier: Frontier, top_k: int) -> Children:
        """Children of frontier nodes, by the law of their slot."""
        law = self.laws(frontier.index)
        ids, logp = self.tables["draft_ids"][law], self.tables["draft_logp"][law]
        entropies = self.tables["entropy"][law], self.tables["topk_entropy"][law]
        return Children(ids[..., :top_k], logp[..., :top_k], *entropies)


class NoWatch:
    """Nobody times a self-test."""

    def lap(self, phase: str, /) -> None:
        del phase


@torch.inference_mode()
def round_outputs(policy: Policy, shape: ShapeRule, inputs: Arrays) -> Arrays:
    """What the policy does in a made-up round, `[B, N]` int64 each.

    Args:
        shape: the rule of the policy's shape, or what stands in for it.

    Returns:
        `submitted`: pool indices after sharing, -1 padded; `admitted`: 0 or 1; `emitted`: the
        token behind each node.
    """
    world = World.of(inputs)
    num_rows, budget = sharing(policy, shape)
    plan = shape.begin(RoundStart(num_rows, world.tables["shape_memory"].double()))
    recent = world.tables["recent"]
    text = recent if shape.needs_text else None
    pool = grow_tree(shape, plan, world, recent[:, -1], NoWatch(), text)
    submitted = budget.share(plan, pool, shape.select(plan, pool))
    given = _verification(policy, world, pool, submitted)
    judgement = build_acceptance(policy.acceptance).judge(given)
    tables = (submitted, judgement.admitted.long(), judgement.target_ids)
    return dict(zip(OUTPUTS, (table.numpy() for table in tables), strict=True))


def _verification(policy: Policy, world: World, pool: DraftPool, submitted: Tensor) -> Verification:
    tree = take(pool.tree, submitted)
    law = world.laws(submitted)
    logits = world.tables["target_logits"][law]
    greedy = not isinstance(policy.acceptance, Mars) or policy.acceptance.mode != "code_v1"
    return Verification(
        tree=tree,
        target_ids=logits.argmax(-1),
        logits=logits,
        law=logits,
        greedy=torch.full((len(law),), greedy),
        seeds=torch.arange(len(law)),
        positions=torch.arange(tree.num_slots).expand_as(law),
        memory=world.tables["acceptance_memory"].double(),
        draft_law=_draft_law(world, gather(submitted, tree.parent, 0)),
    )


def _draft_law(world: World, above: Tensor) -> DraftLaw | None:
    """What the drafter said after the nodes `above`; None where no acceptance asks for it."""
    if "draft_logits" not in world.tables:
        return None
    logits = world.tables["draft_logits"][world.laws(above)]
    return DraftLaw(logits, torch.arange(NUM_TOKENS))
