"""A tuning at a load: what is asked, who scores it, and what its result must say of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specctl.logs.tree_log import DenseLog
from specctl.replay.batch.load import Load
from specctl.replay.batch.timing import Packing
from specctl.replay.cost.model import CostModel
from specctl.replay.cost.records import LinearCost
from specctl.replay.ladder.tally import LoadClock
from specctl.replay.tune.batched import BatchEvaluator
from specctl.replay.tune.evaluation import Evaluator
from specctl.replay.tune.objective import Objective
from specctl.replay.tune.race import Race
from specctl.replay.tune.results import TuneResult
from specctl.replay.tune.search import FACTOR
from specctl.replay.tune.sequential import SequentialEvaluator
from specctl.replay.tune.verdict import judge

EXACT = (
    "One request at a time: counts are exact, times are the cost model's and of rounds alone, "
    "without the reading of prompts."
)
SIMULATED = (
    "Batches are simulated ({packing}, seed {seed}): the same requests in the same order for every "
    "setting, from the first to the last with ramp-up and drain; a step's time is shared equally "
    "by its requests. Finalists ran in {num_runs} orders; intervals resample prompts and runs."
)


@dataclass(frozen=True)
class TuneConfig:
    """What is asked of a tuning.

    Attributes:
        families: as `--family` names them. grids: as `--grid` gives them.
        load: closed loop or arrivals. packing: of unequal trees in a batch.
        held_out_frac: share of prompts that only the verdict sees.
        seed: of the split, the order of prompts, the load and the bootstrap.
        factor: of the halving.
        drops_unsupported: see `Race`.
    """

    families: tuple[str, ...]
    objective: Objective
    load: Load
    grids: tuple[str, ...] = ()
    packing: Packing = "ragged"
    held_out_frac: float = 0.2
    seed: int = 0
    factor: int = FACTOR
    drops_unsupported: bool = False

    def to_json(self) -> dict[str, Any]:
        load = self.load
        return {
            "families": list(self.families),
            "grids": list(self.grids),
            "objective": self.objective.to_json(),
            "load": {
                "batch_size": load.batch_size,
                "arrival_rate_per_s": load.arrival_rate_per_s,
            },
            "packing": self.packing,
            "held_out_frac": self.held_out_frac,
            "seed": self.seed,
            "factor": self.factor,
            "drops_unsupported": self.drops_unsupported,
        }


@dataclass(frozen=True)
class Tuning:
    """A tuning that is ready to run: everything that can be refused early has been.

    Attributes:
        facts: of the traces, as `replay.results.facts_of` gives them.
        num_scorings: settings that are scored at most, each as often as it is run.
    """

    config: TuneConfig
    facts: dict[str, Any]
    log: DenseLog
    model: CostModel
    race: Race
    num_threads: int
    num_scorings: int

    @property
    def is_simulated(self) -> bool:
        """Whether requests share batches; else they run one at a time, which is exact."""
        return self.race.num_runs > 1

    def run(self, on_setting: Callable[[], object] = lambda: None) -> TuneResult:
        """The search and the verdict; minutes, most of them static settings.

        Raises:
            UsageError, TraceError: see `Race.run` and `DenseLog.chunks`.
        """
        torch.set_num_threads(1)  # chunks are the parallelism
        verdict = judge(self.race.run(self.evaluator(on_setting)), seed=self.config.seed)
        return TuneResult(self.all_facts(), verdict)

    def all_facts(self) -> dict[str, Any]:
        """What a result must say besides the verdict; plain JSON values."""
        config = self.config.to_json()
        how = SIMULATED.format(
            packing=self.config.packing, seed=self.config.seed, num_runs=self.race.num_runs
        )
        return {
            **self.facts,
            "cost_source": _source(self.model),
            "cost_device": _device(self.model),
            "load": config["load"],
            "config": config,
            "is_simulated": self.is_simulated,
            "approximations": how if self.is_simulated else EXACT,
        }

    def evaluator(self, on_setting: Callable[[], object] = lambda: None) -> Evaluator:
        """Who scores policies at this load."""
        config = self.config
        shared: dict[str, Any] = {
            "log": self.log,
            "objective": config.objective,
            "num_threads": self.num_threads,
            "on_setting": on_setting,
        }
        if not self.is_simulated:
            return SequentialEvaluator(clock=LoadClock(self.model), **shared)
        return BatchEvaluator(
            model=self.model,
            load=config.load,
            packing=config.packing,
            seed=config.seed,
            **shared,
        )


def _device(model: CostModel) -> str | None:
    """Whose times these are; a linear form names no device."""
    return None if isinstance(model.record, LinearCost) else model.record.machine.device


def _source(model: CostModel) -> str:
    record = model.record
    if isinstance(record, LinearCost):
        return f"linear form from {record.source}"
    return f"measured {record.measured} on {record.machine.device}"
