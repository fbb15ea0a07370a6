"""What captured rounds are made of: the models they stand on, and buffers for one set of rules."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from specctl.errors import InvariantError
from specctl.kernels.bookkeeping import new_settled
from specctl.policy import EntropyBins, Policy
from specctl.policy.rules import ShapeRule
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.drafter import Drafter
from specctl.runtime.graphs.capture import GraphCounters
from specctl.runtime.graphs.deciders import Decider, StaticDecider, build_decider
from specctl.runtime.graphs.drafters import StaticDrafter, static_drafter
from specctl.runtime.graphs.drafting import Drafting, geometry_of
from specctl.runtime.graphs.mailbox import Mailbox
from specctl.runtime.graphs.places import Constants
from specctl.runtime.graphs.relaxing import relaxation_of
from specctl.runtime.graphs.selecting import Selection
from specctl.runtime.graphs.settings import tiers_up_to
from specctl.runtime.graphs.verifying import Verification
from specctl.runtime.runnable import Runnable

PartName = Literal["policy", "fallback"]


@dataclass
class Ground:
    """What all rules of a loop stand on.

    Attributes:
        max_width: nodes of a level at most. eos_ids: tokens that end a text.
        observed: whether the rounds' tensors are kept for someone.
    """

    target: CachedModel
    drafter: Drafter | None
    num_slots: int
    max_width: int
    eos_ids: Collection[int]
    counters: GraphCounters
    observed: bool

    @cached_property
    def constants(self) -> Constants:
        """Of all passes."""
        return Constants(self.target.device)

    @cached_property
    def passes(self) -> StaticDrafter | None:
        """The drafter's; None for plain decoding."""
        if self.drafter is None:
            return None
        return static_drafter(self.drafter, self.num_slots, self.max_width)

    def check_room(self, num_rows: int, longest: int) -> None:
        """Refuses more requests than slots, or a text beyond the cache.

        Raises:
            InvariantError: either.
        """
        assert self.target.cache is not None
        capacity = self.target.cache.capacity
        if num_rows > self.num_slots or longest > capacity:
            raise InvariantError(
                "captured round",
                expected=f"at most {self.num_slots} requests of {capacity} entries, tree included",
                found=f"{num_rows} of up to {longest}",
                fix="report this: the loop admits no more than it allocated for",
            )

    def new_features(self, steps: int) -> Tensor | None:
        """`[S, D + 1, ·]` for the target's states on a path, where the drafter wants them."""
        target = self.target
        if not target.aux_layers:
            return None
        width = len(target.aux_layers) * int(target.config.hidden_size)
        size = (self.num_slots, steps, width)
        return torch.zeros(size, dtype=target.dtype, device=target.device)


@dataclass
class Part:
    """What one set of rules drafts and verifies with.

    Attributes:
        reports, outcomes: the host's way to read them. tiers: by batch bucket.
    """

    name: PartName
    rules: Runnable
    drafting: Drafting
    selection: Selection
    verification: Verification
    reports: Mailbox
    outcomes: Mailbox
    tiers: dict[int, tuple[int, ...]]


def build_part(ground: Ground, policy: Policy, rules: Runnable) -> Part:
    """The buffers of a policy that is supported; `rules` are its own."""
    capacity, device = geometry_of(rules.shape).capacity, ground.target.device
    decider = build_decider(policy.shape, rules.shape, ground.num_slots, capacity, device)
    return _part("policy", ground, policy, rules, decider)


def build_fallback(ground: Ground, policy: Policy, rules: Runnable) -> Part:
    """The buffers of a static plan; the acceptance stays the policy's."""
    decider = StaticDecider(rules.shape, ground.target.device)
    return _part("fallback", ground, policy, rules, decider)


def _part(
    name: PartName, ground: Ground, policy: Policy, rules: Runnable, decider: Decider
) -> Part:
    target, num_slots, shape = ground.target, ground.num_slots, rules.shape
    drafting = Drafting(shape, decider, ground.passes, ground.drafter, num_slots, ground.constants)
    selection, steps = Selection(drafting, rules.budget, num_slots), shape.max_depth + 1
    settled = new_settled(num_slots, steps, target.device)
    verification = Verification(
        target,
        selection,
        relaxation_of(policy.acceptance, target.vocab_size, ground.eos_ids, target.device),
        ground.observed,
        settled,
        ground.new_features(steps),
    )
    reports, outcomes = (Mailbox(t, ground.counters) for t in (drafting.report, settled.outcome))
    return Part(name, rules, drafting, selection, verification, reports, outcomes, {})


def tiers_of(policy: Policy, shape: ShapeRule, num_rows: int, least: int) -> tuple[int, ...]:
    """Token tiers of so many requests; HeteroSpec's bins have one each (the paper's G(B_i)).

    Args:
        least: smallest tier.
    """
    bins, limit = policy.shape, getattr(policy.budget, "max_tokens", None)
    most = min(num_rows * shape.max_tokens, limit or sys.maxsize)
    planned = bins.plan_tokens if isinstance(bins, EntropyBins) else ()
    return tiers_up_to(most, [num_rows * size for size in planned], least)
