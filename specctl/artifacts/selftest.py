"""The self-test of an artifact: its policy decides made-up rounds again as it did when written.

A table of 64 distributions over 64 tokens, from sure to doubtful, plays drafter and target for a
few made-up requests, which the whole policy goes through: drafting, submitting, sharing,
accepting. The table follows from a seed, by arithmetic that is the same on every machine; seed and
decisions stand in `policy.safetensors` under `selftest.`. A machine, a library or a version of
specctl that decides otherwise is found out when the artifact is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.artifacts.manifest import TENSORS
from specctl.errors import ArtifactError, SpecctlError, UsageError
from specctl.features import ENTROPY_TOP_K, RECENT_TOKENS, SUFFIX_TOKENS, DraftPool
from specctl.policy import (
    FfnScorer,
    Policy,
    Ratio,
    ScoredTree,
    Scorer,
    StepCost,
    build_acceptance,
    build_budget,
    build_shape,
    with_costs,
)
from specctl.policy.budgets import PerRequestRule
from specctl.policy.growing import Children, PoolBuffers, grow_tree
from specctl.policy.pruning import PrunedShape
from specctl.policy.rules import BudgetRule, Frontier, RoundStart, ShapeRule
from specctl.policy.scorers import build_log_odds
from specctl.policy.verification import DraftLaw, Verification
from specctl.tree import gather, take

Arrays = dict[str, NDArray[Any]]
PREFIX = "selftest."
OUTPUTS: Final = ("submitted", "admitted", "emitted")
MAX_SEEDS = 16
NUM_TABLES, NUM_TOKENS = 64, 64
STRIDE = 5
"""Tables between those of neighbouring nodes; with 64 it has no common factor."""
LARGE_TREE = 256
"""Nodes above which two requests are decided instead of eight."""
SURE, DOUBTFUL = 20.0, 0.3
"""Spread of the logits of the first table and of the last one, standard deviations."""
GRID = 2.0**-12
"""All numbers of a world are multiples of it: another machine's logarithm rounds to the same."""
SEEN = (24.0, 12.0, 24.0, 12.0, 9.0, 14.0, 3.0, 5.0)
"""A request's memory of earlier rounds: running means of tokens, weight, sum and so on."""
MADE_UP_COSTS = StepCost(token_counts=(1, 16, 64), step_us=(1000.0, 1100.0, 1600.0))
NOISE = 1e-5
"""Log-probability by which scores are shaken, equal ones alike: in a world where a network then
decides otherwise it lies on a border, and another machine might fall to the other side."""


def selftest_tensors(policy: Policy) -> Arrays:
    """Seed and decisions by name in `policy.safetensors`; a function of the policy alone.

    Raises:
        ArtifactError: E_DEGENERATE for a scorer that says the same of every node, E_SELFTEST for
            rules that cannot decide the made-up rounds, E_COST where memory does not suffice.
    """
    with _refusals():
        _check_says_something(policy)
        rule = build_shape(policy.shape)
        for seed in range(MAX_SEEDS):
            found = _decisions(policy, rule, seed)
            shaken = (_decisions(policy, one, seed) for one in _shaken(rule, policy))
            if all(np.array_equal(one[name], found[name]) for one in shaken for name in OUTPUTS):
                named = {f"{PREFIX}{name}": array for name, array in found.items()}
                return {f"{PREFIX}seed": np.array([seed]), **named}
    raise _wrong("seed", f"one of {MAX_SEEDS} made-up worlds off every border", "none")


def check_selftest(policy: Policy, stored: Mapping[str, NDArray[Any]]) -> None:
    """Refuses a policy that decides otherwise than is stored (E_SELFTEST, E_DEGENERATE, E_COST).

    Args:
        stored: the tensors of `policy.safetensors` whose names begin with `selftest.`.
    """
    names = {f"{PREFIX}{name}" for name in ("seed", *OUTPUTS)}
    if stored.keys() != names or any(array.dtype != np.int64 for array in stored.values()):
        raise _wrong("tensors", f"int64 {sorted(names)}", str(sorted(stored)))
    seed = stored[f"{PREFIX}seed"]
    if seed.shape != (1,) or not 0 <= seed[0] < MAX_SEEDS:
        raise _wrong("seed", f"one number from 0 to {MAX_SEEDS - 1}", f"{seed.tolist()}"[:40])
    with _refusals():
        _check_says_something(policy)
        found = _decisions(policy, build_shape(policy.shape), int(seed[0]))
    for name in OUTPUTS:
        own, wanted = found[name], stored[f"{PREFIX}{name}"]
        if own.shape != wanted.shape:
            raise _wrong(name, f"shape {list(own.shape)}", f"{list(wanted.shape)}")
        places = np.argwhere(own != wanted)
        if len(places):
            at = tuple(int(i) for i in places[0])
            here = f"{int(own[at])} at {list(at)}, {len(places)} of {own.size} differ"
            raise _wrong(name, f"{int(wanted[at])}, as was decided when it was written", here)


@torch.inference_mode()
def _decisions(policy: Policy, shape: ShapeRule, seed: int) -> Arrays:
    """The decisions of a policy in a made-up world, `[B, N]` int64 each.

    Args:
        shape: the rule of the policy's shape, or one that stands in for it.

    Returns:
        `submitted`: pool indices after sharing, -1 padded; `admitted`: 0 or 1; `emitted`: the
        token behind each node.
    """
    num_rows, budget = _sharing(policy, shape)
    acceptance = build_acceptance(policy.acceptance)
    world = World.of_seed(seed, num_rows)
    plan = shape.begin(RoundStart(num_rows, world.memory(shape.memory_size)))
    text = world.recent if shape.needs_text else None
    pool = grow_tree(shape, plan, world, world.recent[:, -1], _NoWatch(), text)
    submitted = budget.share(plan, pool, shape.select(plan, pool))
    tree, table = take(pool.tree, submitted), world.table_of(submitted)
    above = world.table_of(gather(submitted, tree.parent, 0))
    logits = world.target_logits[table]
    samples = isinstance(policy.acceptance, Ratio)  # where greedy rows would test nothing of it
    drafter = DraftLaw(world.draft_logits[above], torch.arange(NUM_TOKENS))
    judgement = acceptance.judge(
        Verification(
            tree=tree,
            target_ids=logits.argmax(-1),
            logits=logits,
            law=logits,
            greedy=torch.full((num_rows,), not samples),
            seeds=torch.arange(num_rows),
            positions=torch.arange(tree.num_slots).expand_as(table),
            memory=world.memory(acceptance.memory_size),
            draft_law=drafter if acceptance.needs_draft_law else None,
        )
    )
    tables = (submitted, judgement.admitted.long(), judgement.target_ids)
    return dict(zip(OUTPUTS, (table.numpy() for table in tables), strict=True))


def _sharing(policy: Policy, shape: ShapeRule) -> tuple[int, BudgetRule]:
    """As many requests as the budget can be built for, and its rule.

    A budget of fewer nodes than requests has no rule; nor have step costs that end flat, where
    more tokens are drafted than were measured. Such a budget is left out of the test.
    """
    budget = with_costs(policy, MADE_UP_COSTS).budget
    for num_rows in (8 if shape.max_tokens <= LARGE_TREE else 2, 2, 1):
        try:
            rule = build_budget(budget, batch_size=num_rows, max_tokens=shape.max_tokens)
        except UsageError:
            continue
        return num_rows, rule
    return 1, PerRequestRule()


@dataclass(frozen=True)
class World:
    """Made-up requests and the models that answer them, as tensors.

    Attributes:
        draft_logits, target_logits: `[64, 64]` float32, a table of distributions over tokens.
        draft_ids, draft_logp: `[64, 64]`, tokens of each table, likeliest first, and their
            log-probabilities. entropy, topk_entropy: `[64]`, nats.
        recent: `[B, R]` int64, the end of each request's text.
    """

    draft_logits: Tensor
    target_logits: Tensor
    draft_ids: Tensor
    draft_logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor
    recent: Tensor

    @classmethod
    def of_seed(cls, seed: int, num_rows: int) -> World:
        """The world of a seed; uniform draws and a coarse grid make it the same everywhere."""
        draws = np.random.default_rng(seed)
        spread = np.geomspace(SURE, DOUBTFUL, NUM_TABLES)[:, None]
        noise = draws.random((2, 12, NUM_TABLES, NUM_TOKENS)).sum(1) - 6.0  # almost normal
        # On a grid 64 times coarser, and each token a little off it: no two of a table are equal.
        own = GRID * np.arange(NUM_TOKENS)
        draft = _gridded(spread * noise[0], NUM_TOKENS * GRID) + own
        target = _gridded(draft + 0.5 * spread * noise[1], NUM_TOKENS * GRID) + own
        logp = draft - np.log(np.exp(draft).sum(1, keepdims=True))
        order = np.argsort(-draft, axis=1, kind="stable")
        best = _gridded(np.take_along_axis(logp, order, 1))
        arrays = {
            "draft_logits": draft.astype(np.float32),
            "target_logits": target.astype(np.float32),
            "draft_ids": order.astype(np.int64),
            "draft_logp": best.astype(np.float32),
            "entropy": _entropy(best).astype(np.float32),
            "topk_entropy": _entropy(best[:, :ENTROPY_TOP_K]).astype(np.float32),
            "recent": draws.integers(0, NUM_TOKENS, (num_rows, RECENT_TOKENS)),
        }
        return cls(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def memory(self, size: int) -> Tensor:
        """`[B, size]` float64: the first request is new, the others have seen some rounds."""
        rows = torch.arange(len(self.recent), dtype=torch.float64)
        return rows[:, None] * torch.tensor(SEEN[:size], dtype=torch.float64)

    def table_of(self, slots: Tensor) -> Tensor:
        """`[B, N]` int64: the table that speaks after each node, sure and doubtful ones mixed."""
        rows = torch.arange(len(slots))[:, None]
        return (rows * (NUM_TABLES // len(slots)) + STRIDE * slots.clamp(min=0)) % NUM_TABLES

    def children(self, pool: PoolBuffers, frontier: Frontier, top_k: int) -> Children:
        """Children of frontier nodes, by the table of their slot (`growing.ChildSource`)."""
        table = self.table_of(frontier.index)
        ids, logp = self.draft_ids[table], self.draft_logp[table]
        entropies = self.entropy[table], self.topk_entropy[table]
        return Children(ids[..., :top_k], logp[..., :top_k], *entropies)


def _gridded(values: NDArray[Any], step: float = GRID) -> NDArray[Any]:
    found: NDArray[Any] = np.round(values / step) * step
    return found


def _entropy(logp: NDArray[Any]) -> NDArray[Any]:
    """`[n]` nats of distributions `[n, k]` that are first scaled to sum to 1."""
    prob = np.exp(logp)
    prob = prob / prob.sum(1, keepdims=True)
    return _gridded(-(prob * np.log(prob)).sum(1))


class _NoWatch:
    """Times nothing."""

    def lap(self, phase: str, /) -> None:
        del phase


def _shaken(rule: ShapeRule, policy: Policy) -> Iterator[ShapeRule]:
    """The rule of a scorer with its scores moved a little; nothing for exact rules."""
    if not isinstance(policy.shape, ScoredTree):
        return
    assert isinstance(rule, PrunedShape)
    score = rule.score
    for phase in (0.0, 1.5):

        def shaken(pool: DraftPool, start: int, phase: float = phase) -> Tensor:
            found = score(pool, start)
            return found + NOISE * (1e5 * found + phase).sin().nan_to_num(0.0)  # sin(-inf)

        yield replace(rule, score=shaken)


def _check_says_something(policy: Policy) -> None:
    """Refuses a scorer that scores all nodes alike: it prunes all or none, as a depth does."""
    if not isinstance(policy.shape, ScoredTree):
        return
    rows = _made_up_nodes(policy.shape.scorer)
    scores = build_log_odds(policy.shape.scorer)(torch.from_numpy(rows)).numpy()
    if not np.isfinite(scores).all() or np.ptp(scores) == 0:
        one = f"{scores[0]:g} for all of them"
        raise ArtifactError(
            "E_DEGENERATE",
            "scorer",
            expected=f"finite scores that differ between {len(rows)} made-up nodes",
            found=one if np.isfinite(scores).all() else "NaN or infinity",
            fix="fit it on more data, or use a policy without a scorer",
        )


def _made_up_nodes(scorer: Scorer) -> NDArray[np.float32]:
    """`[256, F]`: around the mean of a network's features; on edges of a table."""
    draws = np.random.default_rng(0)
    if isinstance(scorer, FfnScorer):
        spread = draws.normal(0, 3, (256, len(scorer.features))) * scorer.scale
        return np.asarray(scorer.mean + spread, np.float32)
    logp = draws.choice(np.array([*scorer.edges, 0.0], np.float32), 256)
    copied = draws.integers(-SUFFIX_TOKENS, SUFFIX_TOKENS, 256, endpoint=True)
    return np.stack([logp, copied], 1).astype(np.float32)


@contextmanager
def _refusals() -> Iterator[None]:
    """Rules that fail on a made-up round are a refusal, not a stack trace."""
    try:
        yield
    except ArtifactError:
        raise
    except (SpecctlError, RuntimeError, MemoryError, LookupError, ValueError, ArithmeticError) as e:
        # torch's allocator says in words alone that memory is short
        words = ("allocate memory", "bad_alloc")
        if isinstance(e, MemoryError) or any(word in str(e) for word in words):
            expected = "rules that decide made-up rounds in the memory there is"
            raise ArtifactError(
                "E_COST", "policy record", expected=expected, found=str(e) or "none left"
            ) from None
        raise _wrong("rules", "rules that decide made-up rounds", str(e)) from None


def _wrong(what: str, expected: str, found: str) -> ArtifactError:
    return ArtifactError(
        "E_SELFTEST",
        f"{TENSORS}, self-test, {what}",
        expected=expected,
        found=found,
        fix="do not load it; if it is yours, fit it again with this version of specctl",
    )
