"""Timing rounds that stay on the device: what a loop on CUDA runs unless it is told otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.errors import UsageError
from specctl.policy import Policy, RootOnly
from specctl.replay.cost.probe import ONE, LapClock, RoundProbe, RoundSamples, TreeShape
from specctl.runtime.graphs import (
    GraphCounters,
    GraphedRound,
    GraphSettings,
    SlotFacts,
    unsupported,
)
from specctl.runtime.guard import Faults
from specctl.runtime.load import Pair
from specctl.runtime.observe import Sampling
from specctl.runtime.runnable import runnable

WARM_UPS = 2
"""Uses of a graph's key before replays: as it is, then captured."""


class GraphProbe(RoundProbe):
    """The same probe of the runtime's captured rounds.

    Before every round the device is told again where the requests stand, which takes back what the
    round before moved. A round verifies all that its tree submits, so its tier is the tree's own
    size, batch by batch; what lies between tiers is padded by who reads the table.

    Args:
        settings: how rounds are captured.
    """

    def __init__(
        self,
        pair: Pair,
        batch_size: int,
        context_tokens: int,
        trees: Sequence[TreeShape],
        num_rounds: int,
        settings: GraphSettings,
    ) -> None:
        self.settings = settings
        super().__init__(pair, batch_size, context_tokens, trees, (ONE,), num_rounds)

    def run(self, tree: TreeShape | None, into: RoundSamples) -> None:
        """Times rounds after those that warm up and capture; plain ones without a tree.

        Raises:
            UsageError: rounds of which some part cannot be a graph here.
        """
        graphed = self._graphed(tree)
        if tree:
            self._rewind()
        for _ in range(WARM_UPS):
            self._play(graphed, tree, RoundSamples())
        for _ in range(self.num_rounds):
            self._play(graphed, tree, into)
        check_captured(graphed.counters)

    def _graphed(self, tree: TreeShape | None) -> GraphedRound:
        policy, drafter = Policy(shape=tree.record if tree else RootOnly()), self.pair.drafter
        rules = runnable(policy, drafter, self.device, self.batch_size)
        reason = unsupported(policy, rules.shape, rules.drafter)
        if reason is not None:
            raise not_in_graphs(reason)
        target, counters = self.pair.target.model, GraphCounters()
        size = self.batch_size
        return GraphedRound(target, policy, rules, self.settings, size, (), Faults(), counters)

    def _play(self, graphed: GraphedRound, tree: TreeShape | None, into: RoundSamples) -> None:
        graphed.upload(self._facts(graphed))
        clock = LapClock(self.device)
        found = graphed.play(clock)
        num_tokens = tree.num_tokens if tree else ONE
        assert found.num_verified == [num_tokens] * self.batch_size, "a probed tree was cut"
        self._keep_parts(clock.laps(), tree, into)

    def _keep_parts(
        self, laps: dict[str, list[float]], tree: TreeShape | None, into: RoundSamples
    ) -> None:
        batch, context = self.batch_size, self.context
        verified, committed, _ = laps["verify"]
        into.verify.add((batch, context, tree.num_tokens if tree else ONE), verified)
        if tree is None:
            return
        root, *levels = laps["draft"]
        into.root.add((batch, context, ONE), root)
        for level in levels:
            into.level.add((batch, context, tree.width), level)
        [selected] = laps["policy"]
        into.select.add((batch, ONE, tree.width), selected)
        into.extend.add((batch, context, tree.record.depth + 1), committed)

    def _facts(self, graphed: GraphedRound) -> list[SlotFacts]:
        passes = graphed.passes
        stable = [0] * self.batch_size if passes is None else passes.slots.stable
        roots = self.prompts[:, 0].tolist()
        return [
            SlotFacts(root, self.context, read, 1, Sampling())
            for root, read in zip(roots, stable, strict=True)
        ]


def check_captured(counters: GraphCounters) -> None:
    """Refuses times of rounds that ran in part without a graph.

    Raises:
        UsageError: a capture failed, for want of memory or because the model asks the host.
    """
    if counters.failed_captures:
        raise not_in_graphs(f"{counters.failed_captures} that failed (logger specctl.graphs)")


def not_in_graphs(found: str) -> UsageError:
    """The refusal to time rounds as graphs."""
    return UsageError(
        "--rounds graphs",
        expected="rounds that can be captured, on CUDA with fused kernels",
        found=found,
        fix="--rounds ordinary times the ordinary loop",
    )
