"""Rounds on the device for a decode loop: what the host keeps beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from specctl.policy import Policy
from specctl.runtime.active import Active
from specctl.runtime.booking import Counts, book
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.decisions import Decisions, check_decided
from specctl.runtime.drafter import Drafter
from specctl.runtime.graphs import GraphCounters, GraphSettings, unsupported
from specctl.runtime.graphs.record import record_of
from specctl.runtime.graphs.round import GraphedRound, Played
from specctl.runtime.graphs.state import Rows, SlotFacts
from specctl.runtime.guard import Faults, unguarded
from specctl.runtime.hardware import current
from specctl.runtime.metrics import Stopwatch
from specctl.runtime.observe import Observer, RoundTimes
from specctl.runtime.runnable import Runnable
from specctl.runtime.sampling import Draw, race

log = logging.getLogger("specctl.graphs")


@dataclass(frozen=True)
class Seat:
    """What a loop's rules sit on: all that stays while its policies change.

    Attributes:
        drafter: what the loop began with; None without one.
        graphs: how rounds are kept on the device; None for never.
        num_slots: requests at most. eos_ids: tokens that end a text.
        is_timed: whether decisions have a deadline, which only the host can keep.
        faults, counters: where rounds note what a static plan decided, and what became of graphs.
    """

    target: CachedModel
    drafter: Drafter | None
    graphs: GraphSettings | None
    num_slots: int
    eos_ids: Collection[int]
    observer: Observer | None
    draw_by: Draw
    decisions: Decisions
    is_timed: bool
    faults: Faults
    counters: GraphCounters


class DeviceRounds:
    """Plays rounds and books them.

    Attributes:
        changed: a request joined, left or moved since the device was told of them.
        new_watch: makes each round's stopwatch; a profile puts its own there. None: a plain one.
    """

    def __init__(self, graphed: GraphedRound, seat: Seat) -> None:
        self.graphed, self.changed = graphed, True
        self.observer, self.eos_ids = seat.observer, seat.eos_ids
        self.new_watch: Callable[[], Stopwatch] | None = None

    def play(self, actives: Sequence[Active]) -> list[tuple[Active, list[int]]]:
        """One round of all active requests; what each of them emitted."""
        watch = (self.new_watch or Stopwatch)()
        if self.changed:
            self.graphed.upload([self._facts(row, active) for row, active in enumerate(actives)])
            self.changed = False
        before = self._copied(len(actives))
        found = self.graphed.play(watch)
        counts = [len(tokens) for tokens in found.tokens]
        if self.graphed.passes is not None:
            self.graphed.passes.slots.advance(counts)
        emitted = [
            (active, active.emit(tokens, self.eos_ids))
            for active, tokens in zip(actives, found.tokens, strict=True)
        ]
        watch.lap("other")
        sizes, times = [len(tokens) for _, tokens in emitted], watch.times()
        if self.observer is not None and before is not None:
            self._observe(self.observer, actives, found, before, sizes, times)
        accepted = [count - 1 for count in counts]
        levels, verified = found.num_levels, found.num_verified
        book(actives, Counts(sizes, accepted, verified, levels, found.is_fallback), times)
        return emitted

    def reload(self, policy: Policy, rules: Runnable) -> bool:
        """Decides by another policy from the next round on, if the graphs can stay; else nothing
        is done. Nothing that is refused may come after it."""
        kept = replace(unguarded(rules), drafter=self.graphed.rules.drafter)
        return self.graphed.rewrite(policy, kept)

    def _facts(self, row: int, active: Active) -> SlotFacts:
        passes = self.graphed.passes
        return SlotFacts(
            root_id=active.output[-1],
            prefix=active.text_tokens,
            stable=0 if passes is None else passes.slots.stable[row],
            position=len(active.output),
            sampling=active.request.sampling,
        )

    def _copied(self, num_rows: int) -> Rows | None:
        """The state before the round, which advances it; only observers want it."""
        if self.observer is None:
            return None
        return Rows(*(column.clone() for column in self.graphed.state.rows(num_rows)))

    def _observe(
        self,
        observer: Observer,
        actives: Sequence[Active],
        found: Played,
        before: Rows,
        emitted: Sequence[int],
        times: RoundTimes,
    ) -> None:
        device = before.prefix.device
        ints = [torch.tensor(values) for values in ([a.metrics.calls for a in actives], emitted)]
        round_idx, num_emitted = (values.to(device, non_blocking=True) for values in ints)
        record = record_of(
            found,
            before,
            [active.request for active in actives],
            round_idx=round_idx,
            num_emitted=num_emitted,
            times=times,
        )
        observer.on_round(record)


def device_rounds_of(seat: Seat, policy: Policy, rules: Runnable) -> DeviceRounds | None:
    """What plays rounds by these rules on the device; None where they have to stay on the host.

    All memory that the rules need there is taken now: a loop that cannot have it learns so before
    it gives up what it has.

    Raises:
        UsageError: fused decisions are asked for and not to be had.
    """
    reason = kept_on_host(seat, policy, rules)
    if reason is not None:
        check_decided(seat.decisions, reason)
        log.info("policy %s is not decoded in graphs: %s", policy.name, reason)
        return None
    assert seat.graphs is not None
    with torch.inference_mode(), current(seat.target.device):  # as all rounds are
        graphed = GraphedRound(
            seat.target,
            policy,
            replace(unguarded(rules), drafter=seat.drafter),  # it reads on under `ar` too
            seat.graphs,
            seat.num_slots,
            seat.eos_ids,
            seat.faults,
            seat.counters,
            observed=seat.observer is not None,
        )
        graphed.part("policy")
    return DeviceRounds(graphed, seat)


def kept_on_host(seat: Seat, policy: Policy, rules: Runnable) -> str | None:
    """Why rounds by these rules are not captured; None if they are."""
    if seat.graphs is None and seat.target.device.type != "cuda":
        return f"there are no graphs on {seat.target.device.type}"
    if seat.graphs is None:
        return "they are off, or kernels are the references, which ask the device"
    if seat.decisions in ("torch", "onnx"):
        return f"{seat.decisions} decides"
    if seat.is_timed or seat.draw_by is not race:
        return "a deadline and another draw are kept on the host"
    return unsupported(policy, rules.shape, seat.drafter)
