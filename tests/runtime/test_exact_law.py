"""Losslessness by exact enumeration: integers and fractions, no statistics, no tolerance.

Two proofs. First, for *every* draft tree of up to 6 nodes over 3 tokens (7 every night), the
production walk emits each token sequence with exactly the target's probability; by induction over
rounds the text then follows the target's law whatever trees a policy chooses, as long as it chooses
them before the target's draws. Second, the whole production loop, for every strategy and shared
budget, emits exactly the target's law when its coins run through every combination of probability
cells, and each request's text is the one that its own coins mean: a batch makes no two texts depend
on each other.
"""

from __future__ import annotations

import itertools
from functools import cache
from random import Random

import numpy as np
import pytest
import torch

from specctl.kernels.verify_tree import walk_tree
from tests.runtime import table
from tests.runtime.toy import Kept


@cache
def all_draws(size: int) -> torch.Tensor:
    """Every assignment of a target token to every node, `[VOCAB ** N, N]`."""
    return torch.tensor(list(itertools.product(range(table.VOCAB), repeat=size)))


def emitted_law(paths: list[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Weight of each emitted sequence, times `TOTAL ** N`, over all draws at all nodes."""
    size, single, draws = len(paths), table.tree_of(paths), all_draws(len(paths))
    parent, token_ids = (c.expand(len(draws), -1) for c in (single.parent, single.token_ids))
    tokens = walk_tree(parent, token_ids, draws, int(single.depth.max())).token_ids
    ordered = sorted(paths, key=lambda p: (len(p), p))
    weights = np.array(
        [table.target_law([*table.PROMPT, *path]) for path in ordered], dtype=np.int64
    )
    mass = weights[np.arange(size), draws.numpy()].prod(1)
    # A sequence as one number, digits in base VOCAB + 1; sums stay far below 2 ** 53.
    digits = (table.VOCAB + 1) ** np.arange(tokens.shape[1])
    keys, first, owner = np.unique((tokens.numpy() + 1) @ digits, True, True)
    totals = np.bincount(owner, weights=mass).astype(np.int64).tolist()
    rows = tokens[torch.from_numpy(first)].tolist()
    sequences = [tuple(token for token in row if token >= 0) for row in rows]
    assert len(set(sequences)) == len(keys)
    return {seq: total for seq, total in zip(sequences, totals, strict=True) if total}


FUSS_CATALAN = {1: 1, 2: 3, 3: 12, 4: 55, 5: 273, 6: 1428, 7: 7752}
"""Number of ternary trees by nodes: the enumeration must not lose one."""


@pytest.mark.parametrize(
    "num_nodes", [1, 2, 3, 4, 5, 6, pytest.param(7, marks=pytest.mark.nightly)]
)
def test_every_tree_emits_the_target_law(num_nodes: int) -> None:
    trees = [paths for paths in table.all_trees(num_nodes) if len(paths) == num_nodes]
    assert len(trees) == FUSS_CATALAN[num_nodes]
    for paths in trees:
        law = emitted_law(paths)
        assert law == {sequence: table.target_weight(sequence, num_nodes) for sequence in law}
        assert sum(law.values()) == table.TOTAL**num_nodes


@pytest.mark.parametrize("name", table.POLICIES)
def test_loop_emits_the_target_law(name: str) -> None:
    texts = table.loop_texts(table.POLICIES[name])
    assert table.law_of(texts) == table.true_law()
    assert texts == {seed: table.text_of(seed) for seed in table.ALL_SEEDS}


SOME_SEEDS = table.ALL_SEEDS[::4]


@pytest.mark.parametrize("name", table.POLICIES)
def test_requests_that_join_late_have_their_own_text(name: str) -> None:
    seeds = Random(9).sample(SOME_SEEDS, len(SOME_SEEDS))
    found = table.loop_texts(table.POLICIES[name], 4, seeds, late=Random(3))
    assert found == {seed: table.text_of(seed) for seed in SOME_SEEDS}


@pytest.mark.parametrize("name", table.BUDGETS)
def test_the_budgets_of_these_tests_bind(name: str) -> None:
    kept = Kept()
    table.loop_texts(table.BUDGETS[name], 4, SOME_SEEDS, observer=kept)
    rounds = [(record.submitted >= 0).sum(1).tolist() for record in kept.records]
    assert len({n for row in rounds for n in row}) > 2, "equal shares would prove little"
    maximum = getattr(table.BUDGETS[name].budget, "max_tokens", None)
    if maximum is not None:
        assert max(sum(row) for row in rounds) == maximum
