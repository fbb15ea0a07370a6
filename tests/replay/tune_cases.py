"""Logs, clocks and evaluators for tuning, small enough to reason about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from specctl.logs.tree_log import Support
from specctl.policy import Chain, Policy, StaticTree, StepCost
from specctl.replay.cost.files import save_cost_model
from specctl.replay.cost.model import CostModel
from specctl.replay.metrics import Sums
from specctl.replay.tune.candidates import Conditions, parse_families
from specctl.replay.tune.evaluators import Evaluator, make_objective
from specctl.replay.tune.search import TuneSearch
from specctl.stats import Split
from specctl.tree import DraftPool
from tests.artifacts.examples import PAIR
from tests.replay.costs import linear_cost

SUPPORT = Support(top_k=3, width=3, depth=4, nested=True)
COSTS = StepCost(token_counts=(1, 8, 64), step_us=(1000.0, 1100.0, 2000.0))


def linear(**changes: float) -> CostModel:
    """us: 1000 to verify and 10 a token, 200 to draft and 5 a token, 100 a step."""
    rates = {"verify_fixed_us": 1000.0, "verify_token_us": 10.0, "step_us": 100.0}
    drafting = {"draft_fixed_us": 200.0, "draft_token_us": 5.0}
    return linear_cost(**{**rates, **drafting, **changes})


def linear_file(path: Path, **changes: float) -> Path:
    save_cost_model(linear(**changes), path)
    return path


def path_of_two(pool: DraftPool, generator: Any) -> Tensor:
    """In place of a random path: the likeliest child twice, then nothing that was drafted."""
    del generator
    tree = pool
    wanted = tree.valid & (pool.sibling_rank == 0) & (tree.depth <= 2)
    wanted[:, 0] = True
    path = wanted.clone()
    for _ in range(int(tree.depth.max())):
        path = wanted & path.gather(1, tree.parent.clamp(min=0))
    return path


@dataclass
class Recording:
    """An evaluator that records its calls."""

    inner: Evaluator
    calls: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def __call__(
        self, policies: Sequence[Policy], prompts: Sequence[str], num_runs: int = 1
    ) -> list[Sums]:
        self.calls.append((len(policies), tuple(prompts)))
        return self.inner(policies, prompts, num_runs)


@dataclass
class Stated:
    """An evaluator with a stated time of every policy on every prompt, for 100 tokens."""

    time_us: Callable[[Policy, str], float]
    support: Callable[[Policy], float] = lambda policy: 1.0
    luck_us: Callable[[Policy, int, str], float] = lambda policy, run, prompt: 0.0
    is_good: Callable[[Policy], bool] = lambda policy: True

    def __call__(
        self, policies: Sequence[Policy], prompts: Sequence[str], num_runs: int = 1
    ) -> list[Sums]:
        rows = [(prompt, run) for run in range(num_runs) for prompt in prompts]
        return [self._sums(policy, rows) for policy in policies]

    def _sums(self, policy: Policy, rows: list[tuple[str, int]]) -> Sums:
        ones, names = np.ones(len(rows)), tuple(prompt for prompt, _ in rows)
        time_us = [self.time_us(policy, p) + self.luck_us(policy, run, p) for p, run in rows]
        columns = dict.fromkeys(("time_us", "request_us", "wall_us"), np.array(time_us, float))
        counts = {"calls": 40, "tokens": 100, "decoded": 100, "accepted": 60, "verified": 160}
        counts |= {"good_tokens": 100 * self.is_good(policy), "levels": 0, "censored": 0}
        counts |= {"wanted": 100, "missing": 100 * (1 - self.support(policy))}
        columns |= {name: count * ones for name, count in counts.items()}
        return Sums.of(names, ("",) * len(rows), columns)


def names(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{number:03d}" for number in range(count))


def search(
    *families: str, grids: Sequence[str] = (), train: int = 30, held_out: int = 30, **changes: Any
) -> TuneSearch:
    """A search over a log of `SUPPORT` that needs no log."""
    conditions = Conditions(PAIR, SUPPORT, batch_size=1, step_costs=lambda rule: COSTS)
    split = Split(names("train-", train), names("held-", held_out))
    parsed = tuple(parse_families(families, grids))
    return TuneSearch(parsed, conditions, split, **{"objective": make_objective(), **changes})


def is_stop(policy: Policy) -> bool:
    return policy.shape.kind == "stop"


def statics(policy: Policy, prompt: str) -> float:
    """The chain of 3 is the fastest static setting: 1000 us for 100 tokens."""
    del prompt
    if isinstance(policy.shape, Chain):
        return 1000.0 + 50 * abs(policy.shape.num_draft_tokens - 3)
    return 1500.0 if isinstance(policy.shape, StaticTree) else 1200.0
