"""Timing the runtime's own rounds at controlled shapes.

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
from torch import Tensor

from specctl.policy import Policy, RootOnly, StaticTree, build_shape
from specctl.replay.cost.fit import Samples
from specctl.runtime.growth import pool_capacity
from specctl.runtime.load import Pair
from specctl.runtime.metrics import Stopwatch
from specctl.runtime.observe import Sampling
from specctl.runtime.round import BatchState, Round
from specctl.runtime.runnable import runnable

PROBE_DEPTH = 4
"""Levels of a probed tree: one from the root, three expansions."""
ONE = 1
"""The place on an axis of a part that does not depend on it."""


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


@dataclass(frozen=True)
class TreeShape:
    """A probed tree: `width` nodes a level, `num_tokens` submitted, root counted, and so many
    levels where there are nodes for them."""

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


@dataclass
class RoundSamples:
    """Laps by part; see `records.TableCost` and `records.DraftGrids`."""

    verify: Samples = field(default_factory=Samples)
    root: Samples = field(default_factory=Samples)
    level: Samples = field(default_factory=Samples)
    select: Samples = field(default_factory=Samples)
    extend: Samples = field(default_factory=Samples)


class RoundProbe:
    """A batch at one context, ready to run rounds that leave it where it was.

    Args:
        batch_size: B. context_tokens: of every row, before its root.
        trees: what may be probed, to know the room that they need.
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
        self.device = pair.target.model.device
        self._allocate(trees)
        self.prompts, self.features = self._read_prompts()

    def run(self, tree: TreeShape | None, into: RoundSamples) -> None:
        """Times rounds after one that warms up; plain ones without a tree."""
        policy = Policy(shape=tree.record if tree else RootOnly())
        rules = runnable(policy, self.pair.drafter, self.device, self.batch_size)
        body = Round(self.pair.target.model, rules)
        if tree:
            self._rewind()
        self._run_round(body, tree, RoundSamples())
        for _ in range(self.num_rounds):
            self._run_round(body, tree, into)

    def _run_round(self, body: Round, tree: TreeShape | None, into: RoundSamples) -> None:
        state, clock = self._state(), LapClock(self.device)
        verdict = body.verify(state, clock)
        tokens, _ = body.commit(state, verdict)
        clock.lap("other")
        read = self._next_read(tokens.shape[1])
        body.extend_drafter(verdict, tokens, [read] * self.batch_size)
        clock.lap("extend")
        num_tokens = verdict.submitted.shape[1]
        self._keep(clock.laps(), tree, num_tokens, read, into)

    def _keep(
        self,
        laps: dict[str, list[float]],
        tree: TreeShape | None,
        num_tokens: int,
        read: int,
        into: RoundSamples,
    ) -> None:
        batch, context = self.batch_size, self.context
        into.verify.add((batch, context, num_tokens), laps["verify"][0])
        if tree is None:
            return
        into.root.add((batch, context, ONE), laps["draft"][0])
        *grown, selected = laps["policy"]
        for decided, drafted in zip(grown, laps["draft"][1:], strict=True):
            into.level.add((batch, context, tree.width), decided + drafted)
        into.select.add((batch, ONE, tree.width), selected)
        into.extend.add((batch, context, read), laps["extend"][0])

    def _next_read(self, longest: int) -> int:
        """The next size in turn that a path of this tree can have."""
        self._num_reads += 1
        fitting = [size for size in self.read_sizes if size <= longest]
        return fitting[self._num_reads % len(fitting)]

    def _allocate(self, trees: Sequence[TreeShape]) -> None:
        model, drafter = self.pair.target.model, self.pair.drafter
        widest = max((tree.num_tokens for tree in trees), default=1)
        model.capture(drafter.aux_layers if drafter else ())
        # One more: captured passes write there what is no token.
        model.allocate(self.batch_size, self.context + widest + 1)
        if drafter is not None:
            depths = [tree.record.depth for tree in trees]
            drafted = max((d * t.width for d, t in zip(depths, trees, strict=True)), default=1)
            read = (self.num_rounds + 1) * max(self.read_sizes) + max(depths, default=0)
            drafter.allocate(self.batch_size, self.context + 1 + drafted + read)

    def _read_prompts(self) -> tuple[Tensor, list[Tensor | None]]:
        model = self.pair.target.model
        rows = [random_tokens(self.pair, self.context, seed=b) for b in range(self.batch_size)]
        prompts = torch.tensor(rows, device=self.device)
        features = [model.extend(row, 0, ids[None]).features for row, ids in enumerate(prompts)]
        return prompts, features

    def _rewind(self) -> None:
        """Lets the drafter forget what it read in earlier rounds."""
        assert self.pair.drafter is not None
        for row, ids in enumerate(self.prompts):
            text = torch.cat([ids, ids[:1]])[None]
            self.pair.drafter.prefill(row, text, self.features[row])

    def _state(self) -> BatchState:
        nothing = torch.zeros(self.batch_size, 0, dtype=torch.float64, device=self.device)
        return BatchState(
            root_ids=self.prompts[:, 0],
            offsets=[self.context] * self.batch_size,
            positions=torch.ones_like(self.prompts[:, 0]),
            samplings=[Sampling()] * self.batch_size,
            shape_memory=nothing,
            acceptance_memory=nothing,
        )


def random_tokens(pair: Pair, count: int, *, seed: int) -> list[int]:
    """Uniform over the vocabulary: experts of a mixture are met as in mixed text."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(
        pair.target.model.vocab_size, (count,), generator=generator
    ).tolist()
    return ids
