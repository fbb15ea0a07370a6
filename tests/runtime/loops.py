"""The production loop on table models, its coins enumerated: what the law tests share.

Request `seed` draws from the cells `GRID[seed]`, one a position. Its text is therefore known in
integers (`text_of`), whatever policy decodes it and whoever shares its batch, and the texts of all
cells together are the law. To have another policy proved, add a row to `POLICIES`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection
from fractions import Fraction
from random import Random

from specctl.policy import (
    Chain,
    ElasticBudget,
    EntropyBins,
    EntropyStop,
    JointThreshold,
    MarginalBudget,
    Policy,
    RootOnly,
    ScoredTree,
    SparseGates,
    StaticTree,
    StepCost,
    SurvivalBudget,
)
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.drafter import SmallModelDrafter
from specctl.runtime.requests import Observer, Request, Sampling
from tests.policy.scorers import steps
from tests.runtime.inversion import CellDraw
from tests.runtime.table import TOTAL, VOCAB, TableModel, drafter_law, target_law

PROMPT = (1, 2)
NUM_TOKENS = 4
GRID = list(itertools.product(range(TOTAL), repeat=NUM_TOKENS))
ALL_SEEDS = tuple(range(len(GRID)))
Texts = dict[int, tuple[int, ...]]

WIDE = StaticTree(depth=3, top_k=3, num_tokens=7)
GATES = SparseGates(
    depth=3, width=2, max_width=3, gate_levels=(1, 2), thresholds=(0.6, 0.3), num_tokens=7
)
COSTS = StepCost(token_counts=(1, 8, 16, 48), step_us=(100.0, 110.0, 140.0, 330.0))
SCORER = steps("joint_prob", cuts=(0.2, 0.4), probs=(0.1, 0.5, 0.9))
SHAPES = {
    "ar": RootOnly(),
    "chain": Chain(num_draft_tokens=3),
    "eagle2": StaticTree(depth=2, top_k=2, num_tokens=5),
    "eagle2-wide": WIDE,
    "hetero": EntropyBins(
        base=StaticTree(depth=2, top_k=2, num_tokens=5), edges=(0.9, 1.4), gammas=(0.7, 1.0)
    ),
    "threshold": JointThreshold(depth=3, top_k=3, min_prob=0.2),
    "echo": GATES,
    "c2t": ScoredTree(
        scorer=SCORER, beta=0.3, depth=3, first_top_k=3, second_top_k=2, num_tokens=8
    ),
    # Scores of .3, .5 and .8 for the drafter's .25, .5 and .75: sizes differ between contexts.
    "c2t_conditional": ScoredTree(
        scorer=steps("draft_logp", (-1.0, -0.5), (0.3, 0.5, 0.8)),
        predicts="conditional",
        beta=0.2,
        depth=3,
        first_top_k=3,
        second_top_k=2,
    ),
    "c2t_chain": ScoredTree(
        scorer=steps("parent_entropy", (0.7,), (0.8, 0.4)),
        beta=0.5,
        depth=3,
        first_top_k=1,
        second_top_k=1,
    ),
    "adasd_stop": EntropyStop(window=3, min_samples=1),
}
BUDGETS = {
    "wide+survival": Policy(shape=WIDE, budget=SurvivalBudget(max_tokens=18)),
    "wide+survival-rate": Policy(shape=WIDE, budget=SurvivalBudget(costs=COSTS)),
    "wide+marginal": Policy(shape=WIDE, budget=MarginalBudget(tokens_per_s=40_000.0, costs=COSTS)),
    "echo+echo_budget": Policy(
        shape=GATES, budget=ElasticBudget(max_tokens=18, default_width=1, max_width=2)
    ),
}
POLICIES = {name: Policy(shape=shape) for name, shape in SHAPES.items()} | BUDGETS


def loop_texts(
    policy: Policy,
    batch_size: int = 8,
    seeds: Collection[int] = ALL_SEEDS,
    *,
    late: Random | None = None,
    observer: Observer | None = None,
) -> Texts:
    """The text of each seed through the production loop.

    Args:
        late: requests join at random moments, by its numbers, instead of all at first.
    """
    loop = DecodeLoop(
        TableModel(target_law),
        SmallModelDrafter(TableModel(drafter_law)),
        policy,
        batch_size=batch_size,
        max_text_tokens=16,
        eos_ids=(),
        observer=observer,
        draw=CellDraw(GRID, TOTAL),
    )
    waiting = [request_of(seed) for seed in seeds]
    texts: Texts = {}
    while waiting or loop.busy:
        joining = len(waiting) if late is None else late.choice((0, 0, 0, 1, 1, 2, batch_size))
        for request in waiting[:joining]:
            loop.submit(request)
        del waiting[:joining]
        texts |= {int(done.request.request_id): done.token_ids for done in loop.step()}
    return texts


def request_of(seed: int) -> Request:
    return Request(f"{seed}", PROMPT, NUM_TOKENS, sampling=Sampling(1.0, seed=seed))


def text_of(seed: int) -> tuple[int, ...]:
    """The text that the cells of a seed mean: in each cell stands the token that owns it."""
    context = list(PROMPT)
    for cell in GRID[seed]:
        owners = [token for token in range(VOCAB) for _ in range(target_law(context)[token])]
        context.append(owners[cell])
    return tuple(context[len(PROMPT) :])


def law_of(texts: Texts) -> dict[tuple[int, ...], Fraction]:
    """How often each text came, of all cells."""
    return {text: Fraction(n, len(GRID)) for text, n in Counter(texts.values()).items()}


def target_weight(sequence: tuple[int, ...], size: int) -> int:
    """The target's probability of a sequence, times `TOTAL ** size`."""
    context, weight = list(PROMPT), 1
    for token in sequence:
        weight *= target_law(context)[token]
        context.append(token)
    return weight * TOTAL ** (size - len(sequence))


def true_law() -> dict[tuple[int, ...], Fraction]:
    """The target's law of texts."""
    weights = {
        text: target_weight(text, NUM_TOKENS)
        for text in itertools.product(range(VOCAB), repeat=NUM_TOKENS)
    }
    return {text: Fraction(w, TOTAL**NUM_TOKENS) for text, w in weights.items() if w}
