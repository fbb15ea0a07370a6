"""Models that are tables of rational probabilities, behind the real interfaces.

`TableModel` stands where `CachedModel` stands. It stores token ids where the real one stores
keys and values, so a wrong mask, a wrong offset or a missed compaction gives it a wrong context,
and every probability it answers with is an integer over `TOTAL`.

The production loop runs on them with its coins enumerated. Request `seed` draws from the cells
`GRID[seed]`, one a position: its text is known in integers (`text_of`), whatever policy decodes it
and whoever shares its batch, and the texts of all cells together are the law. To have another
policy proved, add a row to `POLICIES`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from fractions import Fraction
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

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
from specctl.runtime.attention import Pass
from specctl.runtime.cached_model import ForwardResult
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.drafter import SmallModelDrafter
from specctl.runtime.requests import Observer, Request, Sampling
from specctl.tree import TokenTree
from tests.policy.scorers import steps
from tests.runtime.toy import join_at_random

VOCAB, TOTAL = 3, 4
_LAWS = ((2, 1, 1), (1, 2, 1), (1, 1, 2), (0, 3, 1), (3, 0, 1), (1, 3, 0))
Law = Callable[[list[int]], tuple[int, ...]]


def target_law(context: list[int]) -> tuple[int, ...]:
    """Weights over `VOCAB` tokens, summing to `TOTAL`, by the last two tokens and the length."""
    before = context[-2] if len(context) > 1 else 0
    return _LAWS[(3 * context[-1] + 5 * before + len(context)) % 6]


def drafter_law(context: list[int]) -> tuple[int, ...]:
    """A drafter that often disagrees."""
    return _LAWS[(2 * context[-1] + len(context)) % 6]


class _TextCache:
    """Token ids where keys and values would stand."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = torch.full((slots, capacity), -9)

    def commit(self, offset: Tensor, path: Tensor) -> None:
        for slot, (start, nodes) in enumerate(zip(offset.tolist(), path.tolist(), strict=True)):
            kept = [int(self.tokens[slot, start + node]) for node in nodes if node >= 0]
            self.tokens[slot, start:] = -9
            self.tokens[slot, start : start + len(kept)] = torch.tensor(kept)

    def move(self, source: int, target: int) -> None:
        self.tokens[target] = self.tokens[source]


class TableModel:
    """A model by table; see the module docstring."""

    def __init__(self, law: Law) -> None:
        self.law, self.vocab_size, self.context_tokens = law, VOCAB, 64
        self.devices = (torch.device("cpu"),)
        self.device, self.cache = self.devices[0], None
        self.config = SimpleNamespace(num_hidden_layers=1)

    dtype = torch.float32
    window = None
    aux_layers = ()

    def capture(self, aux_layers: tuple[int, ...]) -> None:
        assert aux_layers == ()

    def allocate(self, num_slots: int, capacity: int) -> None:
        self.cache = _TextCache(num_slots, capacity)

    def extend(
        self, slot: int, offset: int, token_ids: Tensor, *, last_only: bool = True
    ) -> ForwardResult:
        assert last_only
        store, size = self.cache.tokens[slot], token_ids.shape[1]
        store[offset : offset + size] = token_ids[0]
        context = tuple(store[: offset + size].tolist())
        return ForwardResult(torch.tensor([_logits(self.law, context)]), None)

    def forward(self, reads: Pass) -> ForwardResult:
        """Every token's context is what it sees of its slot."""
        answers = []
        words, prefixes = reads.packed_words.tolist(), reads.prefixes.tolist()
        tails = range(reads.behind + reads.max_nodes)
        tokens = zip(
            reads.row.tolist(), reads.place.tolist(), reads.token_ids.tolist(), strict=True
        )
        for row, place, token in tokens:
            self.cache.tokens[row, place] = token
        texts = self.cache.tokens.tolist()
        places = zip(reads.row.tolist(), reads.position_ids.tolist(), words, strict=True)
        for row, position, bits in places:
            text, prefix = texts[row], prefixes[row]
            tree = [text[prefix + i] for i in tails if bits[i // 32] >> (i % 32) & 1]
            context = (*text[:prefix], *tree)
            # Padding, or a bug: something that no distribution has.
            wrong = len(context) != position + 1 or min(context) < 0
            answers.append(_NOTHING if wrong else _logits(self.law, context))
        return ForwardResult(torch.tensor(answers).view(-1, VOCAB), None)


_NOTHING = [0.0, -1.0, -2.0]


@cache
def _logits(law: Law, context: tuple[int, ...]) -> list[float]:
    weights = torch.tensor(law(list(context)), dtype=torch.float64)
    found: list[float] = (weights / TOTAL).log().float().tolist()
    return found


# --------------------------------------------------------------------------- coins


def invert(logits: Tensor, coins: Tensor) -> Tensor:
    """`[N]` int64: the token whose cumulative-probability interval holds the coin.

    Token v owns [F(v - 1), F(v)) in vocabulary order; one of probability 0 owns nothing.
    """
    mass = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    total = mass[:, -1:]
    # Rounding must not lift a coin just below 1 to the total, beyond the last owner.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    wanted = torch.minimum(coins[:, None] * total, below_total)
    return torch.searchsorted(mass, wanted, right=True)[:, 0]


class CellDraw:
    """Request `seed` draws its tokens from the middles of cells `cells[seed]`, by position."""

    def __init__(self, cells: Sequence[Sequence[int]], num_cells: int) -> None:
        self.coins = (torch.tensor(cells, dtype=torch.float64) + 0.5) / num_cells

    def __call__(self, processed: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        # Nodes beyond the end of the text are drawn too, and never emitted.
        return invert(processed, self.coins[seeds, positions.clamp(max=self.coins.shape[1] - 1)])


# --------------------------------------------------------------------------- loops


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


def table_loop(policy: Policy, batch_size: int = 1, **options: Any) -> DecodeLoop:
    """The production loop on both tables."""
    target: Any = TableModel(target_law)
    drafter = SmallModelDrafter(TableModel(drafter_law))  # type: ignore[arg-type]
    sizes = {"batch_size": batch_size, "max_text_tokens": 40}
    return DecodeLoop(target, drafter, policy, **{**sizes, "eos_ids": (), **options})


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
    loop = table_loop(policy, batch_size, observer=observer, draw=CellDraw(GRID, TOTAL))
    given = [request_of(seed) for seed in seeds]
    joining = (0, 0, 0, 1, 1, 2, batch_size)
    done = loop.run(given) if late is None else join_at_random(loop, given, late, joining)
    return {int(one.request.request_id): one.token_ids for one in done}


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


# --------------------------------------------------------------------------- trees


def all_trees(max_nodes: int) -> Iterator[list[tuple[int, ...]]]:
    """Every prefix-closed set of token paths with the root, up to `max_nodes`, level order."""

    def grow(paths: list[tuple[int, ...]], candidates: list[tuple[int, ...]]) -> Iterator:
        yield paths
        if len(paths) < max_nodes:
            for place, path in enumerate(candidates):
                children = [(*path, token) for token in range(VOCAB)]
                yield from grow([*paths, path], candidates[place + 1 :] + children)

    yield from grow([()], [(token,) for token in range(VOCAB)])


def tree_of(paths: list[tuple[int, ...]]) -> TokenTree:
    ordered = sorted(paths, key=lambda path: (len(path), path))
    parent = [-1] + [ordered.index(path[:-1]) for path in ordered[1:]]
    tokens = [PROMPT[-1]] + [path[-1] for path in ordered[1:]]
    depth = [len(path) for path in ordered]
    columns = (torch.tensor([column]) for column in (tokens, parent, depth))
    return TokenTree(*columns, torch.zeros(1, len(paths)))
