"""What the target says of the trees, and what is kept: the second half of a captured round.

verify   cuts the selection to the tier, asks the target, walks; fills what the host reads
commit   moves the accepted entries, lets the drafter read, advances the state
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specctl.kernels.bookkeeping import Laid, Settled, Walked, lay_out, settle
from specctl.kernels.tree_build import BuiltTree, Pool, link_tree
from specctl.kernels.verify_tree import Walk, walk_tree
from specctl.policy.budgets import keep_first, rank_batch
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.cascade import Cascade
from specctl.runtime.graphs.drafters import Pass
from specctl.runtime.graphs.laws import Mode, law_of, tokens_of
from specctl.runtime.graphs.places import Places
from specctl.runtime.graphs.relaxing import Relaxation
from specctl.runtime.graphs.selecting import Selection, draft_pool
from specctl.runtime.graphs.state import Rows


class VerifiedRound(NamedTuple):
    """What a verification leaves behind for who observes it.

    Attributes:
        logits, law: `[T, V]`, by place on the packed axis. target_ids: `[B, N]`.
    """

    tree: BuiltTree
    laid: Laid
    logits: Tensor
    law: Tensor
    target_ids: Tensor
    path: Tensor

    def copied(self) -> VerifiedRound:
        """In memory of its own: a graph's may be scratch to the one that is replayed next."""
        logits = self.logits.clone()
        return VerifiedRound(
            BuiltTree(*(part.clone() for part in self.tree)),
            Laid(*(part.clone() for part in self.laid)),
            logits,
            logits if self.law is self.logits else self.law.clone(),
            self.target_ids.clone(),
            self.path.clone(),
        )


@dataclass
class Verification:
    """Buffers and parts of one loop's verifications.

    Attributes:
        observed: whether `verify` gives its tensors away.
        settled: what a round came to. features: `[S, D + 1, ·]`, the target's states on the path,
            or None.
    """

    target: CachedModel
    selection: Selection
    relaxation: Relaxation | None
    observed: bool
    settled: Settled
    features: Tensor | None = None

    def verify(self, state: Rows, tier: int, mode: Mode) -> VerifiedRound | None:
        """One verification of the rows, `tier` tokens at most together."""
        rows, drafting = len(state.root_ids), self.selection.drafting
        pool, submitted = drafting.of_rows(rows), self.selection.submitted[:rows]
        submitted = cut(pool, submitted, state, tier)
        tree = link_tree(pool, submitted, drafting.rule.max_depth, positions=state.prefix)
        laid = self._lay_out(tree, state, tier)
        logits, features = self._ask(tree, laid, state)
        best, law = logits.max(-1), law_of(logits, state, laid.row, mode)
        own = tokens_of(best.indices, law, state, laid.row, laid.positions, mode)
        target_ids = own[laid.node_at]
        walk = self._walk(tree, target_ids, laid, logits, law if mode == "nucleus" else None, state)
        self._settle(walk, tree, laid, best.values, pool, state)
        if self.features is not None and features is not None:
            self.features[:rows] = features[self.settled.path_at[:rows]]
        if not self.observed:  # a graph would hold its logits as long as it lives
            return None
        return VerifiedRound(tree, laid, logits, law, target_ids, walk.path)

    def commit(self, state: Rows) -> None:
        """Keeps what was accepted and lets the drafter read it."""
        rows, drafting = len(state.root_ids), self.selection.drafting
        assert self.target.cache is not None
        self.target.cache.commit(0, state.prefix, self.settled.path[:rows])
        if drafting.passes is not None:
            features = None if self.features is None else self.features[:rows]
            drafting.passes.read(self._text(state), self.settled.last[:rows], features)
        state.advance(self.settled.next_root[:rows], self.settled.outcome[:rows, 0])

    def _lay_out(self, tree: BuiltTree, state: Rows, tier: int) -> Laid:
        assert self.target.cache is not None
        last_place = self.target.cache.capacity - 1
        return lay_out(tree, state.prefix, state.positions, num_tokens=tier, last_place=last_place)

    def _ask(self, tree: BuiltTree, laid: Laid, state: Rows) -> tuple[Tensor, Tensor | None]:
        """`[T, V]` logits and `[T, ·]` features of the nodes."""
        assert self.target.cache is not None
        (rows, columns), capacity = tree.parent.shape, self.target.cache.capacity
        words = laid.words[None, None]
        cascade = Cascade(state.prefix, laid.offsets, words, columns, 0)
        result = self.target.forward_placed(
            Places(laid.row, laid.place, rows, capacity),
            cascade.options,
            laid.token_ids[None],
            laid.position_ids[None],
        )
        features = None if result.features is None else result.features[0]
        return result.logits[0], features

    def _walk(
        self,
        tree: BuiltTree,
        target_ids: Tensor,
        laid: Laid,
        logits: Tensor,
        excluding: Tensor | None,
        state: Rows,
    ) -> Walk:
        relaxed = None
        if self.relaxation is not None:
            relaxed = self.relaxation.of(laid, logits, excluding, state)
        depth = self.selection.drafting.rule.max_depth
        return walk_tree(tree.parent, tree.token_ids, target_ids, depth, relaxed)

    def _settle(
        self, walk: Walk, tree: BuiltTree, laid: Laid, best: Tensor, pool: Pool, state: Rows
    ) -> None:
        rows, selection = len(state.root_ids), self.selection
        found = Walked(
            path=walk.path,
            token_ids=walk.token_ids,
            num_nodes=tree.num_nodes,
            node_at=laid.node_at,
            offsets=laid.offsets,
            best=best,
            parent=pool.parent,
            depth=pool.depth,
            submitted=selection.submitted[:rows],
            faulty=selection.faulty[:rows],
            stable=state.stable,
        )
        settle(found, self.settled)

    def _text(self, state: Rows) -> Pass:
        """What was emitted, as the drafter reads it."""
        settled, rows = self.settled, len(state.root_ids)
        constants = self.selection.drafting.constants
        return Pass(
            token_ids=settled.read_ids[:rows],
            position_ids=settled.read_positions[:rows],
            place=settled.read_place[:rows],
            words=constants.causal_words(rows, settled.read_ids.shape[1]),
            stable=state.stable,
            behind=0,
            constants=constants,
        )


def cut(pool: Pool, submitted: Tensor, state: Rows, tier: int) -> Tensor:
    """The likeliest nodes of a batch that a tier has room for, roots first of all.

    Returns:
        `[B, N']`, N' at most the tier.
    """
    rows, columns = submitted.shape
    if rows * columns <= tier:
        return submitted
    order = rank_batch(draft_pool(pool), submitted, None).order
    num_roots = (~state.vacant).sum()
    return keep_first(submitted, order, tier - num_roots)[:, : min(columns, tier)]
