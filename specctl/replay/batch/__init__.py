"""Replay of requests in batches: a discrete-event simulation of serving, from a dense log.

[submissions] = submissions_of(log, [policy])          # what the shape does, one pass
runs = simulate_runs(submissions, Load(batch_size=16), cost_model)
figures_of(policy.name, runs, tpot_limit_us=20_000).to_json()
"""

from specctl.replay.batch.figures import BatchFigures, compare_runs, figures_of
from specctl.replay.batch.load import Load
from specctl.replay.batch.simulate import Simulation, simulate, simulate_runs
from specctl.replay.batch.submissions import Submissions, submissions_of
from specctl.replay.batch.timing import Packing, StepClock

__all__ = [
    "BatchFigures",
    "Load",
    "Packing",
    "Simulation",
    "StepClock",
    "Submissions",
    "compare_runs",
    "figures_of",
    "simulate",
    "simulate_runs",
    "submissions_of",
]
