"""`specctl replay`: named policies over opened traces, one document out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from specctl.errors import UsageError
from specctl.replay.cost.files import load_cost_model
from specctl.replay.cost.machine import check_expiry, check_pair
from specctl.replay.cost.model import CostModel
from specctl.replay.cost.predict import replay_clock
from specctl.replay.cost.records import LinearCost
from specctl.replay.log import DenseLog, Traces
from specctl.replay.results import ReplayResult, facts_of
from specctl.replay.rounds import replay
from specctl.replay.score import score
from specctl.runtime.hardware import hardware_name
from specctl.runtime.policy_spec import resolve_policies


def replay_policies(
    traces: Traces,
    specs: Sequence[str],
    *,
    cost_model: Path | None = None,
    baseline: int = 1,
    seed: int = 0,
    num_threads: int = 1,
    on_positions: Callable[[int], None] | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> ReplayResult:
    """Scores policies on dense traces.

    Args:
        specs: names with settings, or artifact folders of this pair.
        cost_model: adds times to the counts.
        baseline: 1-based index into `specs`.
        num_threads: chunks of the log in flight; each computes with one thread.
        warn: told of a cost model of another pair or machine, or one that expired.

    Raises:
        UsageError: a policy that a log cannot tell, or a baseline that is not there.
        TraceError, ArtifactError, InputError: see `specctl.errors`.
    """
    _check_baseline(baseline, len(specs))
    log = DenseLog.open(traces)
    named = resolve_policies(",".join(specs), traces.fingerprint)
    model = open_cost_model(cost_model, traces, warn)
    torch.set_num_threads(1)  # chunks are the parallelism
    policies = [item.policy for item in named]
    runs = replay(log, policies, num_threads=num_threads, on_positions=on_positions)
    labels = [item.label for item in named]
    clock = None if model is None else replay_clock(model)
    scored = score(labels, runs, clock=clock, baseline=baseline - 1, seed=seed)
    facts = facts_of(traces, log, None if model is None else model.digest)
    return ReplayResult(facts, labels[baseline - 1], tuple(scored))


def open_cost_model(
    path: Path | None, traces: Traces, warn: Callable[[str], None]
) -> CostModel | None:
    """The cost model, after saying what about it does not fit these traces."""
    if path is None:
        return None
    model = load_cost_model(path)
    for line in (*check_pair(model, traces.fingerprint), *check_expiry(model), *_elsewhere(model)):
        warn(line)
    return model


def _elsewhere(model: CostModel) -> list[str]:
    """A line where the times are another machine's: usual on a laptop, but never unsaid."""
    if isinstance(model.record, LinearCost):
        return [f"cost model: linear form from {model.record.source!r}, not measured here"]
    theirs, here = model.record.machine.device, hardware_name(torch.device("cpu"))
    device = "" if theirs == here else f"cost model: times are {theirs!r}'s, this is {here!r}"
    return [device] if device else []


def _check_baseline(baseline: int, num_policies: int) -> None:
    if not 1 <= baseline <= num_policies:
        raise UsageError(
            "--baseline",
            expected=f"1 to {num_policies}, the policies given",
            found=str(baseline),
            fix="count the --policy options from 1",
        )
