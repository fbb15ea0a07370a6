"""The round: draft, select, verify, commit, observe. The one loop body of every policy.

    host    level 1 ─ level 2 ─ … ─ select ─ ask(tier) ─ judge ─ commit ─ read ─ count
    device          └ number of rows that continue               └ outcome, copied beside the commit

The state of requests stays on the device. On CUDA the parts are graphs where possible: drafting by
kernels (one graph, or one a level where the host waits), `ask` by tier, `commit`; their keys are
("draft", bucket) or ("level", bucket, depth) and ("select", bucket), ("ask", bucket, tier),
("commit", bucket), with the rows rounded up to a power of two as the bucket. Rules without
kernels, shared budgets, sampling and acceptance run between the graphs. Without captures, as on a
CPU, rules draft and nothing is padded, as the host knows all sizes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from specctl.errors import InvariantError, ModelError, SpecctlError, UsageError
from specctl.features import recent_tokens
from specctl.kernels.policy_eval.layout import pack
from specctl.policy import PerRequest, Policy
from specctl.policy.budgets import CostedRule
from specctl.policy.echo import ElasticRule
from specctl.policy.families import shape_family
from specctl.policy.growing import Growth, grow_tree
from specctl.policy.ratio import DRAFT_STREAM
from specctl.policy.rules import BudgetRule, Plan, RoundStart, ShapeRule
from specctl.policy.verification import AcceptanceRule, DraftDistribution
from specctl.runtime.attention import PassTables
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.capture import (
    GraphCache,
    GraphCounters,
    GraphSettings,
    TierChoice,
    bucket_of,
    token_tiers,
)
from specctl.runtime.config import Decisions
from specctl.runtime.deciders import decider_of, not_by_kernels, recapture_reason, table_of
from specctl.runtime.device_drafting import DraftBuffers, KernelDrafting
from specctl.runtime.drafter import Drafter, DrafterSource
from specctl.runtime.requests import RoundRecord, Sampling, Stopwatch
from specctl.runtime.runnable import Faults, Runnable, not_a_number, selected
from specctl.runtime.sampling import Draw, SamplingTable, gumbel_draw
from specctl.runtime.state import HostCopy, Rows, SlotFacts, SlotMemory, SlotState
from specctl.runtime.verifying import (
    Draft,
    RowOutcome,
    TargetOutput,
    Verdict,
    Verifier,
    outcome_of,
)
from specctl.tree import TokenTree

log = logging.getLogger("specctl.graphs")


@dataclass(frozen=True)
class RoundSetting:
    """The parts of a loop that stay when its policy changes."""

    target: CachedModel
    drafter: Drafter | None  # reads under plain decoding too
    graphs: GraphSettings
    num_slots: int
    eos_ids: Collection[int]  # tokens that end a text
    decisions: Decisions
    faults: Faults
    counters: GraphCounters
    draw: Draw = gumbel_draw
    observed: bool = False  # whether rounds are recorded


@dataclass(frozen=True)
class RoundResult:
    """A round on the host."""

    rows: list[RowOutcome]  # of the requests
    is_static_plan: bool  # the policy failed, so a static plan chose the nodes
    record: Callable[..., RoundRecord] | None
    """Makes the observers' record from `requests`, `round_idx`, `num_emitted` and `times`; None
    without an observer."""


class Round:
    """Rounds of up to `num_slots` requests under one policy.

    The constructor allocates all memory of the policy, so that a reload without memory fails while
    the old policy is still there.

    Attributes:
        is_static: rounds are captured, hence of fixed sizes.
    """

    def __init__(self, setting: RoundSetting, policy: Policy, rules: Runnable) -> None:
        self.setting, self.policy, self.rules = setting, policy, rules
        target, drafter, num_slots = setting.target, setting.drafter, setting.num_slots
        shape, device = rules.shape, setting.target.device
        capture = setting.graphs.capture_on(target.devices)
        self.is_static = capture is not None
        self.graphs = GraphCache(capture, setting.graphs.limit_bytes, setting.counters)
        self.state, self.tables = SlotState(num_slots, device), PassTables(device)
        sizes = (shape.memory_size, rules.acceptance.memory_size)
        self.memories = [SlotMemory(num_slots, size, device) for size in sizes]
        self.choice, self._tiers = TierChoice(), dict[int, tuple[int, ...]]()
        self.kernels: KernelDrafting | None = None
        self.buffers: DraftBuffers | None = None
        self._budget: BudgetRule | None = None
        reason = self._not_by_kernels()
        if setting.decisions == "fused" and reason is not None:
            raise UsageError(
                f"decisions fused need rounds that are captured on a CUDA device: {reason}",
                hint="use decisions auto, which takes torch instead and says so",
            )
        self.verifier = Verifier(
            target,
            drafter,
            policy.acceptance,
            self.tables,
            num_slots=num_slots,
            max_depth=shape.max_depth,
            eos_ids=setting.eos_ids,
            draw=setting.draw,
            is_static=self.is_static,
        )
        self._outcomes = HostCopy(self.verifier.settled.outcome)
        if self.is_static:
            self.buffers = DraftBuffers(shape, num_slots, device)
            self.verifier.reserve(self._tiers_of(num_slots)[-1])
        if self.buffers is not None and reason is None:
            decider = decider_of(policy.shape, shape, num_slots, device)
            room = 0 if drafter is None else drafter.capacity
            self.kernels = KernelDrafting(shape, decider, drafter, self.buffers, self.tables, room)
            self._reports = HostCopy(self.kernels.report)
            if not isinstance(policy.budget, PerRequest):
                self._budget = without_host_reads(rules.budget, shape.max_depth)
        elif self.is_static:
            log.info("policy %s drafts between graphs: %s", policy.name, reason)
        self._num_rows = 0
        self._lengths: list[list[int]] = []  # the host's prefix and stable of each row
        self._texts: Sequence[list[int]] = ()
        self._counts: list[int] | None = None

    def rewrite(self, policy: Policy, rules: Runnable) -> bool:
        """Changes the policy if its parameters fit the buffers and the graphs can stay.

        Returns:
            Whether it did; if not, nothing has changed.
        """
        if self.kernels is None or self.policy.additions != policy.additions:
            return False
        if recapture_reason(self.policy.shape, policy.shape) is not None:
            return False
        table = table_of(policy.shape)
        if table is not None:
            assert self.kernels.decider.params is not None
            with torch.inference_mode():  # as all rounds are
                self.kernels.decider.params.write(pack(table))
        self.policy, self.rules = policy, rules
        return True

    def upload(self, facts: Sequence[SlotFacts], texts: Sequence[list[int]] = ()) -> None:
        """Uploads the state of the requests in slots 0, 1, ..., after any of them changed.

        Args:
            texts: the growing lists of emitted tokens, for policies that read text.
        """
        longest = max((f.prefix for f in facts), default=0) + self.rules.shape.max_tokens + 1
        assert self.setting.target.cache is not None
        capacity = self.setting.target.cache.capacity
        if longest > capacity:
            raise InvariantError(
                f"decode round: a text and its tree need {longest} entries, of {capacity} in "
                "the cache",
                hint="report this: the loop admits no more than it allocated for",
            )
        self.state.upload(facts)
        self._num_rows, self._texts = len(facts), texts
        self._lengths = [[of.prefix, of.stable] for of in facts]

    def first_token(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """`[1]` int64: the token after a prompt, from its last logits `[1, V]`."""
        best, row = logits.max(-1), torch.zeros_like(logits[:, 0], dtype=torch.int64)
        check_finite(best.values)
        table = SamplingTable.of([sampling], logits.device)
        processed = table.process(logits, row)
        return table.draw(processed, best.indices, row, row, self.setting.draw)

    def run(self, watch: Stopwatch) -> RoundResult:
        """Runs a round of the uploaded requests up to the emitted tokens.

        Captured rounds are committed by then; `finish` commits others. Laps: `draft` (a level or
        all of them), `policy` (a wait and the selection), `verify`, `commit`, `other`.

        Raises:
            ModelError: logits hold NaN or infinity.
        """
        eager = self.setting.counters.eager_parts
        num_rows = self._num_rows
        bucket = bucket_of(num_rows, self.setting.num_slots) if self.is_static else num_rows
        rows = self.state.rows(bucket)
        draft = self._draft(rows, watch)
        tier = None
        if self.is_static:
            tiers = self._tiers.setdefault(bucket, self._tiers_of(bucket))
            tier = self.choice.choose(tiers, num_rows, draft.known)
        output = self._ask(draft, rows, tier)
        memory = self.memories[1].read(bucket)
        verdict = self.verifier.judge(rows, draft, output, self.state.samplings, memory)
        self._outcomes.post(self.verifier.settled.outcome)
        record = self._record(draft, output, verdict, rows) if self.setting.observed else None
        self._learn(draft, output, verdict, num_rows)  # before the commit, which overwrites logits
        watch.lap("verify")
        if self.is_static:
            self.graphs.run(("commit", bucket), partial(self.verifier.commit, rows))
            watch.lap(self._commit_phase)
        found = [RowOutcome.of(row) for row in self._outcomes.read()[:num_rows].tolist()]
        watch.lap("other" if self.is_static else "verify")
        if not all(row.finite for row in found):
            raise _logits_not_finite()
        self._note(found, num_rows, eager)
        counts = [row.num_tokens for row in found]
        if self.is_static:
            self._advance(counts)
        else:
            self._counts = counts
        return RoundResult(found, draft.rules is not self.rules, record)

    @property
    def _commit_phase(self) -> str:
        """Without a drafter that reads, a commit only moves the target's entries."""
        return "other" if self.verifier.drafter is None else "commit"

    def finish(self, watch: Stopwatch, counts: list[int] | None = None) -> None:
        """Commits the last round, unless its graph has.

        Args:
            counts: tokens of each request that the drafter reads; a profile varies them.
        """
        if self._counts is not None:
            rows = self.state.rows(len(self._counts))
            self.verifier.commit(rows, counts or self._counts, self._longest(1))
            self._advance(self._counts)
            self._counts = None
            watch.lap(self._commit_phase)

    def _advance(self, counts: list[int]) -> None:
        for lengths, count in zip(self._lengths, counts, strict=True):
            lengths[0] += count
            lengths[1] += count

    def _longest(self, column: int) -> int:
        return max(lengths[column] for lengths in self._lengths)

    def join(self, slot: int) -> None:
        """Clears the rules' memory of a slot for a new request."""
        for memory in self.memories:
            memory.join(slot)

    def move(self, source: int, target: int) -> None:
        """Copies the rules' memory of one slot over another."""
        for memory in self.memories:
            memory.move(source, target)

    def warm_up(self) -> None:
        """Compiles kernels and captures the graphs of all buckets and tiers, on empty rows."""
        num_slots, buckets = self.setting.num_slots, [1]
        while buckets[-1] < num_slots:
            buckets.append(bucket_of(buckets[-1] + 1, num_slots))
        for bucket in (*buckets, *buckets) if self.is_static else ():
            self.upload([])
            rows = self.state.rows(bucket)
            draft = self._static_draft(rows, self.rules, None)
            if self.kernels is not None:
                draft = self._draft_by_kernels(self.kernels, rows, Stopwatch())
            for tier in self._tiers_of(bucket):
                output = self._ask(draft, rows, tier)
            memory = self.memories[1].read(bucket)
            self.verifier.judge(rows, draft, output, self.state.samplings, memory)
            self.graphs.run(("commit", bucket), partial(self.verifier.commit, rows))

    # drafting

    def _not_by_kernels(self) -> str | None:
        """The reason why kernels do not draft; None if they do."""
        setting = self.setting
        if not self.is_static:
            return f"no graphs on {setting.target.device.type}, or they are off"
        if setting.decisions in ("torch", "onnx"):
            return f"{setting.decisions} decides"
        if self.rules.acceptance.samples_drafts:
            return "draft tokens are drawn from the drafter"
        if self.rules.acceptance.needs_draft_distribution:
            return "the acceptance needs the drafter's distribution"
        return not_by_kernels(self.policy.shape, self.rules.shape)

    def _draft(self, rows: Rows, watch: Stopwatch) -> Draft:
        """The policy's draft, or the fallback's if the rules fail; requests change only at the
        commit, so an unfinished draft leaves no trace."""
        static = self.rules.fallback
        with nullcontext() if static is None else self._caught():
            if self.kernels is not None:
                return self._draft_by_kernels(self.kernels, rows, watch)
            return self._draft_by_rules(self.rules, rows, watch)
        assert static is not None
        return self._draft_by_rules(static, rows, watch)

    def _caught(self) -> AbstractContextManager[None]:
        """Counts and suppresses failures of the policy. Out of memory is handled by the loop, and
        errors of specctl have other causes."""
        return self.setting.faults.caught(torch.OutOfMemoryError, SpecctlError)

    def _draft_by_kernels(self, kernels: KernelDrafting, rows: Rows, watch: Stopwatch) -> Draft:
        bucket, known = len(rows.root_ids), None
        checks, graphs = kernels.decider.check_levels, self.setting.graphs
        if graphs.stop_waits == "always" or (checks and graphs.waits(bucket)):
            for depth in range(1, self.rules.shape.max_depth + 1):
                self.graphs.run(("level", bucket, depth), partial(kernels.level, depth, rows))
                watch.lap("draft")
                if depth in checks:
                    self._reports.post(kernels.report)
                    num_going, num_tokens = self._reports.read().tolist()
                    watch.lap("policy")
                    known = num_tokens if num_tokens >= 0 else None
                    if not num_going and self._num_rows:  # warm-up, without rows, captures all
                        break
            self.graphs.run(("select", bucket), partial(kernels.select, rows))
        else:
            self.graphs.run(("draft", bucket), partial(kernels.whole, rows))
            watch.lap("draft")
        buffers, num_rows = kernels.buffers, self._num_rows
        if self._budget is not None and num_rows:
            plan_depth = torch.zeros_like(rows.root_ids[:num_rows])
            plan = Plan(num_rows, plan_depth, None, kernels.decider.stopped_at(num_rows))
            pool, chosen = buffers.rows(num_rows), buffers.submitted[:num_rows]
            buffers.submit(self._budget.share(plan, pool, chosen))
        watch.lap("policy")
        return self._static_draft(rows, self.rules, known)

    def _draft_by_rules(self, rules: Runnable, rows: Rows, watch: Stopwatch) -> Draft:
        num_rows, shape = self._num_rows, rules.shape
        rows, all_rows = self.state.rows(num_rows), rows
        memory = self.memories[0].read(num_rows)[:, : shape.memory_size]
        plan = shape.begin(RoundStart(num_rows, memory, batch_size=num_rows))
        distribution = None
        if rules.drafter is None:
            view = Growth(rows.root_ids.clone(), 1).level.pool
            submitted = torch.zeros_like(view.depth)
        else:
            recent = None
            if shape.needs_text:
                recent = recent_tokens(list(self._texts), rows.root_ids.device)
            source = DrafterSource(
                rules.drafter,
                rows.stable,
                self._longest(1),
                self.tables,
                keep_logits=rules.acceptance.needs_draft_distribution,
                draw=partial(self._draw_drafts, rows) if rules.acceptance.samples_drafts else None,
            )
            view = grow_tree(shape, plan, source, rows.root_ids, watch, recent)
            submitted = trim(rules.budget.share(plan, view, selected(shape, plan, view)))
            watch.lap("policy")
            if source.keep_logits:
                distribution = self._draft_distribution(rules, source, submitted)
        if self.buffers is None:
            faulty = torch.zeros_like(rows.vacant)
            return Draft(view, submitted, faulty, rules, None, view, distribution)
        self.buffers.take(view, submitted)
        draft = self._static_draft(all_rows, rules, int((submitted >= 0).sum()))
        return replace(draft, view=view, distribution=distribution)

    def _static_draft(self, rows: Rows, rules: Runnable, known: int | None) -> Draft:
        assert self.buffers is not None
        bucket, buffers = len(rows.root_ids), self.buffers
        submitted, faulty = buffers.submitted[:bucket], buffers.faulty[:bucket]
        return Draft(buffers.rows(bucket), submitted, faulty, rules, known)

    def _draw_drafts(self, rows: Rows, logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Draws draft tokens for `DrafterSource`; greedy requests take the likeliest."""
        row, positions = self.tables.rows(len(logits), 1), rows.positions + level - 1
        processed, best = self.state.samplings.process(logits, row), logits.argmax(-1)
        draw = partial(gumbel_draw, stream=DRAFT_STREAM)
        return processed, self.state.samplings.draw(processed, best, row, positions, draw)

    def _draft_distribution(
        self, rules: Runnable, source: DrafterSource, submitted: Tensor
    ) -> DraftDistribution:
        """The processed distribution from which each submitted node was drafted."""
        drafter, num_rows = source.drafter, len(submitted)
        processed = logits = source.parent_logits(submitted).float()
        if rules.acceptance.samples_drafts:
            check_finite(logits.amax(-1), "drafter")
        else:
            row = self.tables.rows(num_rows, submitted.shape[1])
            processed = self.state.samplings.process(logits.flatten(0, 1), row).view_as(logits)
        vocabulary = torch.arange(drafter.vocab_size, device=submitted.device)
        return DraftDistribution(processed, drafter.to_target_ids(vocabulary))

    # verification

    def _ask(self, draft: Draft, rows: Rows, tier: int | None) -> TargetOutput:
        if tier is None:
            return self.verifier.ask(rows, draft, None, self._longest(0))
        work = partial(self.verifier.ask, rows, draft, tier, None)
        return self.graphs.run(("ask", len(rows.root_ids), tier), work)

    def _tiers_of(self, num_rows: int) -> tuple[int, ...]:
        """Sizes of verification: one if all trees have equal sizes, else a few."""
        limit = getattr(self.policy.budget, "max_tokens", None)
        most = min(num_rows * self.rules.shape.max_tokens, limit or sys.maxsize)
        is_static = shape_family(self.policy.shape).is_static
        if is_static and isinstance(self.policy.budget, PerRequest):
            return (most,)
        return token_tiers(most, self.setting.graphs.flat_tokens)

    def _learn(self, draft: Draft, output: TargetOutput, verdict: Verdict, num_rows: int) -> None:
        rules: tuple[ShapeRule | AcceptanceRule, ...] = (self.rules.shape, self.rules.acceptance)
        for rule, memory in zip(rules, self.memories, strict=True):
            if rule.memory_size:
                with self._caught():  # a failure keeps the old memory
                    outcome = outcome_of(draft, output, verdict, num_rows)
                    memory.write(rule.observe(memory.read(num_rows), outcome))

    def _note(self, found: list[RowOutcome], num_rows: int, eager: int) -> None:
        counters = self.setting.counters
        if self.is_static:
            counters.eager_rounds += counters.eager_parts > eager
            counters.planned_waits = self._outcomes.num_waits
            if self.kernels is not None:
                counters.planned_waits += self._reports.num_waits
            self.choice.note(sum(row.wanted for row in found), num_rows)
        num_faulty = sum(row.faulty for row in found)
        if num_faulty:
            self.setting.faults.note(not_a_number(num_faulty))

    def _record(
        self, draft: Draft, output: TargetOutput, verdict: Verdict, rows: Rows
    ) -> Callable[..., RoundRecord]:
        """The round's tensors before the commit, in memory of their own."""
        num_rows = self._num_rows
        tree = output.token_tree(num_rows)
        logits = output.by_node(output.logits, num_rows)
        if self.is_static and output.is_even:  # a view that the next graph overwrites
            logits = logits.clone()
        processed = logits
        if verdict.processed is not output.logits:
            processed = output.by_node(verdict.processed, num_rows)
        submitted, view = output.tree.submitted[:num_rows], draft.view
        if view is None:
            view = draft.pool.each(lambda column: column[:num_rows].clone())
        if self.is_static:  # the next graph overwrites this one's memory
            columns = (tree.token_ids, tree.parent, tree.depth, tree.draft_logp)
            tree = TokenTree(*(column.clone() for column in columns))
            submitted = submitted.clone()
        outcome = self.verifier.settled.outcome[:num_rows]
        return partial(
            RoundRecord,
            position=rows.positions[:num_rows].clone(),
            context_tokens=rows.prefix[:num_rows] + 1,
            pool=view,
            offered_depth=outcome[:, 2].clone(memory_format=torch.contiguous_format),
            offered_width=draft.rules.shape.width,
            top_k=draft.rules.shape.top_k,
            submitted=submitted,
            tree=tree,
            target_logits=logits,
            processed=processed,
            target_ids=verdict.target_ids[:num_rows],
            path=verdict.path[:num_rows],
            policy_digest=draft.rules.digest,
        )


def without_host_reads(budget: BudgetRule, max_depth: int) -> BudgetRule:
    """The budget with the depth of trees as a constant, instead of a read from the device."""
    if isinstance(budget, ElasticRule):
        return replace(budget, max_depth=max_depth)
    if isinstance(budget, CostedRule) and budget.calibration is not None:
        return replace(budget, calibration=replace(budget.calibration, max_depth=max_depth))
    return budget


def trim(submitted: Tensor) -> Tensor:
    """Drops the columns that are empty in every row."""
    return submitted[:, : int((submitted >= 0).sum(1).max())]


def check_finite(best: Tensor, whose: str = "target") -> None:
    """Rejects rows of logits by their maximum, which shows NaN, +inf and rows of -inf alone."""
    if not bool(torch.isfinite(best).all()):
        raise _logits_not_finite(whose)


def _logits_not_finite(whose: str = "target") -> ModelError:
    return ModelError(
        f"{whose} logits hold NaN or infinity",
        hint="load the model in a wider dtype (--dtype float32)",
    )
