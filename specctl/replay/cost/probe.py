"""Timing the runtime's own rounds, ordinary and captured, at controlled shapes.

Whole rounds are run, in their order, and every lap of theirs is kept: a level timed in a loop of
its own would find its weights in the processor's cache, where a real round does not, because
the target has just passed through it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from specctl.errors import UsageError
from specctl.policy import Policy, RootOnly, StaticTree, build_shape
from specctl.runtime.active import Completion
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.graphs import (
    GraphCounters,
    GraphedRound,
    GraphSettings,
    SlotFacts,
    unsupported,
)
from specctl.runtime.growth import pool_capacity
from specctl.runtime.guard import Faults
from specctl.runtime.load import Pair
from specctl.runtime.metrics import Stopwatch, pooled
from specctl.runtime.observe import Request, Sampling
from specctl.runtime.round import BatchState, Round
from specctl.runtime.runnable import runnable

PROBE_DEPTH = 4
"""Levels of a probed tree: one from the root, three expansions."""
WARM_UPS = 2
"""Uses of a graph's key before replays: as it is, then captured."""
ONE = 1
"""The place on an axis of a part that does not depend on it."""
Point = tuple[int, int, int]
"""Batch size, context, size."""


@dataclass
class Samples:
    """Times of one part, us, by the point at which they were taken."""

    by_point: dict[Point, list[float]] = field(default_factory=dict)

    def add(self, point: Point, us: float) -> None:
        self.by_point.setdefault(point, []).append(us)

    def at(self, sizes: Sequence[int]) -> Samples:
        """The samples of some sizes, e.g. of those to fit, or of those held out."""
        return Samples({p: times for p, times in self.by_point.items() if p[2] in sizes})


@dataclass
class RoundSamples:
    """Laps by part; see `records.TableCost` and `records.DraftGrids`."""

    verify: Samples = field(default_factory=Samples)
    root: Samples = field(default_factory=Samples)
    level: Samples = field(default_factory=Samples)
    select: Samples = field(default_factory=Samples)
    extend: Samples = field(default_factory=Samples)


@dataclass(frozen=True)
class TreeShape:
    """A probed tree: `width` nodes a level, `num_tokens` submitted, root counted, and at most
    `depth` levels."""

    width: int
    num_tokens: int
    depth: int = PROBE_DEPTH

    @property
    def record(self) -> StaticTree:
        depth = min(self.depth, self.num_tokens - 1)
        return StaticTree(depth=depth, top_k=self.width, num_tokens=self.num_tokens)


def tree_capacity(width: int) -> int:
    """Nodes of the largest tree of a width that a probe can submit, root counted."""
    return pool_capacity(build_shape(TreeShape(width, PROBE_DEPTH + 1).record))


class LapClock(Stopwatch):
    """Keeps every lap by itself, not only the sums.

    On CUDA a lap ends at an event on the stream: the times are the device's own, and nothing
    waits that a real round would not let wait.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.on_gpu = device.type == "cuda"
        self._phases: list[str] = []
        self._marks: list[Any] = [self._mark()]

    def lap(self, phase: str) -> None:
        self._phases.append(phase)
        self._marks.append(self._mark())

    def laps(self) -> dict[str, list[float]]:
        """us of every lap, in order, by phase."""
        if self.on_gpu:
            torch.cuda.synchronize()
        found: dict[str, list[float]] = {}
        for phase, (start, end) in zip(self._phases, pairwise(self._marks), strict=True):
            us = 1e3 * start.elapsed_time(end) if self.on_gpu else 1e6 * (end - start)
            found.setdefault(phase, []).append(us)
        return found

    def _mark(self) -> Any:
        """Now: seconds of the host's clock, or an event on the stream."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class RoundProbe:
    """A batch at one context, ready to run rounds that leave it where it was.

    Args:
        batch_size: B. context_tokens: of every row, before its root.
        trees: all that may be probed, to allocate the room that they need.
        read_sizes: tokens that the drafter reads after rounds, in turn.
        num_rounds: timed at each call of `run`.
    """

    def __init__(
        self,
        pair: Pair,
        batch_size: int,
        context_tokens: int,
        trees: Sequence[TreeShape],
        read_sizes: Sequence[int],
        num_rounds: int,
    ) -> None:
        self.pair, self.batch_size, self.context = pair, batch_size, context_tokens
        self.read_sizes, self.num_rounds, self._num_reads = tuple(read_sizes), num_rounds, 0
        model, drafter = pair.target.model, pair.drafter
        self.device = model.device
        widest = max((tree.num_tokens for tree in trees), default=1)
        model.capture(drafter.aux_layers if drafter else ())
        # One more: captured passes write padding there.
        model.allocate(batch_size, context_tokens + widest + 1)
        if drafter is not None:
            depths = [tree.record.depth for tree in trees]
            drafted = max((d * t.width for d, t in zip(depths, trees, strict=True)), default=1)
            read = (num_rounds + 1) * max(read_sizes) + max(depths, default=0)
            drafter.allocate(batch_size, context_tokens + 1 + drafted + read)
        rows = [random_tokens(pair, context_tokens, seed=b) for b in range(batch_size)]
        self.prompts = torch.tensor(rows, device=self.device)
        self.features = [
            model.extend(row, 0, ids[None]).features for row, ids in enumerate(self.prompts)
        ]

    def run(self, tree: TreeShape | None, into: RoundSamples) -> None:
        """Times rounds after one that warms up; plain ones without a tree."""
        policy = Policy(shape=tree.record if tree else RootOnly())
        rules = runnable(policy, self.pair.drafter, self.device, self.batch_size)
        body = Round(self.pair.target.model, rules)
        self._rewind(tree)
        for samples in [RoundSamples(), *[into] * self.num_rounds]:
            self._run_round(body, tree, samples)

    def _run_round(self, body: Round, tree: TreeShape | None, into: RoundSamples) -> None:
        nothing = torch.zeros(self.batch_size, 0, dtype=torch.float64, device=self.device)
        state = BatchState(
            root_ids=self.prompts[:, 0],
            offsets=[self.context] * self.batch_size,
            positions=torch.ones_like(self.prompts[:, 0]),
            samplings=[Sampling()] * self.batch_size,
            shape_memory=nothing,
            acceptance_memory=nothing,
        )
        clock = LapClock(self.device)
        verdict = body.verify(state, clock)
        tokens, _ = body.commit(state, verdict)
        clock.lap("other")
        self._num_reads += 1  # the next size in turn that a path of this tree can have
        fitting = [size for size in self.read_sizes if size <= tokens.shape[1]]
        read = fitting[self._num_reads % len(fitting)]
        body.extend_drafter(verdict, tokens, [read] * self.batch_size)
        clock.lap("extend")
        laps, batch, context = clock.laps(), self.batch_size, self.context
        into.verify.add((batch, context, verdict.submitted.shape[1]), laps["verify"][0])
        if tree is None:
            return
        into.root.add((batch, context, ONE), laps["draft"][0])
        *grown, selected = laps["policy"]
        for decided, drafted in zip(grown, laps["draft"][1:], strict=True):
            into.level.add((batch, context, tree.width), decided + drafted)
        into.select.add((batch, ONE, tree.width), selected)
        into.extend.add((batch, context, read), laps["extend"][0])

    def _rewind(self, tree: TreeShape | None) -> None:
        """Lets the drafter forget what it read in earlier rounds."""
        if tree is None:
            return
        assert self.pair.drafter is not None
        for row, ids in enumerate(self.prompts):
            text = torch.cat([ids, ids[:1]])[None]
            self.pair.drafter.prefill(row, text, self.features[row])


class GraphProbe(RoundProbe):
    """The same probe of the runtime's captured rounds.

    Before every round the state of the requests is uploaded again, which takes back the moves of
    the round before. A round verifies all that its tree submits, so its tier is the tree's own
    size, batch by batch; sizes between tiers are padded when the table is read.

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
        policy = Policy(shape=tree.record if tree else RootOnly())
        rules = runnable(policy, self.pair.drafter, self.device, self.batch_size)
        reason = unsupported(policy, rules.shape, rules.drafter)
        if reason is not None:
            raise not_in_graphs(reason)
        target, counters = self.pair.target.model, GraphCounters()
        graphed = GraphedRound(
            target, policy, rules, self.settings, self.batch_size, (), Faults(), counters
        )
        self._rewind(tree)
        for samples in [*[RoundSamples()] * WARM_UPS, *[into] * self.num_rounds]:
            self._play(graphed, tree, samples)
        check_captured(counters)

    def _play(self, graphed: GraphedRound, tree: TreeShape | None, into: RoundSamples) -> None:
        passes, batch, context = graphed.passes, self.batch_size, self.context
        stable = [0] * batch if passes is None else passes.slots.stable
        graphed.upload(
            [
                SlotFacts(root, context, read, 1, Sampling())
                for root, read in zip(self.prompts[:, 0].tolist(), stable, strict=True)
            ]
        )
        clock = LapClock(self.device)
        found = graphed.play(clock)
        num_tokens = tree.num_tokens if tree else ONE
        assert found.num_verified == [num_tokens] * batch, "a probed tree was cut"
        laps = clock.laps()
        verified, committed, _ = laps["verify"]
        into.verify.add((batch, context, num_tokens), verified)
        if tree is None:
            return
        root, *levels = laps["draft"]
        into.root.add((batch, context, ONE), root)
        for level in levels:
            into.level.add((batch, context, tree.width), level)
        [selected] = laps["policy"]
        into.select.add((batch, ONE, tree.width), selected)
        into.extend.add((batch, context, tree.record.depth + 1), committed)


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


def loop_us(
    pair: Pair, policy: Policy, batch_size: int, prompt_tokens: int, max_new_tokens: int
) -> float:
    """Host work of one step: the time beside drafting, verification and decisions."""
    start = time.perf_counter()
    loop = _loop(pair, policy, batch_size, prompt_tokens, max_new_tokens, None, batch_size)
    finished, num_steps = _run(loop)
    wall_us = 1e6 * (time.perf_counter() - start)
    total = pooled(done.metrics for done in finished)
    models_us = total.draft_us + total.verify_us + total.policy_us + total.prefill_us
    return (wall_us - models_us) / num_steps


def graphed_loop_us(
    pair: Pair,
    policy: Policy,
    batch_size: int,
    prompt_tokens: int,
    max_new_tokens: int,
    graphs: GraphSettings,
) -> float:
    """The same of captured rounds: wall time of a step beyond the parts that a table names.

    While the host keeps its books the device is still at the commit, so host work cannot simply
    be added. The device's share is taken from the loop's own rounds, all of them warm, with no
    request joining or leaving.
    """
    loop = _loop(pair, policy, batch_size, prompt_tokens, max_new_tokens, graphs, batch_size)
    rounds, clocks = loop.device_rounds, list[LapClock]()
    if rounds is None:
        raise not_in_graphs(f"policy {policy.name}, which decodes without")

    def new_watch() -> LapClock:
        clocks.append(LapClock(pair.target.model.device))
        return clocks[-1]

    for _ in range(WARM_UPS):
        loop.step()
    rounds.new_watch = new_watch
    num_steps = (max_new_tokens - 1) // (build_shape(policy.shape).max_depth + 1) - WARM_UPS
    _wait(loop)
    start = time.perf_counter()
    for _ in range(num_steps):
        loop.step()
    _wait(loop)
    wall_us = 1e6 * (time.perf_counter() - start)
    check_captured(loop.graph_counters)
    charged_us = 0.0  # by the parts of a table; of a plain round the verification alone
    for clock in clocks:
        laps = clock.laps()
        verified, committed, _ = laps["verify"]
        charged_us += verified
        if "draft" in laps:
            charged_us += sum(laps["draft"]) + sum(laps["policy"]) + committed
    return (wall_us - charged_us) / num_steps


def prefill_us(
    pair: Pair,
    policy: Policy,
    prompt_tokens: int,
    num_prompts: int,
    graphs: GraphSettings | None = None,
) -> list[float]:
    """Reading prompts, one at a time, after one that warms up."""
    loop = _loop(pair, policy, 1, prompt_tokens, 1, graphs, num_prompts + 1)
    finished, _ = _run(loop)
    return [done.metrics.prefill_us for done in finished[1:]]


def _loop(
    pair: Pair,
    policy: Policy,
    batch_size: int,
    prompt_tokens: int,
    max_new_tokens: int,
    graphs: GraphSettings | None,
    num_requests: int,
) -> DecodeLoop:
    """A decode loop with random prompts submitted, to be decoded to their full length."""
    loop = DecodeLoop(
        pair.target.model,
        pair.drafter,
        policy,
        batch_size=batch_size,
        max_text_tokens=prompt_tokens + max_new_tokens,
        eos_ids=(),
        graphs=graphs,
    )
    for row in range(num_requests):
        ids = tuple(random_tokens(pair, prompt_tokens, seed=row))
        loop.submit(Request(str(row), ids, max_new_tokens))
    return loop


def _run(loop: DecodeLoop) -> tuple[list[Completion], int]:
    """All completions of a loop, and the steps taken."""
    finished: list[Completion] = []
    num_steps = 0
    while loop.busy:
        finished += loop.step()
        num_steps += 1
    _wait(loop)
    return finished, num_steps


def _wait(loop: DecodeLoop) -> None:
    if loop.target.device.type == "cuda":
        torch.cuda.synchronize()


def random_tokens(pair: Pair, count: int, *, seed: int) -> list[int]:
    """Uniform over the vocabulary: experts of a mixture are met as in mixed text."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(
        pair.target.model.vocab_size, (count,), generator=generator
    ).tolist()
    return ids
