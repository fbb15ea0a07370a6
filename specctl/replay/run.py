"""`specctl replay`: folders and named policies in, one document out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from specctl.artifacts.manifest import PairFingerprint
from specctl.errors import UsageError
from specctl.logs.trace_columns import Traces
from specctl.logs.tree_log import DenseLog
from specctl.policy.records import ScoredTree
from specctl.policy.scored import nothing_kept
from specctl.replay.config import ReplayConfig, ShowProgress, no_progress, refuse_ignored
from specctl.replay.cost.files import (
    check_expiry,
    check_machine,
    check_pair,
    check_rounds,
    load_cost_model,
)
from specctl.replay.cost.model import CostModel, replay_clock
from specctl.replay.cost.records import LinearCost
from specctl.replay.foreign.header import HEADER_NAME
from specctl.replay.foreign.replaying import replay_import
from specctl.replay.foreign.traces import ImportedTraces
from specctl.replay.results import ReplayResult, Result, caption_of, facts_of
from specctl.replay.rounds import Rounds, replay
from specctl.replay.score import score
from specctl.replay.serving import ServedTraces, serve_policies
from specctl.runtime.hardware import hardware_name
from specctl.runtime.policy_spec import resolve_policies

Warn = Callable[[str], None]
"""Told of a cost model of another pair or machine, or one that expired."""


def no_warning(line: str) -> None:
    """Says nothing."""
    del line


def replay_folders(
    folders: Sequence[str | Path],
    config: ReplayConfig,
    open_traces: Callable[..., ServedTraces],
    *,
    progress: ShowProgress = no_progress,
    warn: Warn = no_warning,
) -> Result:
    """Scores policies on whatever the folders hold: dense traces, or one import.

    Args:
        open_traces: called with the folders of dense traces; `TraceSet.open`.

    Raises:
        UsageError: a policy that a log cannot tell, a baseline that is not there, or an option
            that would be ignored. TraceError, ArtifactError, InputError: see `specctl.errors`.
    """
    config.check_baseline()
    if any((Path(folder) / HEADER_NAME).is_file() for folder in folders):
        imported = ImportedTraces.open(_only(folders))
        model = _foreign_cost_model(config, imported, warn)
        return replay_import(imported, config, model, progress=progress)
    refuse_ignored(
        {"--drafter": bool(config.drafters), "--k-table": config.k_table is not None},
        expected="an import of `specctl import`",
        found="dense traces",
    )
    traces = open_traces(*folders)
    torch.set_num_threads(1)  # chunks are the parallelism
    if config.has_load:
        return _served(traces, config, progress, warn)
    refuse_ignored(
        {"--tpot-limit-ms": config.tpot_limit_ms is not None},
        expected="a load, --batch-size or --arrival-rate",
        found="none",
    )
    return replay_policies(traces, config, progress=progress, warn=warn)


def replay_policies(
    traces: ServedTraces,
    config: ReplayConfig,
    *,
    progress: ShowProgress = no_progress,
    warn: Warn = no_warning,
) -> ReplayResult:
    """Scores policies on dense traces, one request at a time.

    Raises:
        As `replay_folders`.
    """
    log = DenseLog.open(traces)
    named = resolve_policies(",".join(config.specs), traces.fingerprint)
    model = open_cost_model(config.cost_model, traces, warn)
    with progress("positions", traces.num_rows("rounds")) as tick:
        runs = replay(
            log,
            [item.policy for item in named],
            num_threads=config.num_threads,
            on_positions=tick,
        )
    refuse_in_vain(runs)
    labels = [item.label for item in named]
    scored = score(
        labels,
        runs,
        clock=None if model is None else replay_clock(model),
        baseline=config.baseline - 1,
        seed=config.seed,
    )
    facts = facts_of(traces, log, None if model is None else model.digest)
    baseline = labels[config.baseline - 1]
    return ReplayResult(
        facts, caption_of(facts), baseline, tuple(scored), by_category=config.by_category
    )


def refuse_in_vain(runs: Sequence[Rounds]) -> None:
    """Refuses a scorer whose beta kept no node of any round: it drafts, and verifies nothing.

    Raises:
        UsageError: naming beta.
    """
    for run in runs:
        shape, verified = run.policy.shape, run.outcomes.verified
        if isinstance(shape, ScoredTree) and bool((verified == 1).all()):
            raise nothing_kept(shape.beta, f"no node in {len(verified)} rounds of these traces")


def _served(
    traces: ServedTraces, config: ReplayConfig, progress: ShowProgress, warn: Warn
) -> Result:
    refuse_ignored(
        {"--by-category": config.by_category},
        expected="requests replayed one at a time",
        found="a load, which mixes categories",
    )
    model = open_cost_model(config.cost_model, traces, warn)
    if model is None:
        raise UsageError(
            "--cost-model",
            expected="the times that a load is simulated with",
            found="none",
            fix="measure them with `specctl profile`, or write a linear form by hand",
        )
    return serve_policies(traces, config, model, progress=progress)


def _only(folders: Sequence[str | Path]) -> Path:
    if len(folders) == 1:
        return Path(folders[0])
    raise UsageError(
        "traces",
        expected="one import by itself",
        found=f"{len(folders)} folders",
        fix="replay them one after the other; their texts are not of one run",
    )


def open_cost_model(path: Path | None, traces: Traces, warn: Warn) -> CostModel | None:
    """The cost model, after saying what about it does not fit these traces."""
    if path is None:
        return None
    model = load_cost_model(path)
    for line in (*check_pair(model, traces.fingerprint), *check_expiry(model), *_elsewhere(model)):
        warn(line)
    return model


def _foreign_cost_model(
    config: ReplayConfig, traces: ImportedTraces, warn: Warn
) -> CostModel | None:
    """The same for an import, which names neither its models nor its machine."""
    if config.cost_model is None:
        return None
    model = load_cost_model(config.cost_model)
    drafters = config.drafters or traces.drafters
    shared = f"cost model: one drafter's times stand for {' and '.join(drafters)}; see --drafter"
    for line in (
        *_unnamed_pair(model),
        *check_expiry(model),
        *_elsewhere(model),
        *([shared] if len(drafters) > 1 else []),
    ):
        warn(line)
    return model


def _unnamed_pair(model: CostModel) -> list[str]:
    """A line where times are a pair's, since nobody can tell whether the import is of that pair."""
    if isinstance(model.record, LinearCost):
        return []
    pair: PairFingerprint = model.record.pair
    return [
        f"cost model: measured for target {pair.target!r} and drafter {pair.drafter!r}; "
        "the import does not name its own"
    ]


def _elsewhere(model: CostModel) -> list[str]:
    """Lines where the times are another machine's: usual on a laptop, but never unsaid."""
    here = {"device": hardware_name(torch.device("cpu"))}
    return [*check_machine(model, here), *check_rounds(model)]
