"""Rounds on the device for a decode loop: what the host keeps beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specctl.policy import Policy
from specctl.runtime.active import Active
from specctl.runtime.booking import Counts, book
from specctl.runtime.decisions import check_decided
from specctl.runtime.graphs import unsupported
from specctl.runtime.graphs.record import record_of
from specctl.runtime.graphs.round import GraphedRound, Played
from specctl.runtime.graphs.state import Rows, SlotFacts
from specctl.runtime.guard import unguarded
from specctl.runtime.metrics import Stopwatch
from specctl.runtime.observe import Observer, RoundTimes
from specctl.runtime.runnable import Runnable
from specctl.runtime.sampling import race

if TYPE_CHECKING:
    from specctl.runtime.decode import DecodeLoop

log = logging.getLogger("specctl.graphs")
Emit = Callable[[Active, list[int]], list[int]]


class DeviceRounds:
    """Plays rounds and books them.

    Attributes:
        changed: a request joined, left or moved since the device was told of them.
        new_watch: makes each round's stopwatch; a profile puts its own there. None: a plain one.
    """

    def __init__(self, graphed: GraphedRound, observer: Observer | None) -> None:
        self.graphed, self.observer, self.changed = graphed, observer, True
        self.new_watch: Callable[[], Stopwatch] | None = None

    def play(self, actives: Sequence[Active], emit: Emit) -> list[tuple[Active, list[int]]]:
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
            (active, emit(active, tokens))
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
        """Decides by another policy from the next round on, if the graphs can stay."""
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


def device_rounds_of(loop: DecodeLoop) -> DeviceRounds | None:
    """What plays a loop's rounds on the device; None where they have to stay on the host.

    Raises:
        UsageError: fused decisions are asked for and not to be had.
    """
    reason = kept_on_host(loop)
    if reason is not None:
        check_decided(loop.decisions, reason)
        log.info("policy %s is not decoded in graphs: %s", loop.policy.name, reason)
        return None
    assert loop.graphs is not None
    graphed = GraphedRound(
        loop.target,
        loop.policy,
        replace(unguarded(loop.rules), drafter=loop.drafter),  # it reads on under `ar` too
        loop.graphs,
        loop.batch_size,
        loop.eos_ids,
        loop.round.faults,
        loop.graph_counters,
        observed=loop.observer is not None,
    )
    return DeviceRounds(graphed, loop.observer)


def kept_on_host(loop: DecodeLoop) -> str | None:
    """Why a loop's rounds are not captured; None if they are."""
    if loop.graphs is None and loop.target.device.type != "cuda":
        return f"there are no graphs on {loop.target.device.type}"
    if loop.graphs is None:
        return "they are off, or kernels are the references, which ask the device"
    if loop.decisions in ("torch", "onnx"):
        return f"{loop.decisions} decides"
    if loop.deadline_us is not None or loop.round.draw_by is not race:
        return "a deadline and another draw are kept on the host"
    return unsupported(loop.policy, loop.rules.shape, loop.drafter)
