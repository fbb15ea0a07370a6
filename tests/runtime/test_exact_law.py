"""Losslessness by exact enumeration: integers and fractions, no statistics, no tolerance.

Two proofs. First, for *every* draft tree of up to 7 nodes over 3 tokens, the production walk
emits each token sequence with exactly the target's probability; by induction over rounds the
text then follows the target's law whatever trees a policy chooses, as long as it chooses them
before the target's draws. Second, the whole production loop, for every strategy, emits exactly
the target's law when its coins run through every combination of probability cells.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch

from specctl.kernels.verify_tree import verify_tree
from specctl.policy import Chain, EntropyBins, Policy, RootOnly, StaticTree
from specctl.policy.verification import StrictAcceptance
from specctl.runtime import decode
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.drafter import SmallModelDrafter
from specctl.runtime.observe import Request, Sampling
from specctl.runtime.round import emitted_tokens
from specctl.tree import TokenTree
from tests.runtime.table import TOTAL, VOCAB, TableModel, drafter_law, target_law

PROMPT = (1, 2)


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


class _Verdict:
    """What `emitted_tokens` reads of a verdict."""

    def __init__(self, tree: TokenTree, target_ids: torch.Tensor, path: torch.Tensor) -> None:
        self.tree, self.target_ids, self.path = tree, target_ids, path


@cache
def all_draws(size: int) -> torch.Tensor:
    """Every assignment of a target token to every node, `[VOCAB ** N, N]`."""
    return torch.tensor(list(itertools.product(range(VOCAB), repeat=size)))


def emitted_law(paths: list[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Weight of each emitted sequence, times `TOTAL ** N`, over all draws at all nodes."""
    size, single, draws = len(paths), tree_of(paths), all_draws(len(paths))
    columns = (single.token_ids, single.parent, single.depth, single.draft_logp)
    tree = TokenTree(*(column.expand(len(draws), -1) for column in columns))
    path = verify_tree(tree.parent, StrictAcceptance().admit(tree, draws), int(tree.depth.max()))
    tokens, _ = emitted_tokens(_Verdict(tree, draws, path))
    ordered = sorted(paths, key=lambda p: (len(p), p))
    weights = np.array([target_law([*PROMPT, *path]) for path in ordered], dtype=np.int64)
    mass = weights[np.arange(size), draws.numpy()].prod(1)
    # A sequence as one number, digits in base VOCAB + 1; sums stay far below 2 ** 53.
    digits = (VOCAB + 1) ** np.arange(tokens.shape[1])
    keys, first, owner = np.unique((tokens.numpy() + 1) @ digits, True, True)
    totals = np.bincount(owner, weights=mass).astype(np.int64).tolist()
    rows = tokens[torch.from_numpy(first)].tolist()
    sequences = [tuple(token for token in row if token >= 0) for row in rows]
    assert len(set(sequences)) == len(keys)
    return {seq: total for seq, total in zip(sequences, totals, strict=True) if total}


def target_weight(sequence: tuple[int, ...], size: int) -> int:
    """The target's probability of a sequence, times `TOTAL ** size`."""
    context, weight = list(PROMPT), 1
    for token in sequence:
        weight *= target_law(context)[token]
        context.append(token)
    return weight * TOTAL ** (size - len(sequence))


FUSS_CATALAN = {1: 1, 2: 3, 3: 12, 4: 55, 5: 273, 6: 1428, 7: 7752}
"""Number of ternary trees by nodes: the enumeration must not lose one."""


@pytest.mark.parametrize("num_nodes", FUSS_CATALAN)
def test_every_tree_emits_the_target_law(num_nodes: int) -> None:
    trees = [paths for paths in all_trees(num_nodes) if len(paths) == num_nodes]
    assert len(trees) == FUSS_CATALAN[num_nodes]
    for paths in trees:
        law = emitted_law(paths)
        assert law == {sequence: target_weight(sequence, num_nodes) for sequence in law}
        assert sum(law.values()) == TOTAL**num_nodes


POLICIES = {
    "ar": Policy(shape=RootOnly()),
    "chain": Policy(shape=Chain(num_draft_tokens=3)),
    "eagle2": Policy(shape=StaticTree(depth=2, top_k=2, num_tokens=5)),
    "eagle2-wide": Policy(shape=StaticTree(depth=3, top_k=3, num_tokens=7)),
    "hetero": Policy(
        shape=EntropyBins(
            base=StaticTree(depth=2, top_k=2, num_tokens=5), edges=(0.9, 1.4), gammas=(0.7, 1.0)
        )
    ),
}
NUM_TOKENS = 4
GRID = list(itertools.product(range(TOTAL), repeat=NUM_TOKENS))


def loop_law(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, batch_size: int = 3
) -> dict[tuple[int, ...], Fraction]:
    """Law of the text over all cells of all coins, through the production loop."""
    by_seed = dict(enumerate(GRID))

    def coins(sampling: Sampling, count: int) -> torch.Tensor:
        cells = by_seed[sampling.seed][:count]
        return (torch.tensor(cells, dtype=torch.float64) + 0.5) / TOTAL

    monkeypatch.setattr(decode, "uniforms", coins)
    target, drafter = TableModel(target_law), SmallModelDrafter(TableModel(drafter_law))
    loop = DecodeLoop(
        target, drafter, policy, batch_size=batch_size, max_text_tokens=16, eos_ids=()
    )
    requests = [
        Request(f"{seed}", PROMPT, NUM_TOKENS, sampling=Sampling(1.0, seed=seed))
        for seed in by_seed
    ]
    counts = Counter(done.token_ids for done in loop.run(requests))
    return {text: Fraction(count, len(GRID)) for text, count in counts.items()}


def true_law() -> dict[tuple[int, ...], Fraction]:
    law = {}
    for text in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        weight = target_weight(text, NUM_TOKENS)
        if weight:
            law[text] = Fraction(weight, TOTAL**NUM_TOKENS)
    return law


@pytest.mark.parametrize("name", POLICIES)
def test_loop_emits_the_target_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law = loop_law(POLICIES[name], monkeypatch)
    assert law == true_law()
    assert sum(law.values()) == 1
