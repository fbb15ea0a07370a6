"""The captured round: levels, one verification, one commit; the host only picks among graphs.

    host    level 1 ─ level 2 ─ … ─ select ─ verify(tier) ─ commit ── reads ── books, next round
    device          └ who goes on? where a policy may stop └ outcome leaves beside the commit

The tier comes from what the rounds before wanted, or from the bins of this one where the host waits
for them; what is live, the split of the tier among requests, happens on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from specctl.kernels.bookkeeping import FACTS
from specctl.kernels.policy_eval.layout import pack
from specctl.policy import Policy
from specctl.policy.budgets import PerRequestRule
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.graphs.capture import GraphCache, GraphCounters
from specctl.runtime.graphs.drafters import StaticDrafter
from specctl.runtime.graphs.drafting import Report
from specctl.runtime.graphs.laws import mode_of
from specctl.runtime.graphs.parts import (
    Ground,
    Part,
    PartName,
    build_fallback,
    build_part,
    tiers_of,
)
from specctl.runtime.graphs.settings import GraphSettings, TierChoice, bucket_of
from specctl.runtime.graphs.state import SlotFacts, SlotState
from specctl.runtime.graphs.verifying import VerifiedRound
from specctl.runtime.guard import Faults, PolicyFault
from specctl.runtime.metrics import Stopwatch
from specctl.runtime.observe import Sampling
from specctl.runtime.policy_buffer import recapture_reason, table_of
from specctl.runtime.round import logits_not_finite
from specctl.runtime.runnable import Runnable


@dataclass(frozen=True)
class Played:
    """What a round came to, on the host, row by row.

    Attributes:
        tokens: emitted, bonus last. num_verified: tokens that the target saw, root counted.
        num_levels: drafted. is_fallback: a static plan chose the row's nodes.
        part: whose rules decided. verified: the round's tensors, its observer's own;
            None unless the round is observed.
    """

    tokens: list[list[int]]
    num_verified: list[int]
    num_levels: list[int]
    is_fallback: list[bool]
    part: Part
    verified: VerifiedRound | None


class GraphedRound:
    """Rounds of up to `num_slots` requests whose state stays on the device.

    Args:
        policy: the rules' record.
        rules: unguarded, with their fallback.
        eos_ids: tokens that end a text.
        faults: rounds that a static plan took over, by cause.
        observed: whether the rounds' tensors are kept for someone.
    """

    def __init__(
        self,
        target: CachedModel,
        policy: Policy,
        rules: Runnable,
        settings: GraphSettings,
        num_slots: int,
        eos_ids: Collection[int],
        faults: Faults,
        counters: GraphCounters,
        *,
        observed: bool = False,
    ) -> None:
        self.policy, self.rules, self.settings = policy, rules, settings
        self.ground = Ground(
            target, rules.drafter, num_slots, rules.shape.width, eos_ids, counters, observed
        )
        self.state, self.faults = SlotState(num_slots, target.device), faults
        self.counters = counters
        capture = settings.capture_on(target.device)
        self.graphs = GraphCache(capture, settings.limit_bytes, counters)
        self.choice = TierChoice()
        self._parts: dict[PartName, Part] = {}
        self._samplings: list[Sampling] = []

    @property
    def passes(self) -> StaticDrafter | None:
        """The drafter's; None for plain decoding."""
        return self.ground.passes

    def rewrite(self, policy: Policy, rules: Runnable) -> bool:
        """Decides by another policy from the next round on, if its parameters fit the buffer.

        Returns:
            Whether the graphs stay; nothing is done if they cannot.
        """
        part, table = self._parts.get("policy"), table_of(policy.shape)
        old = self.policy
        same = (old.budget, old.acceptance) == (policy.budget, policy.acceptance)
        if part is None or not same or recapture_reason(old.shape, policy.shape) is not None:
            return False
        if table is not None:
            assert part.drafting.decider.params is not None
            with torch.inference_mode():  # as all rounds are
                part.drafting.decider.params.write(pack(table))
        self.policy, self.rules, part.rules = policy, rules, rules
        part.tiers.clear()
        return True

    def upload(self, facts: Sequence[SlotFacts]) -> None:
        """Tells the device of the requests in slots 0, 1, ...; after any of them changed.

        Raises:
            InvariantError: more of them than slots, or a text beyond the cache.
        """
        longest = max((f.prefix for f in facts), default=0) + self.rules.shape.max_tokens + 1
        self.ground.check_room(len(facts), longest)
        self.state.upload(facts)
        self._samplings = [f.sampling for f in facts]

    def play(self, watch: Stopwatch) -> Played:
        """One round of the requests that were uploaded.

        Laps: `draft` a level, `policy` a wait and the selection, `verify` three times: the
        verification, the commit, and reading what came of them.

        Raises:
            ModelError: logits from which no token may be drawn.
        """
        eager = self.counters.eager_parts
        part, known = self._drafted(watch)
        num_rows, bucket = len(self._samplings), self._bucket
        mode, tier = mode_of(self._samplings), self._tier(part, known)
        rows, verification = self.state.rows(bucket), part.verification
        verified = self.graphs.run(
            (part.name, "verify", bucket, tier, mode),
            partial(verification.verify, rows, tier, mode),
        )
        part.outcomes.post(verification.settled.outcome)
        verified = verified.copied() if verified is not None else None
        watch.lap("verify")
        self.graphs.run((part.name, "commit", bucket), partial(verification.commit, rows))
        watch.lap("verify")
        found = part.outcomes.read()[:num_rows].tolist()
        watch.lap("verify")
        self.counters.eager_rounds += self.counters.eager_parts > eager
        return self._played(part, found, verified)

    @property
    def _bucket(self) -> int:
        """Rows of the graphs. Budgets count rows, so theirs are never padded."""
        num_rows = len(self._samplings)
        if not isinstance(self.rules.budget, PerRequestRule):
            return num_rows
        return bucket_of(num_rows, self.ground.num_slots)

    def _drafted(self, watch: Stopwatch) -> tuple[Part, int | None]:
        """Who drafted, and the tokens it will verify at most, where they are known."""
        try:
            part = self.part("policy")
            return part, self._draft(part, watch)
        except PolicyFault as fault:
            self.faults.note(fault)
        part = self.part("fallback")
        return part, self._draft(part, watch)

    def _draft(self, part: Part, watch: Stopwatch) -> int | None:
        drafting, bucket, known = part.drafting, self._bucket, None
        rows, waits = self.state.rows(bucket), self.settings.waits(bucket)
        for depth in range(1, drafting.rule.max_depth + 1):
            self.graphs.run(
                (part.name, "level", bucket, depth), partial(drafting.level, depth, rows)
            )
            watch.lap("draft")
            if not waits or depth not in drafting.decider.check_levels:
                continue
            part.reports.post(drafting.report)
            report = Report(*part.reports.read().tolist())
            watch.lap("policy")
            known = report.num_tokens if report.num_tokens >= 0 else None
            if not report.num_going:
                break
        self.graphs.run((part.name, "select", bucket), partial(part.selection.select, rows))
        watch.lap("policy")
        return known

    def _tier(self, part: Part, known: int | None) -> int:
        bucket = self._bucket
        tiers = part.tiers.get(bucket)
        if tiers is None:
            least = self.settings.flat_tokens
            tiers = part.tiers[bucket] = tiers_of(self.policy, part.rules.shape, bucket, least)
        if part.name != "policy":
            return tiers[-1]
        return self.choice.choose(tiers, len(self._samplings), known)

    def _played(self, part: Part, found: list[list[int]], verified: VerifiedRound | None) -> Played:
        facts = [dict(zip(FACTS, row, strict=False)) for row in found]
        if not all(of["finite"] for of in facts):
            raise logits_not_finite()
        self.choice.note(sum(of["wanted"] for of in facts), len(facts))
        num_faulty = sum(of["faulty"] for of in facts)
        if num_faulty:
            reason = f"a score is not a number in {num_faulty} requests"
            self.faults.note(PolicyFault("nan", reason))
        is_static = part.name != "policy"
        tokens = [row[len(FACTS) :][: of["count"]] for row, of in zip(found, facts, strict=True)]
        return Played(
            tokens=tokens,
            num_verified=[of["num_verified"] for of in facts],
            num_levels=[of["num_levels"] for of in facts],
            is_fallback=[is_static or bool(of["faulty"]) for of in facts],
            part=part,
            verified=verified,
        )

    def part(self, name: PartName) -> Part:
        """The buffers of the policy, or of what takes over, made at first use."""
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = self._new_part(name)
        return part

    def _new_part(self, name: PartName) -> Part:
        if name == "policy":
            return build_part(self.ground, self.policy, self.rules)
        assert self.rules.fallback is not None, "only guarded rules fail"
        return build_fallback(self.ground, self.policy, self.rules.fallback)
