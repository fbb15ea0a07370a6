"""A policy in a cell, by the ordinary loop or by graphs: its times, and where they go.

Two stages, each with a loop of its own: `timed` knows no profiler, since one that has ever run may
slow what comes behind it; `profiled` books kernels, and nothing that it does is timed by the wall.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch

from specctl.kernels import policy_eval
from specctl.kernels.policy_eval import reference
from specctl.policy import Policy
from specctl.runtime.capture import GraphSettings
from specctl.runtime.load import Pair
from specctl.runtime.requests import Metrics

from .running import MOST_TRIES, Cell, Running
from .split import PHASES, Bookkeeper
from .trace import traced

Row = dict[str, Any]


@dataclass(frozen=True)
class Counts:
    """Rounds of a row.

    Attributes:
        warm: kernels are compiled and graphs made; as many in either mode, so that both then do
            the same work. timed: each between two events. lapped: for the time until verification
            begins. learned: profiled while the graphs are not made yet. profiled: for the split.
    """

    warm: int = 12
    timed: int = 30
    lapped: int = 10
    learned: int = 3
    profiled: int = 5

    @property
    def most(self) -> int:
        """Rounds of one stage."""
        return 1 + sum(asdict(self).values()) + (MOST_TRIES - 1) * self.timed


@dataclass(frozen=True)
class Job:
    """A row's subject; its mode is `eager`, `graphs`, or `torch rules`: graphs in which the policy
    decides by torch operations instead of its own kernels."""

    name: str
    policy: Policy
    cell: Cell
    mode: str

    @property
    def label(self) -> Row:
        labels = {"batch": self.cell.batch_size, "context": self.cell.context_tokens}
        return {"policy": self.name, **labels, "mode": self.mode}


def timed(job: Job, pair: Pair, counts: Counts) -> Row:
    """Wall times of rounds, us, and what they did."""
    with _running(job, pair, counts) as running:
        running.step()  # reads the prompts
        running.steps(counts.warm)
        captures, before = _captures(running), running.booked()
        times, after = running.round_us(counts.timed), running.booked()
        return {
            "round_us": statistics.median(times),
            "min_us": min(times),
            "max_us": max(times),
            "rounds": len(times),
            "drafting_us": running.drafting_us(counts.lapped) or None,
            **_work(before, after),
            **_counters(running, captures),
            "faults": int(running.loop.faults.total),
        }


def profiled(job: Job, pair: Pair, counts: Counts, round_us: float) -> Row:
    """Where the device's time of a round goes, us; `round_us` of the same job."""
    device, books = pair.target.model.device, Bookkeeper()
    with _running(job, pair, counts) as running:
        if not running.loop.round.is_static:
            running.step()
        else:
            first = traced(lambda: running.steps(counts.learned), device, behind_prompts=True)
            books.learn(first)
        running.steps(counts.warm)
        trace = traced(lambda: running.steps(counts.profiled), device)
    split = books.split(trace, counts.profiled)
    found: Row = {f"{phase}_us": split.by_phase[phase] for phase in PHASES}
    if device.type == "cuda":
        # The profiler stretches the host's gaps, not the kernels: so they are what is left.
        found["gaps_us"] = round_us - split.busy_us
    found["policy_share"] = split.by_phase["policy"] / round_us
    found |= {f"{op}_us": us for op, us in split.by_op.items()}
    counted = {"kernels": split.num_work, "launches": split.num_launches, "waits": split.num_waits}
    return found | {"by_graph_us": split.by_graph_us, "unknown_us": split.unknown_us} | counted


@contextmanager
def _running(job: Job, pair: Pair, counts: Counts) -> Iterator[Running]:
    """A loop; its caches, graphs and their pools are given back behind it."""
    device = pair.target.model.device
    capture = "auto" if device.type == "cuda" else "none"
    graphs = None if job.mode == "eager" else GraphSettings(capture=capture)
    running = Running(pair, job.policy, job.cell, num_rounds=counts.most, graphs=graphs)
    by_torch = mock.patch.object(policy_eval, "implementation", return_value=reference)
    with by_torch if job.mode == "torch rules" else nullcontext():
        yield running
    pair.target.model.cache = None
    del running.loop
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _captures(running: Running) -> int:
    return int(running.loop.graph_counters.captures)


def _work(before: Metrics, after: Metrics) -> Row:
    """What a round of one request verified, drafted and emitted, means."""
    names = {"verified": "verified_tokens", "levels": "drafted_levels", "emitted": "num_tokens"}
    calls = after.calls - before.calls
    return {k: (getattr(after, n) - getattr(before, n)) / calls for k, n in names.items()}


def _counters(running: Running, before: int) -> Row:
    """Of the graphs, and how many were made since."""
    if not running.loop.round.is_static:
        return {}
    counters = running.loop.graph_counters
    return {**asdict(counters), "late_captures": counters.captures - before}
