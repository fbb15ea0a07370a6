"""What every part of the table is measured with: the log, its two sides, a clock, a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specctl.logs.positions import Floats
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy, policy_digest
from specctl.replay.batch_simulation import Load
from specctl.replay.cost.files import load_cost_model
from specctl.replay.cost.model import CostModel
from specctl.replay.tune.evaluators import Evaluation, LogEvaluator, Objective
from specctl.stats import split_prompts
from systems.curves import Curve

SHARE, SEED = 0.5, 0
"""Of the split by prompt, in every fit and every figure of the table."""
NAMED = ("line", "h100-llama-3.1-8b-eagle")
"""Clocks of the package that every figure in time is given on, beside the measured one."""
COUNTS = load_cost_model(Path("line"))
"""Of a batch's counts, which no clock changes while no request has to wait for its arrival."""
NUM_RUNS = 2
"""Orders of the requests that a batch is simulated in."""


@dataclass(frozen=True)
class Bench:
    """The log, split; `train` chooses, `held_out` is measured.

    Attributes:
        clocks: cost models by name; `NAMED` are always among them.
        cache: folder of sums that were found, by this run or an earlier one of the same code.
    """

    traces: TraceSet
    log: DenseLog
    clocks: dict[str, CostModel]
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    num_threads: int
    cache: Path

    @classmethod
    def open(
        cls, folders: Sequence[Path], clocks: dict[str, CostModel], num_threads: int, cache: Path
    ) -> Bench:
        traces = TraceSet.open(*folders, verify=False)
        sides = split_prompts(traces.prompt_ids, held_out_frac=SHARE, seed=SEED)
        log = DenseLog.open(traces)
        named = {name: load_cost_model(Path(name)) for name in NAMED}
        clocks = {**clocks, **named}
        return cls(traces, log, clocks, sides.train, sides.held_out, num_threads, cache)

    def side(self, name: str) -> tuple[str, ...]:
        """Prompts of `train` or `held_out`, or every other one of `train`, which `choosing` is."""
        if name == "choosing":
            return self.train[::2]
        prompts: tuple[str, ...] = getattr(self, name)
        return prompts

    def categories(self) -> list[str]:
        """Of the held-out prompts, sorted."""
        import polars as pl

        prompt, category = pl.col("prompt_id").cast(pl.String), pl.col("category").cast(pl.String)
        rows = self.traces.scan("rounds").filter(prompt.is_in(self.held_out))
        found: list[str] = rows.select(category.unique()).collect()["category"].to_list()
        return sorted(found)

    def curve(
        self, name: str, policies: dict[str, Policy], side: str, batch_size: int | None = None
    ) -> Curve:
        """A family's settings on one side, mean over its runs.

        Args:
            batch_size: simulate so many requests at a time, in a closed loop; None replays one
                request at a time.
        """
        prompts = self.side(side)
        found = self._evaluate(list(policies.values()), prompts, batch_size)
        runs = [e.sums.reshape(-1, len(prompts), e.sums.shape[1]).mean(0) for e in found]
        support = min(e.support for e in found)
        return Curve(name, tuple(policies), tuple(policies.values()), np.stack(runs), support)

    def _evaluate(
        self, policies: list[Policy], prompts: tuple[str, ...], batch_size: int | None
    ) -> list[Evaluation]:
        known = {policy: self._cached(policy, prompts, batch_size) for policy in policies}
        unknown = [policy for policy, found in known.items() if found is None]
        if unknown:
            num_runs = 1 if batch_size in (None, 1) else NUM_RUNS
            evaluations = self._evaluator(batch_size)(unknown, prompts, num_runs)
            for policy, found in zip(unknown, evaluations, strict=True):
                self._keep(policy, prompts, batch_size, found)
                known[policy] = found
        return [found for policy in policies if (found := known[policy]) is not None]

    def _evaluator(self, batch_size: int | None) -> LogEvaluator:
        load = None if batch_size is None else Load(batch_size)
        threads = self.num_threads
        return LogEvaluator(
            self.log, COUNTS, Objective("throughput"), load, seed=SEED, num_threads=threads
        )

    def _path(self, policy: Policy, prompts: tuple[str, ...], batch_size: int | None) -> Path:
        key = [self.log.digest, policy_digest(policy), str(batch_size), *prompts]
        return self.cache / f"{hashlib.sha256(chr(10).join(key).encode()).hexdigest()}.npy"

    def _cached(
        self, policy: Policy, prompts: tuple[str, ...], batch_size: int | None
    ) -> Evaluation | None:
        path = self._path(policy, prompts, batch_size)
        if not path.exists():
            return None
        table: Floats = np.load(path)
        return Evaluation(table[:-1], float(table[-1, 0]))

    def _keep(
        self,
        policy: Policy,
        prompts: tuple[str, ...],
        batch_size: int | None,
        found: Evaluation,
    ) -> None:
        last = np.full((1, found.sums.shape[1]), found.support)
        self.cache.mkdir(parents=True, exist_ok=True)
        np.save(self._path(policy, prompts, batch_size), np.concatenate([found.sums, last]))
