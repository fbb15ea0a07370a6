"""Verification, the second half of a round.

ask      cuts the selection to the tier and runs the target on every node; captured
judge    draws the target's tokens and walks the trees; eager, so that graphs are independent of
         sampling and acceptance
commit   moves the accepted entries, lets the drafter read, advances the state; captured
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.kernels.bookkeeping import FACTS, Laid, Walked, lay_out, new_settled, settle
from specctl.kernels.dispatch import runs_fused
from specctl.kernels.node_features import node_features
from specctl.kernels.tree_build import BuiltTree, link_tree
from specctl.kernels.verify_tree import Judged, RunnerUp, walk_tree
from specctl.policy import Acceptance, Mars
from specctl.policy.budgets import keep_first, rank_batch
from specctl.policy.verification import DraftDistribution, Outcome, StrictAcceptance, Verification
from specctl.runtime.attention import Pass, PassTables
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.drafter import Drafter
from specctl.runtime.runnable import Runnable
from specctl.runtime.sampling import Draw, SamplingTable
from specctl.runtime.state import Rows
from specctl.tree import DraftPool, TokenTree


@dataclass(frozen=True)
class Draft:
    """The drafts of B requests."""

    pool: DraftPool  # all candidates
    submitted: Tensor  # `[B, N]` pool slots, ascending, -1 padded
    faulty: Tensor
    """`[B]` bool, rows with NaN scores, which submit the likeliest nodes."""
    rules: Runnable  # of the draft: the policy's or its fallback's
    known: int | None = None  # tokens verified at most, if known on the host
    view: DraftPool | None = None  # a rule's pool, in memory of its own; None if kernels drafted
    distribution: DraftDistribution | None = None  # the drafter's, if the acceptance needs it


@dataclass(frozen=True)
class TargetOutput:
    """The target's outputs at T packed nodes."""

    tree: BuiltTree
    laid: Laid
    logits: Tensor  # `[T, V]`
    best: Tensor  # `[T]`, the largest logit
    best_ids: Tensor  # `[T]`, its token
    features: Tensor | None  # `[T, F]`, the target's states, or None
    is_even: bool = False  # all B requests fill all N columns, so that no gather is needed

    def token_tree(self, num_rows: int) -> TokenTree:
        tree = self.tree
        columns = (tree.token_ids, tree.parent, tree.depth, tree.draft_logp)
        return TokenTree(*(column[:num_rows] for column in columns))

    def by_node(self, values: Tensor, num_rows: int) -> Tensor:
        """`[B, N, V]` from `[T, V]`, a view if all trees have equal sizes; padding is arbitrary."""
        at = self.laid.node_at[:num_rows]
        if self.is_even:
            return values.view(*at.shape, -1)
        return values[at]


@dataclass(frozen=True)
class Verdict:
    """The target's tokens and the accepted paths."""

    processed: Tensor  # `[T, V]` logits from which the tokens were drawn
    target_ids: Tensor  # `[B, N]`
    path: Tensor  # `[B, D + 1]`
    evidence: Tensor | None  # `[B, N]`, measurements of the acceptance, or None


class Verifier:
    """Verifies the trees of up to S requests.

    Args:
        max_depth: levels of a tree at most.
        is_static: all sizes are fixed, for captures.

    Attributes:
        settled: the outcome of a round, at fixed addresses.
    """

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter | None,
        acceptance: Acceptance,
        tables: PassTables,
        *,
        num_slots: int,
        max_depth: int,
        eos_ids: Collection[int],
        draw: Draw,
        is_static: bool,
    ) -> None:
        self.target, self.drafter, self.tables = target, drafter, tables
        self.max_depth, self.draw, self.is_static = max_depth, draw, is_static
        self.settled = new_settled(num_slots, max_depth + 1, target.device)
        self._relaxation = Relaxation.of(acceptance, target, eos_ids)
        self._features: Tensor | None = None
        self._logits: Tensor | None = None
        if is_static and target.aux_layers:  # at a fixed address for graphs
            width = len(target.aux_layers) * int(target.config.hidden_size)
            size = (num_slots, max_depth + 1, width)
            self._features = torch.zeros(size, dtype=target.dtype, device=target.device)

    def reserve(self, num_tokens: int) -> None:
        """Allocates logits of the largest captured verification once for all graphs, each of which
        would otherwise hold its own."""
        size = (num_tokens, self.target.vocab_size)
        self._logits = torch.zeros(size, dtype=self.target.dtype, device=self.target.device)

    def ask(
        self, rows: Rows, draft: Draft, num_tokens: int | None, longest: int | None
    ) -> TargetOutput:
        """Runs the target on all submitted nodes.

        Args:
            num_tokens: tier of a captured round, to which the batch is cut; None does not cut.
            longest: largest prefix; None for the capacity of the cache.
        """
        cache, pool, submitted = self.target.cache, draft.pool, draft.submitted
        assert cache is not None
        if num_tokens is not None:
            submitted = cut(pool, submitted, rows, num_tokens)
        exact, num_columns = num_tokens is None, submitted.shape[1]
        if exact and num_columns == 1:
            tree = self._roots(rows)
        else:
            tree = link_tree(pool, submitted, self.max_depth, positions=rows.prefix)
        size = int(tree.num_nodes.sum()) if num_tokens is None else num_tokens
        if exact and size == submitted.numel():
            laid = self._full(tree, rows)
        else:
            laid = lay_out(
                tree,
                rows.prefix,
                rows.positions,
                num_tokens=size,
                last_place=cache.capacity - 1,
            )
        reads = Pass(
            token_ids=laid.token_ids,
            position_ids=laid.position_ids,
            row=laid.row,
            place=laid.place,
            prefixes=rows.prefix,
            offsets=laid.offsets,
            max_nodes=num_columns,
            behind=0,
            width=cache.capacity if longest is None else longest + num_columns,
            words=laid.words,
            exact=exact,
        )
        result, is_even = self.target.forward(reads), exact and reads.is_even
        logits = result.logits
        best = logits.max(-1)
        if self._logits is not None and not exact:
            logits = self._logits[:num_tokens].copy_(logits)
        return TargetOutput(tree, laid, logits, best.values, best.indices, result.features, is_even)

    def _roots(self, rows: Rows) -> BuiltTree:
        """Trees of a root each, for plain decoding."""
        roots = rows.root_ids[:, None]
        zero = torch.zeros_like(roots)
        return BuiltTree(
            submitted=zero,
            token_ids=roots,
            parent=zero - 1,
            depth=zero,
            draft_logp=zero.float(),
            position_ids=rows.prefix[:, None],
            valid=zero == 0,
            num_nodes=zero[:, 0] + 1,
            ancestor_bits=self.tables.causal_words(len(roots), 1)[:, None],
        )

    def _full(self, tree: BuiltTree, rows: Rows) -> Laid:
        """As `lay_out`, for trees that fill all their columns."""
        num_rows, columns = tree.token_ids.shape
        node_at = self.tables.steps(num_rows * columns).view(num_rows, columns)
        return Laid(
            offsets=self.tables.offsets(num_rows, columns),
            row=self.tables.rows(num_rows, columns),
            place=(rows.prefix[:, None] + node_at[0]).flatten(),
            token_ids=tree.token_ids.flatten(),
            position_ids=tree.position_ids.flatten(),
            positions=(rows.positions[:, None] + tree.depth).flatten(),
            words=tree.ancestor_bits.flatten(0, 1),
            node_at=node_at,
        )

    def judge(
        self,
        rows: Rows,
        draft: Draft,
        output: TargetOutput,
        samplings: SamplingTable,
        memory: Tensor,
    ) -> Verdict:
        """Draws the target's tokens, walks the trees and fills `settled`."""
        tree, laid = output.tree, output.laid
        processed = samplings.process(output.logits, laid.row)
        own = samplings.draw(processed, output.best_ids, laid.row, laid.positions, self.draw)
        target_ids, evidence = own[laid.node_at], None
        acceptance: Judged | RunnerUp | None = None
        num_rows = len(rows.root_ids)
        if self._relaxation is not None and runs_fused("walk_tree", target_ids):
            greedy = samplings.greedy[:num_rows]
            acceptance = self._relaxation.runner_up(output, processed, greedy)
        elif not isinstance(draft.rules.acceptance, StrictAcceptance):
            judged = draft.rules.acceptance.judge(
                Verification(
                    tree=output.token_tree(num_rows),
                    target_ids=target_ids,
                    logits=output.by_node(output.logits, num_rows),
                    processed=output.by_node(processed, num_rows),
                    greedy=samplings.greedy[:num_rows],
                    seeds=samplings.seeds[:num_rows],
                    positions=rows.positions[:, None] + tree.depth,
                    memory=memory,
                    drafted_from=_padded(draft.distribution, tree.token_ids),
                )
            )
            acceptance, evidence = Judged(judged.admitted), judged.evidence
            target_ids = judged.target_ids
        walk = walk_tree(tree.parent, tree.token_ids, target_ids, self.max_depth, acceptance)
        settle(
            Walked(
                path=walk.path,
                token_ids=walk.token_ids,
                num_nodes=tree.num_nodes,
                node_at=laid.node_at,
                best=output.best.float(),
                parent=draft.pool.parent,
                depth=draft.pool.depth,
                submitted=draft.submitted,
                faulty=draft.faulty,
                stable=rows.stable,
            ),
            self.settled,
        )
        if output.features is not None:
            features = output.features[self.settled.path_at[:num_rows]]
            if self._features is None or not self.is_static:
                self._features = features
            else:
                self._features[:num_rows].copy_(features)
        return Verdict(processed, target_ids, walk.path, evidence)

    def commit(
        self, rows: Rows, counts: list[int] | None = None, longest: int | None = None
    ) -> None:
        """Keeps the accepted nodes and lets the drafter read them.

        Args:
            counts: tokens that the drafter reads of each request; None reads padded paths.
            longest: largest prefix of the drafter; None for the capacity of its cache.
        """
        num_rows, settled = len(rows.root_ids), self.settled
        assert self.target.cache is not None
        most = settled.path.shape[1] if counts is None else max(counts)
        self.target.cache.commit(rows.prefix, settled.path[:num_rows, :most])
        if self.drafter is not None:
            self._read(self.drafter, rows, counts, most, longest)
        rows.advance(settled.next_root[:num_rows], settled.outcome[:num_rows, 0])

    def _read(
        self,
        drafter: Drafter,
        rows: Rows,
        counts: list[int] | None,
        most: int,
        longest: int | None,
    ) -> None:
        settled, num_rows = self.settled, len(rows.root_ids)
        if counts is None or min(counts) == most:
            whose, offsets = self.tables.rows(num_rows, most), self.tables.offsets(num_rows, most)
            words = self.tables.causal_words(num_rows, most)

            def taken(values: Tensor) -> Tensor:
                return values[:num_rows, :most].flatten(0, 1)

        else:
            pairs = [(row, column) for row, n in enumerate(counts) for column in range(n)]
            whose, column = torch.tensor(pairs, device=rows.prefix.device).unbind(1)
            offsets = torch.tensor([0, *accumulate(counts)], device=rows.prefix.device)
            words = self.tables.causal_words(1, most)[column]

            def taken(values: Tensor) -> Tensor:
                return values[whose, column]

        text = Pass(
            token_ids=taken(settled.read_ids),
            position_ids=taken(settled.read_place),
            row=whose,
            place=taken(settled.read_place),
            prefixes=rows.stable,
            offsets=offsets,
            max_nodes=most,
            behind=0,
            width=drafter.capacity if longest is None else longest + most,
            words=words,
            exact=counts is not None,
        )
        features = None if self._features is None else taken(self._features)
        last = offsets[1:] - 1 if counts is not None else offsets[:-1] + settled.last[:num_rows]
        drafter.read(text, last, features)


def _padded(drafted: DraftDistribution | None, token_ids: Tensor) -> DraftDistribution | None:
    """Pads the drafter's distributions to the captured shape; padding is never read."""
    if drafted is None or drafted.logits.shape[:2] == token_ids.shape:
        return drafted
    (rows, columns), (has_rows, has_columns) = token_ids.shape, drafted.logits.shape[:2]
    behind = (0, 0, 0, columns - has_columns, 0, rows - has_rows)
    return replace(drafted, logits=pad(drafted.logits, behind))


@dataclass(frozen=True)
class Relaxation:
    """MARS in the kernel's walk (`kernels.verify_tree.RunnerUp`)."""

    bound: Tensor  # `[1]` float32
    denied: Tensor  # `[V]` bool
    form: Literal["ratio", "difference"]

    @classmethod
    def of(
        cls, acceptance: Acceptance, target: CachedModel, eos_ids: Collection[int]
    ) -> Relaxation | None:
        """The relaxation of an acceptance, with EOS denied; None if kernels cannot compute it."""
        if not isinstance(acceptance, Mars) or acceptance.mode != "sound":
            return None
        denied = torch.zeros(target.vocab_size, dtype=torch.bool)
        ids = {*acceptance.deny_token_ids, *eos_ids}
        denied[[token for token in ids if token < target.vocab_size]] = True
        theta = acceptance.theta
        bound = {"ratio": theta, "margin": -theta}.get(acceptance.form)
        if bound is None:
            bound = math.log(theta) if theta > 0 else -math.inf
        at = torch.tensor([bound], dtype=torch.float32, device=target.device)
        is_ratio = acceptance.form == "ratio"
        return cls(at, denied.to(target.device), "ratio" if is_ratio else "difference")

    def runner_up(self, output: TargetOutput, processed: Tensor, greedy: Tensor) -> RunnerUp:
        """The second choices that the walk may follow."""
        found, at = node_features(output.logits, 2, 1), output.laid.node_at
        filtered = None if processed is output.logits else processed
        bound = self.bound.expand(len(greedy)).contiguous()
        top_ids, top_two = found.top_ids[at], found.top_two[at]
        return RunnerUp(top_ids, top_two, greedy, bound, self.form, self.denied, filtered, at)


def cut(pool: DraftPool, submitted: Tensor, rows: Rows, num_tokens: int) -> Tensor:
    """`[B, N']`: all roots and the likeliest nodes of a batch, as many as fit the tier."""
    num_rows, columns = submitted.shape
    if num_rows * columns <= num_tokens:
        return submitted
    order = rank_batch(pool, submitted, None).order
    num_roots = (~rows.vacant).sum()
    return keep_first(submitted, order, num_tokens - num_roots)[:, : min(columns, num_tokens)]


def outcome_of(draft: Draft, output: TargetOutput, verdict: Verdict, num_rows: int) -> Outcome:
    """The outcome of a round for the rules' `observe`."""
    return Outcome(
        draft.view or draft.pool.rows(slice(num_rows)),
        output.tree.submitted[:num_rows],
        output.token_tree(num_rows),
        verdict.path[:num_rows],
        verdict.target_ids[:num_rows],
        None if verdict.evidence is None else verdict.evidence[:num_rows],
    )


class RowOutcome(NamedTuple):
    """One row of `Settled.outcome` on the host: `FACTS`, then the emitted tokens, bonus last."""

    num_tokens: int
    num_verified: int
    num_levels: int
    faulty: int
    finite: int
    wanted: int
    tokens: list[int]

    @classmethod
    def of(cls, outcome: list[int]) -> RowOutcome:
        size, end = len(FACTS), len(FACTS) + outcome[0]
        return cls._make([*outcome[:size], outcome[size:end]])
