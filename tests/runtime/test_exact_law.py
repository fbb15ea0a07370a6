"""Losslessness by exact enumeration: integers and fractions, no statistics, no tolerance.

Two proofs. First, for *every* draft tree of up to 6 nodes over 3 tokens (7 every night), the
production walk emits each token sequence with exactly the target's probability; by induction over
rounds the text then follows the target's law whatever trees a policy chooses, as long as it chooses
them before the target's draws. Second, the whole production loop, for every strategy and shared
budget, emits exactly the target's law when its coins run through every combination of probability
cells, and each request's text is the one that its own coins mean: a batch makes no two texts depend
on each other.

The proofs must be able to fail: bugs that others shipped are put in on purpose, as far as they
apply to point-mass verification, and have to be seen. Bugs of draws: `test_sampling.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specctl.kernels.tree_build import BuiltTree
from specctl.kernels.verify_tree import reference as walk
from specctl.kernels.verify_tree import walk_tree
from specctl.policy import Policy
from specctl.runtime import verifying
from specctl.runtime.round import Round
from specctl.runtime.state import Rows
from specctl.runtime.verifying import Draft, TargetOutput, Verifier
from specctl.tree import DraftPool
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
    texts = table.loop_texts(table.POLICIES[name], 8 if name in table.BUDGETS else 32)
    assert table.law_of(texts) == table.true_law()
    assert texts == {seed: table.text_of(seed) for seed in table.ALL_SEEDS}


SOME_SEEDS = table.ALL_SEEDS[::4]


@pytest.mark.parametrize("name", ["eagle2-wide", "adasd_stop", *table.BUDGETS])
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


# --------------------------------------------------------------------------- bugs put in


Patch = pytest.MonkeyPatch
SEEDS = table.ALL_SEEDS[::3]
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(install: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[install.__name__] = install
    return install


def admitting(patch: Patch, admit: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Nodes `[B, N]` that the walk follows, by parents, tokens and the target's tokens."""

    def admitted(parent: Tensor, tokens: Tensor, target: Tensor, _: object) -> Tensor:
        return admit(parent, tokens, target) & (parent >= 0)

    patch.setattr(walk, "_admitted", admitted)


@mutant
def always_accept_first_child(patch: Patch) -> None:
    def first(parent: Tensor, tokens: Tensor, target: Tensor) -> Tensor:
        is_first = torch.ones_like(parent, dtype=torch.bool)
        is_first[:, 1:] = parent[:, 1:] != parent[:, :-1]
        return is_first

    admitting(patch, first)


@mutant
def verify_with_own_logits(patch: Patch) -> None:
    admitting(patch, lambda parent, tokens, target: tokens == target)


@mutant
def bonus_always_argmax(patch: Patch) -> None:
    original = Verifier.judge

    def judge(self: Verifier, rows: Rows, draft: Draft, output: TargetOutput, *rest: Any) -> object:
        parent, best = output.tree.parent, output.best_ids[output.laid.node_at]
        is_leaf = torch.ones_like(parent, dtype=torch.bool)
        is_leaf.scatter_(1, parent.clamp(min=0), parent < 0)

        def draw(processed: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
            own = drawn(processed, seeds, positions)
            own[output.laid.node_at[is_leaf]] = best[is_leaf]
            return own

        drawn, self.draw = self.draw, draw
        found = original(self, rows, draft, output, *rest)
        self.draw = drawn
        return found

    patch.setattr(Verifier, "judge", judge)


def drawing(patch: Patch, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> None:
    """Draws from other logits, seeds or positions."""
    original = table.CellDraw.__call__
    patch.setattr(table.CellDraw, "__call__", lambda draw, *given: original(draw, *change(*given)))


@mutant
def one_coin_for_all_positions(patch: Patch) -> None:
    drawing(patch, lambda logits, seeds, at: (logits, seeds, at[:1].expand_as(at)))


@mutant
def coin_of_the_position_before(patch: Patch) -> None:
    drawing(patch, lambda logits, seeds, at: (logits, seeds, (at - 1).clamp(min=0)))


@mutant
def rows_swapped_between_requests(patch: Patch) -> None:
    drawing(patch, lambda logits, seeds, at: (logits.roll(1, 0), seeds, at))


@mutant
def coins_of_the_first_request_for_all(patch: Patch) -> None:
    drawing(patch, lambda logits, seeds, at: (logits, seeds[:1].expand_as(seeds), at))


@mutant
def coins_by_row_instead_of_by_request(patch: Patch) -> None:
    rows = lambda seeds: seeds.unique(return_inverse=True)[1]  # noqa: E731
    drawing(patch, lambda logits, seeds, at: (logits, rows(seeds), at))


@mutant
def stale_kv_after_accepting(patch: Patch) -> None:
    patch.setattr(table._TextCache, "commit", lambda *_: None)


@mutant
def policy_drops_a_drawn_token(patch: Patch) -> None:
    """What is verified depends on what the target drew."""
    original = table.CellDraw.__call__

    def redraw(draw: table.CellDraw, processed: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        own = original(draw, processed, seeds, positions)
        return torch.where(own == 2, processed.argmax(-1), own)

    patch.setattr(table.CellDraw, "__call__", redraw)


@mutant
def prefill_greedy_under_sampling(patch: Patch) -> None:
    patch.setattr(Round, "first_token", lambda self, logits, sampling: logits.argmax(-1))


@mutant
def tree_not_closed(patch: Patch) -> None:
    original = verifying.link_tree

    def link(pool: DraftPool, submitted: Tensor, *rest: Any, **named: Any) -> BuiltTree:
        """Nodes whose parent is dropped hang from the root."""
        tree = original(pool, submitted, *rest, **named)
        return tree._replace(parent=tree.parent.clamp(max=0))

    patch.setattr(verifying, "link_tree", link)


@mutant
def requests_that_leave_are_not_moved(patch: Patch) -> None:
    patch.setattr(table._TextCache, "move", lambda *_: None)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name: str, monkeypatch: Patch) -> None:
    MUTANTS[name](monkeypatch)
    assert any(differs(table.POLICIES[policy]) for policy in ("chain", "eagle2-wide"))


def differs(policy: Policy) -> bool:
    """Whether some text is not the one that its coins mean; a crash would prove nothing."""
    texts = table.loop_texts(policy, seeds=SEEDS)
    return texts != {seed: table.text_of(seed) for seed in SEEDS}
