"""The round: draft, select, verify, commit, observe. The one loop body of every strategy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.errors import ModelError
from specctl.features import DraftPool
from specctl.kernels.verify_tree import verify_tree
from specctl.noise import signed_seed
from specctl.policy.rules import RoundStart
from specctl.policy.verification import DraftLaw, Judgement, Outcome, Verification
from specctl.runtime.cached_model import CachedModel, ForwardResult
from specctl.runtime.growth import DrafterSource, grow_tree, new_pool
from specctl.runtime.guard import Faults, PolicyFault
from specctl.runtime.metrics import Stopwatch
from specctl.runtime.observe import Sampling
from specctl.runtime.packing import pays
from specctl.runtime.prepared import PreparedShapes, ShapeKey, common_bin
from specctl.runtime.runnable import Runnable
from specctl.runtime.sampling import Draw, draw, race, warp_logits
from specctl.tree import TokenTree, ancestor_mask, gather, take


@dataclass
class BatchState:
    """Device-side state of the A active requests, row by row.

    Attributes:
        root_ids: `[A]` int64, last committed token, not yet read by the target.
        offsets: text length without the root, per row: where the root's KV entry will stand.
        positions: `[A]` int64, tokens emitted so far: the output position of the next one.
        samplings: one per row.
        shape_memory, acceptance_memory: `[A, M]` float64, what the two rules noted of each row.
        recent: see `DraftPool`; None unless the shape asks for it.
    """

    root_ids: Tensor
    offsets: list[int]
    positions: Tensor
    samplings: list[Sampling]
    shape_memory: Tensor
    acceptance_memory: Tensor
    recent: Tensor | None = None

    @property
    def greedy(self) -> Tensor:
        """`[A]` bool: the row takes the likeliest token."""
        return torch.tensor([s.greedy for s in self.samplings], device=self.root_ids.device)

    @property
    def seeds(self) -> Tensor:
        """`[A]` int64: each row's 64-bit seed, its highest bit as the sign."""
        signed = [signed_seed(s.seed) for s in self.samplings]
        return torch.tensor(signed, device=self.root_ids.device)


@dataclass(frozen=True)
class Draft:
    """What a round proposes: all candidates, and the ones to verify.

    Attributes:
        submitted: `[A, N]` pool indices. offered_depth: `[A]` levels drafted.
        bins: `[A]` the policy's regime, or None.
        law: what the drafter said of the submitted nodes, where the acceptance asks.
        rules: what chose them.
    """

    pool: DraftPool
    submitted: Tensor
    offered_depth: Tensor
    bins: Tensor | None
    rules: Runnable
    law: DraftLaw | None = None


@dataclass(frozen=True)
class Verdict:
    """What verification found, before anything is committed. Shapes as in `RoundRecord`.

    Attributes:
        rules: what chose the nodes: the policy's, or its fallback.
    """

    pool: DraftPool
    offered_depth: Tensor
    submitted: Tensor
    tree: TokenTree
    logits: Tensor
    warped: Tensor
    target_ids: Tensor
    path: Tensor
    features: Tensor | None
    evidence: Tensor | None
    rules: Runnable

    @property
    def outcome(self) -> Outcome:
        """What the rules learn from."""
        return Outcome(
            self.pool, self.submitted, self.tree, self.path, self.target_ids, self.evidence
        )


class Round:
    """Drafts, verifies and commits one round of a batch; without a drafter, plain decoding."""

    def __init__(self, target: CachedModel, rules: Runnable, draw_by: Draw = race) -> None:
        self.target, self.rules, self.draw_by = target, rules, draw_by
        self.drafter, self.faults = rules.drafter, Faults()
        assert target.cache is not None, "allocate() comes first"
        self.prepared = PreparedShapes(target.cache.capacity, target.device)

    def draft(self, state: BatchState, watch: Stopwatch) -> Draft:
        """Grows the trees and chooses what to verify; once more, by the fallback, if the policy
        fails."""
        try:
            return self.draft_by(self.rules, state, watch)
        except PolicyFault as fault:
            self.faults.note(fault)
        assert self.rules.fallback is not None, "only guarded rules raise it"
        return self.draft_by(self.rules.fallback, state, watch)

    def draft_by(self, rules: Runnable, state: BatchState, watch: Stopwatch) -> Draft:
        """One draft from the roots, under these rules."""
        shape = rules.shape
        plan = shape.begin(RoundStart(len(state.root_ids), state.shape_memory))
        if self.drafter is None:
            pool = new_pool(state.root_ids, 1).view()
            return Draft(pool, torch.zeros_like(pool.tree.depth), plan.max_depth, None, rules)
        source = DrafterSource(self.drafter, keep_logits=rules.acceptance.needs_draft_law)
        pool = grow_tree(shape, plan, source, state.root_ids, watch, state.recent)
        submitted = trim(rules.budget.share(plan, pool, shape.select(plan, pool)))
        watch.lap("policy")
        drafted = pool.tree.depth.masked_fill(~pool.tree.valid, 0).amax(1)
        law = self.draft_law(source, submitted, state) if source.keep_logits else None
        return Draft(pool, submitted, drafted, plan.bins, rules, law)

    def draft_law(self, source: DrafterSource, submitted: Tensor, state: BatchState) -> DraftLaw:
        """The drafter's law where each submitted node was drawn, after the same processors."""
        drafter = source.drafter
        vocabulary = torch.arange(drafter.vocab_size, device=submitted.device)
        logits = warp_logits(source.parent_logits(submitted).float(), state.samplings)
        return DraftLaw(logits, drafter.to_target_ids(vocabulary))

    def verify(self, state: BatchState, watch: Stopwatch) -> Verdict:
        """Drafts, then asks the target about every submitted node in one forward."""
        draft = self.draft(state, watch)
        submitted, nodes = draft.submitted, draft.pool.tree
        tree = take(nodes, submitted) if self.drafter else nodes
        max_depth = int(tree.depth.max())
        result = self.ask(state, draft, tree, max_depth)
        positions = state.positions[:, None] + tree.depth
        warped, target_ids = self.draw_target(result.logits, state.samplings, positions)
        judged = self.judge(state, draft, tree, result.logits, warped, target_ids)
        path = verify_tree(tree.parent, judged.admitted, max_depth)
        watch.lap("verify")
        return Verdict(
            pool=draft.pool,
            offered_depth=draft.offered_depth,
            submitted=submitted,
            tree=tree,
            logits=result.logits,
            warped=warped,
            target_ids=judged.target_ids,
            path=path,
            features=result.features,
            evidence=judged.evidence,
            rules=draft.rules,
        )

    def ask(
        self, state: BatchState, draft: Draft, tree: TokenTree, max_depth: int
    ) -> ForwardResult:
        """The target's answer at every node, back to back where padding would cost more."""
        offsets = torch.tensor(state.offsets, device=tree.depth.device)
        sizes, buffer = (draft.submitted >= 0).sum(1).tolist(), None
        if not pays(sizes):
            key = ShapeKey(common_bin(draft.bins), *draft.submitted.shape)
            buffer = self.prepared.get(key).mask
        return self.target.forward(
            0,
            state.offsets,
            tree.token_ids,
            offsets[:, None] + tree.depth,
            ancestor_mask(tree.parent, max_depth),
            sizes=sizes,
            mask_buffer=buffer,
        )

    def judge(
        self,
        state: BatchState,
        draft: Draft,
        tree: TokenTree,
        logits: Tensor,
        warped: Tensor,
        target_ids: Tensor,
    ) -> Judgement:
        """Asks the acceptance which nodes may follow their parents."""
        given = Verification(
            tree=tree,
            target_ids=target_ids,
            logits=logits,
            law=warped,
            greedy=state.greedy,
            seeds=state.seeds,
            positions=state.positions[:, None] + tree.depth,
            memory=state.acceptance_memory,
            draft_law=draft.law,
        )
        return self.rules.acceptance.judge(given)

    def draw_target(
        self, logits: Tensor, samplings: list[Sampling], positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The law after processors, and the target's own token after every node.

        Args:
            logits: `[A, N, V]`. positions: `[A, N]` int64, output position of each token.
        """
        best = logits.max(-1)
        check_finite(best.values)
        warped = warp_logits(logits, samplings)
        return warped, draw(warped, best.indices, samplings, positions, self.draw_by)

    def commit(self, state: BatchState, verdict: Verdict) -> tuple[Tensor, list[int]]:
        """Keeps the accepted path in the KV cache.

        Returns:
            `[A, D + 1]` emitted token ids, -1 padded, bonus last, and their count per row.
        """
        tokens, counts = emitted_tokens(verdict)
        assert self.target.cache is not None
        offsets = torch.tensor(state.offsets, device=tokens.device)
        self.target.cache.commit(0, offsets, verdict.path)
        return tokens, counts

    def extend_drafter(self, verdict: Verdict, tokens: Tensor, counts: list[int]) -> None:
        """Lets the drafter read what was committed, with the target's states before it."""
        if self.drafter is None:
            return
        widest, features = max(counts), verdict.features
        if features is not None:
            index = verdict.path[:, :widest].clamp(min=0)[..., None]
            features = features.gather(1, index.expand(-1, -1, features.shape[2]))
        self.drafter.extend(tokens[:, :widest].clamp(min=0), counts, features)


def trim(submitted: Tensor) -> Tensor:
    """Drops the columns that are empty in every row, so that the target never sees them."""
    return submitted[:, : int((submitted >= 0).sum(1).max())]


def emitted_tokens(verdict: Verdict) -> tuple[Tensor, list[int]]:
    """Accepted draft tokens, then the target's token after the deepest of them.

    Returns:
        `[A, D + 1]` int64, -1 padded, and the count per row, which is 1 + accepted.
    """
    following = torch.nn.functional.pad(verdict.path[:, 1:], (0, 1), value=-1)
    accepted = gather(verdict.tree.token_ids, following, -1)
    bonus = gather(verdict.target_ids, verdict.path, -1)
    tokens = torch.where(following >= 0, accepted, bonus)
    return tokens, (verdict.path >= 0).sum(1).tolist()


def check_finite(best: Tensor) -> None:
    """Refuses logits from which no token may be drawn, given each row's largest.

    NaN and +inf show in the maximum; a row of nothing but -inf does too.
    """
    if not bool(torch.isfinite(best).all()):
        raise logits_not_finite()


def logits_not_finite() -> ModelError:
    """The refusal to draw from such logits."""
    return ModelError(
        "target logits",
        expected="finite values",
        found="NaN or infinity",
        fix="load the model in a wider dtype (--dtype float32)",
    )
