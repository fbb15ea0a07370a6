"""Timing the runtime's own rounds, ordinary and captured, at controlled shapes.

Whole rounds run in order, and each lap is kept. A level timed in a loop of its own would find its
weights in the processor's cache; in a real round the target has just evicted them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from specctl.errors import UsageError
from specctl.formatting import listed
from specctl.policy import Policy, RootOnly, StaticTree, build_shape
from specctl.policy.growing import pool_capacity
from specctl.runtime.capture import GraphCounters, GraphSettings
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair
from specctl.runtime.requests import (
    Completion,
    Observer,
    Request,
    Sampling,
    Stopwatch,
    pooled,
)
from specctl.runtime.round import Round, RoundSetting
from specctl.runtime.runnable import Faults, runnable
from specctl.runtime.state import SlotFacts

MEASUREMENTS = "measurements"
"""Unit of a profile's progress."""
PROBE_DEPTH = 4
"""Levels of a probed tree: one from the root, three expansions."""
WARM_UPS = 2
"""Uses of a graph's key before replays: one eager, one captured."""
ONE = 1
"""The only point on an axis that a part does not depend on."""
Point = tuple[int, int, int]
"""Batch size, context, size."""
Times = dict[Point, list[float]]


def own_clock(device: torch.device) -> Callable[[], float]:
    """The clock of measurements, seconds. With one CPU thread it is that thread's own time, which
    leaves out the waiting for processors that other work holds."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


class Samples:
    """Times in us, by part and point; parts are named as in `CostModel.part_us`."""

    def __init__(self) -> None:
        self.by_part: dict[str, Times] = {}

    def add(self, part: str, point: Point, us: float) -> None:
        self.by_part.setdefault(part, {}).setdefault(point, []).append(us)

    def at(self, part: str, sizes: Sequence[int]) -> Times:
        """The samples of some sizes, e.g. of the held-out ones."""
        return {point: us for point, us in self.by_part[part].items() if point[2] in sizes}


@dataclass(frozen=True)
class Bench:
    """A pair, and the rounds of it that are timed."""

    pair: Pair
    graphs: GraphSettings | None = None  # of captured rounds; None for the ordinary loop

    @classmethod
    def of(cls, pair: Pair, rounds: str) -> Bench:
        """The rounds that an option names: auto, graphs or ordinary.

        Raises:
            UsageError: graphs, and this device has none.
        """
        settings, devices = GraphSettings(), pair.target.model.devices
        has_graphs = settings.capture_on(devices) is not None
        if rounds == "graphs" and not has_graphs:
            raise not_in_graphs(f"there are none on {listed(map(str, devices))}")
        return cls(pair, settings if has_graphs and rounds != "ordinary" else None)

    def loop(
        self,
        policy: Policy,
        requests: Sequence[Request],
        batch_size: int = 1,
        observer: Observer | None = None,
    ) -> DecodeLoop:
        """A decode loop with these requests, which run to their full length."""
        loop = DecodeLoop(
            self.pair.target.model,
            self.pair.drafter,
            policy,
            batch_size=batch_size,
            max_text_tokens=max(len(one.prompt_ids) + one.max_new_tokens for one in requests),
            eos_ids=(),
            observer=observer,
            graphs=self.graphs,
        )
        loop.now = own_clock(loop.target.device)
        for request in requests:
            loop.submit(request)
        return loop

    def random_requests(
        self, number: int, prompt_tokens: int, max_new_tokens: int
    ) -> list[Request]:
        """Requests of random text."""
        prompts = (random_tokens(self.pair, prompt_tokens, seed=row) for row in range(number))
        return [Request(str(row), tuple(p), max_new_tokens) for row, p in enumerate(prompts)]

    def wait(self) -> None:
        """Waits for the device."""
        if self.pair.target.model.device.type == "cuda":
            torch.cuda.synchronize()

    def check_captured(self, body: Round) -> None:
        """Refuses times of rounds that ran in part without a graph."""
        if self.graphs is not None and body.kernels is None:
            raise not_in_graphs(f"policy {body.policy.name} drafts between graphs")
        if failed := body.setting.counters.failed_captures:
            raise not_in_graphs(f"{failed} captures failed (logger specctl.graphs)")


def not_in_graphs(reason: str) -> UsageError:
    """The refusal to time rounds as graphs."""
    return UsageError(
        f"--rounds graphs needs rounds that can be captured, on CUDA with fused kernels: {reason}",
        hint="--rounds ordinary times the ordinary loop",
    )


def random_tokens(pair: Pair, count: int, *, seed: int) -> list[int]:
    """Tokens uniform over the vocabulary, which spread over the experts of a mixture."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(
        pair.target.model.vocab_size, (count,), generator=generator
    ).tolist()
    return ids


# ----------------------------------------------------------------- a round and its parts


def probed_tree(width: int, num_tokens: int) -> StaticTree:
    """A tree of `width` nodes a level, `num_tokens` submitted, root counted."""
    return StaticTree(depth=min(PROBE_DEPTH, num_tokens - 1), top_k=width, num_tokens=num_tokens)


def tree_capacity(width: int) -> int:
    """Nodes of the largest probed tree of a width, root counted."""
    return pool_capacity(build_shape(probed_tree(width, PROBE_DEPTH + 1)))


class RoundProbe:
    """A batch at one context, on which rounds run again and again.

    Args:
        context_tokens: of every row, before its root.
        trees: all that may be probed; room for them is allocated.
        read_sizes: tokens that the drafter reads after rounds, in turn.
    """

    def __init__(
        self,
        bench: Bench,
        batch_size: int,
        context_tokens: int,
        trees: Sequence[StaticTree],
        read_sizes: Sequence[int],
    ) -> None:
        self.bench, self.batch_size, self.context = bench, batch_size, context_tokens
        self.read_sizes, self._num_reads = tuple(read_sizes), 0
        model, drafter = bench.pair.target.model, bench.pair.drafter
        widest = max((tree.num_tokens for tree in trees), default=1)
        model.capture(drafter.aux_layers if drafter else ())
        # One more: captured passes write padding there.
        model.allocate(batch_size, context_tokens + widest + 1)
        if drafter is not None:
            drafted = max((tree.depth * tree.top_k for tree in trees), default=1)
            width = max((tree.top_k for tree in trees), default=1)
            read = max(*read_sizes, *(tree.depth + 1 for tree in trees), 1)
            drafter.allocate(batch_size, context_tokens + 1 + drafted + read, width)
        rows = [random_tokens(bench.pair, context_tokens, seed=b) for b in range(batch_size)]
        self.prompts = torch.tensor(rows, device=model.device)
        self.features = [
            model.extend(row, 0, ids[None]).features for row, ids in enumerate(self.prompts)
        ]

    def run(self, tree: StaticTree | None, num_rounds: int, into: Samples) -> None:
        """Warms up, then times rounds of a tree; plain rounds without one."""
        pair, graphs, policy = self.bench.pair, self.bench.graphs, Policy(shape=tree or RootOnly())
        rules = runnable(policy, pair.drafter, pair.target.model.device, self.batch_size)
        setting = RoundSetting(
            target=pair.target.model,
            drafter=rules.drafter,
            # A graph for every level, to time them one by one.
            graphs=replace(graphs or GraphSettings(capture="none"), stop_waits="always"),
            num_slots=self.batch_size,
            eos_ids=(),
            decisions="auto",
            faults=Faults(),
            counters=GraphCounters(),
        )
        body = Round(setting, policy, rules)
        if tree is not None:  # the drafter reads the prompts again
            assert pair.drafter is not None
            for row, ids in enumerate(self.prompts):
                text = torch.cat([ids, ids[:1]])[None]
                pair.drafter.prefill(row, text, self.features[row])
        warm_ups = 1 if graphs is None else WARM_UPS
        for samples in [*[Samples()] * warm_ups, *[into] * num_rounds]:
            self._play(body, tree, samples)
        self.bench.check_captured(body)

    def _play(self, body: Round, tree: StaticTree | None, into: Samples) -> None:
        """Runs one round from the end of the prompts; the upload undoes the round before."""
        batch, context, drafter = self.batch_size, self.context, body.setting.drafter
        is_captured, device = self.bench.graphs is not None, body.setting.target.device
        read_before = context + (0 if drafter is None else drafter.lead)
        roots = self.prompts[:, 0].tolist()
        body.upload([SlotFacts(root, context, read_before, 1, Sampling()) for root in roots])
        clock = Stopwatch(device, own_clock(device))
        found = body.run(clock)
        num_tokens, longest = found.rows[0].num_verified, body.rules.shape.max_depth + 1
        self._num_reads += 1  # the next size in turn that a path of this tree can have
        fitting = [size for size in self.read_sizes if size <= longest]
        num_read = longest if is_captured else fitting[self._num_reads % len(fitting)]
        clock.lap("other")
        body.finish(clock, [num_read] * batch)
        laps = clock.laps()
        verify_us = laps["verify"][0] if is_captured else sum(laps["verify"])
        into.add("verify", (batch, context, num_tokens), verify_us)
        if tree is None:
            return
        root_us, *levels = laps["draft"]
        *decided, selected_us = laps["policy"]
        into.add("draft.root", (batch, context, ONE), root_us)
        for drafted_us, decided_us in zip_longest(levels, decided, fillvalue=0.0):
            into.add("draft.level", (batch, context, tree.top_k), drafted_us + decided_us)
        into.add("draft.select", (batch, ONE, tree.top_k), selected_us)
        into.add("draft.extend", (batch, context, num_read), laps["commit"][0])


# ----------------------------------------------------------------- a loop and its prompts


def loop_us(bench: Bench, policy: Policy, requests: Sequence[Request]) -> float:
    """Host work of one step of a full batch: its time less drafting, verification and decisions.

    The bookkeeping of captured rounds overlaps with the device's commit. There, host work is the
    wall time of a step less the device's parts, over warm rounds in which no request joins or
    leaves. Making the loop is left out.
    """
    loop = bench.loop(policy, requests, len(requests))
    if bench.graphs is None:
        now, finished, num_steps = own_clock(loop.target.device), list[Completion](), 0
        start = now()
        while loop.busy:
            finished += loop.step()
            num_steps += 1
        bench.wait()
        wall_us = 1e6 * (now() - start)
        total = pooled(done.metrics for done in finished)
        models_us = total.draft_us + total.verify_us + total.policy_us + total.prefill_us
        return (wall_us - models_us) / num_steps
    clocks: list[Stopwatch] = []

    def new_watch() -> Stopwatch:
        clocks.append(Stopwatch(loop.target.device))
        return clocks[-1]

    for _ in range(WARM_UPS):
        loop.step()
    loop.new_watch = new_watch
    depth = build_shape(policy.shape).max_depth
    num_steps = (requests[0].max_new_tokens - 1) // (depth + 1) - WARM_UPS
    bench.wait()
    start = time.perf_counter()
    for _ in range(num_steps):
        loop.step()
    bench.wait()
    wall_us = 1e6 * (time.perf_counter() - start)
    bench.check_captured(loop.round)
    charged_us = 0.0  # the parts of a table; for a plain round, verification alone
    for clock in clocks:
        laps = clock.laps()
        charged_us += laps["verify"][0]
        if policy.shape.kind != "ar":
            charged_us += sum(sum(laps[part]) for part in ("draft", "policy", "commit"))
    return (wall_us - charged_us) / num_steps


def prefill_us(bench: Bench, policy: Policy, requests: Sequence[Request]) -> list[float]:
    """Times of reading the requests' prompts, one at a time, after the first for warm-up."""
    finished = list(bench.loop(policy, requests).run(()))
    return [done.metrics.prefill_us for done in finished[1:]]
