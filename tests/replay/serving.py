"""Batches by hand, and a telling of serving in plain Python, one request and node at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specctl.logs.positions import Positions
from specctl.policy import Policy, StaticTree
from specctl.replay.batch_simulation import Load, Seed, Simulation
from specctl.replay.cost.rates import LinearCost
from specctl.replay.outcomes import Outcomes
from specctl.replay.submissions import Submissions
from tests.replay.costs import linear_cost
from tests.replay.logs import PlainTree

TREE = StaticTree(depth=3, top_k=3, num_tokens=8)


@dataclass(frozen=True)
class TimedLoad(Load):
    """Requests that arrive at stated times."""

    arrivals_us: tuple[float, ...] = ()

    def draw(self, num_logged: int, seed: Seed) -> tuple[Any, Any]:
        named = replace(self, num_requests=len(self.arrivals_us))
        return super(TimedLoad, named).draw(num_logged, seed)[0], np.array(self.arrivals_us)


def positions_of(lengths: list[int], prompt_tokens: Sequence[int] | None = None) -> Positions:
    """Requests of so many positions, behind prompts of some length; 1, 2, ... tokens if unsaid."""
    sizes, codes = np.array(lengths), np.arange(len(lengths), dtype=np.int32)
    before = 1 + codes if prompt_tokens is None else np.array(prompt_tokens)
    place = np.concatenate([np.arange(1, size + 1) for size in sizes])
    return Positions(
        start=np.append(0, np.cumsum(sizes)),
        prompt=codes,
        prompt_ids=tuple(f"p{code}" for code in codes),
        category=0 * codes,
        categories=("",),
        remaining=(np.repeat(sizes, sizes) + 1 - place).astype(np.int32),
        context_tokens=(np.repeat(before, sizes) + place).astype(np.int32),
    )


def linear(**rates: float) -> LinearCost:
    """A step of n tokens takes 100 + 10 n us and so does a prompt, unless told otherwise."""
    return linear_cost(
        **{"verify_fixed_us": 50.0, "verify_token_us": 10.0, "step_us": 50.0, **rates}
    )


def by_hand(*requests: tuple[int, Sequence[tuple[int, int]]]) -> Submissions:
    """Of each request the prompt's length, then (accepted, verified) at every position."""
    lengths = [len(rows) for _, rows in requests]
    positions = positions_of(lengths, [prompt for prompt, _ in requests])
    accepted, verified = np.array([row for _, rows in requests for row in rows], np.int32).T
    accepted = np.minimum(accepted, positions.remaining)
    outcomes = Outcomes.of(accepted, verified=verified, levels=3, wanted=7)
    return Submissions(Policy(shape=TREE), positions, outcomes, max_tokens=8)


def per_request(run: Simulation, values: Any) -> Any:
    """`[M]` sums of values of rounds, `[L]`."""
    return np.bincount(run.rounds.serial, values, len(run.logged)).astype(np.int64)


def requests_of(run: Simulation) -> dict[str, Any]:
    """Columns of plain lists, one entry a request, in the order of service."""
    positions, times = run.submissions.positions, run.timeline
    prompt = positions.prompt[run.logged].tolist()
    return {
        "prompt_id": [positions.prompt_ids[code] for code in prompt],
        "arrival_us": times.arrival_us.tolist(),
        "first_token_us": times.first_token_us.tolist(),
        "finish_us": times.finish_us.tolist(),
        "calls": per_request(run, np.ones_like(run.rounds.row)).tolist(),
        "verified_tokens": per_request(run, run.rounds.verified).tolist(),
    }


@dataclass
class Served:
    """A request as a server knows it."""

    serial: int
    trees: list[PlainTree]
    prompt_tokens: int
    arrival_us: float
    here: int = 0
    first_token_us: float = 0.0
    finish_us: float = 0.0
    rounds: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.here >= len(self.trees)


Share = Callable[[list[tuple[PlainTree, list[int]]]], list[list[int]]]
"""From each active request's tree and submitted nodes to what each of them verifies."""


def likeliest(max_tokens: int) -> Share:
    """The survival budget: all roots, then the likeliest nodes of the whole batch."""

    def share(batch: list[tuple[PlainTree, list[int]]]) -> list[list[int]]:
        ranked = sorted(
            (-tree.joint[node], place, row, node)
            for row, (tree, nodes) in enumerate(batch)
            for place, node in enumerate(nodes)
            if node > 0
        )
        chosen = {(row, node) for _, _, row, node in ranked[: max_tokens - len(batch)]}
        return [
            [node for node in nodes if node == 0 or (row, node) in chosen]
            for row, (_, nodes) in enumerate(batch)
        ]

    return share


def serve_plainly(
    requests: list[tuple[list[PlainTree], int]],
    load: Load,
    seed: Seed,
    submit: Callable[[PlainTree], list[int]],
    share: Share,
    step_us: Callable[[list[int]], float],
) -> list[Served]:
    """What `DecodeLoop` does to trees behind prompts of some length, with a clock."""
    logged, times = load.draw(len(requests), seed)
    everyone = [
        Served(number, *requests[of], 0.0 if times is None else float(times[number]))
        for number, of in enumerate(logged.tolist())
    ]
    waiting, active, now = deque(everyone), list[Served](), 0.0
    while waiting or active:
        if not active and times is not None:
            now = max(now, waiting[0].arrival_us)
        step_start = now
        while waiting and len(active) < load.batch_size:
            if times is not None and waiting[0].arrival_us > now:
                break
            request = waiting.popleft()
            if times is None:
                request.arrival_us = step_start
            now += 100 + 10 * request.prompt_tokens
            request.first_token_us = now
            active.append(request)
        batch = [(r.trees[r.here], sorted(submit(r.trees[r.here]))) for r in active]
        kept = share(batch)
        now += step_us([len(nodes) for nodes in kept])
        for request, (tree, _), nodes in zip(active, batch, kept, strict=True):
            path = sum(tree.on_path[node] for node in nodes if node > 0)
            request.rounds.append((len(nodes), min(path, tree.remaining)))
            request.here += path + 1
            request.finish_us = now
        for row in reversed(range(len(active))):
            if active[row].is_done:
                active[row] = active[-1]
                active.pop()
    return everyone
