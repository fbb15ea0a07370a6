"""`specctl replay` on an import: chains by name, for every drafter of the folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specctl.errors import UsageError
from specctl.policy.records import Chain, RootOnly
from specctl.replay.config import ReplayConfig, ShowProgress, no_progress, refuse_ignored
from specctl.replay.cost.model import CostModel, replay_clock
from specctl.replay.foreign.batches import simulate_batches
from specctl.replay.foreign.chains import replay_chain, replay_oracle
from specctl.replay.foreign.schedules import ByBatchSize, FixedLength, Oracle, Schedule
from specctl.replay.foreign.traces import ImportedTraces
from specctl.replay.foreign.waves import WavesResult
from specctl.replay.results import Caption, ReplayResult, Result
from specctl.replay.rounds import Rounds
from specctl.replay.score import score
from specctl.runtime.policy_spec import resolve_policy

PLAIN, ORACLE, TABLE = "ar", "oracle", "k-table"


@dataclass(frozen=True)
class Candidate:
    """A drafter's chains, and what tables call them."""

    label: str
    drafter: str
    schedule: Schedule


def replay_import(
    traces: ImportedTraces,
    config: ReplayConfig,
    model: CostModel | None = None,
    *,
    progress: ShowProgress = no_progress,
) -> Result:
    """Scores chains on imported acceptance: one request at a time, or in batches.

    With a batch size above 1, or a table of draft tokens by batch size, requests run in waves
    (`simulate_batches`); without, they are scored as on dense traces.

    Raises:
        UsageError: a policy that accepted lengths cannot tell, a drafter that was not imported,
            an option that would be ignored, or a batch that the cost model does not know.
    """
    refuse_ignored(
        {
            "--arrival-rate": config.arrival_rate_per_s is not None,
            "--tpot-limit-ms": config.tpot_limit_ms is not None,
        },
        expected="dense traces",
        found="an import, whose requests run in waves",
    )
    config.check_baseline()
    drafters = config.drafters or traces.drafters
    candidates = candidates_of(drafters, config)
    baseline = _label(drafters[0], config.specs[config.baseline - 1])
    facts, caption = _facts(traces, drafters, model), _caption(traces, drafters)
    if config.batch_size > 1 or config.k_table is not None:
        return _in_waves(traces, candidates, config, model, facts, caption, baseline, progress)
    runs = []
    with progress("policies", len(candidates)) as tick:
        for candidate in candidates:
            runs.append(_rounds(traces, candidate))
            tick()
    labels = [candidate.label for candidate in candidates]
    scored = score(
        labels,
        runs,
        clock=None if model is None else replay_clock(model),
        baseline=labels.index(baseline),
        seed=config.seed,
    )
    return ReplayResult(facts, caption, baseline, tuple(scored), by_category=config.by_category)


def _in_waves(
    traces: ImportedTraces,
    candidates: Sequence[Candidate],
    config: ReplayConfig,
    model: CostModel | None,
    facts: dict[str, Any],
    caption: Caption,
    baseline: str,
    progress: ShowProgress,
) -> WavesResult:
    refuse_ignored(
        {"--by-category": config.by_category},
        expected="requests replayed one at a time",
        found="batches, which mix categories",
    )
    runs = {}
    with progress("policies", len(candidates)) as tick:
        for candidate in candidates:
            runs[candidate.label] = simulate_batches(
                traces,
                candidate.drafter,
                candidate.schedule,
                batch_size=config.batch_size,
                clock=model,
            )
            tick()
    return WavesResult(facts, caption, baseline, config.batch_size, config.k_table, runs)


def candidates_of(drafters: Sequence[str], config: ReplayConfig) -> list[Candidate]:
    """Every policy for every drafter, policy by policy; plain decoding once, it has no drafter.

    Raises:
        UsageError: a policy that accepted lengths cannot tell, or one that stands twice.
    """
    schedules = {spec: schedule_of(spec) for spec in config.specs}
    if config.k_table is not None:
        schedules[TABLE] = ByBatchSize.parse(config.k_table)
    found = [
        Candidate(_label(drafter, spec), drafter, schedules[spec])
        for spec in (*config.specs, *([TABLE] if TABLE in schedules else ()))
        for drafter in (drafters[:1] if spec == PLAIN else drafters)
    ]
    labels = [candidate.label for candidate in found]
    if len(set(labels)) < len(labels):
        raise UsageError(
            "policies and drafters",
            expected="each of them once",
            found=", ".join(labels),
            fix="remove the repeated one",
        )
    return found


def schedule_of(spec: str) -> Schedule:
    """How long the chains of a named policy are.

    Raises:
        UsageError: not `ar`, a chain of fixed length or the oracle.
    """
    if spec == ORACLE:
        return Oracle()
    words, _, budget = spec.partition("+")
    named = resolve_policy(words)
    if named.artifact_digest is not None:
        raise _not_told(spec, "an artifact, fitted on a pair that an import does not name")
    shape = named.policy.shape
    if budget or not isinstance(shape, Chain | RootOnly):
        raise _not_told(spec, "one that looks at more than accepted lengths")
    return FixedLength(shape.num_draft_tokens if isinstance(shape, Chain) else 0)


def _not_told(spec: str, found: str) -> UsageError:
    return UsageError(
        f"policy {spec!r} on imported traces",
        expected=f"ar, chain:num_draft_tokens=K or {ORACLE}: an import holds how far one chain was "
        "accepted, no tree and no probability",
        found=found,
        fix="replay it on dense traces: specctl collect --dense",
    )


def _label(drafter: str, spec: str) -> str:
    return spec if spec == PLAIN else f"{drafter}/{spec}"


def _rounds(traces: ImportedTraces, candidate: Candidate) -> Rounds:
    if isinstance(candidate.schedule, Oracle):
        return replay_oracle(traces, candidate.drafter)
    assert isinstance(candidate.schedule, FixedLength), "a table makes waves"
    return replay_chain(traces, candidate.drafter, candidate.schedule.num_draft_tokens)


def _facts(
    traces: ImportedTraces, drafters: Sequence[str], model: CostModel | None
) -> dict[str, Any]:
    """What the scores hold for; an import names no models."""
    from specctl import __version__

    header = traces.header
    return {
        "specctl_version": __version__,
        "traces_digest": traces.digest,
        "source": {
            "format": header.source_format,
            "name": header.source_name,
            "digest": header.source_digest,
        },
        "entry_predicts": header.entry_predicts,
        "drafters": {
            name: {
                "offered_depth": traces.offered_depth(name),
                "offered_depth_inferred": header.drafters[name].offered_depth_inferred,
            }
            for name in drafters
        },
        "cost_model": None if model is None else model.digest,
    }


def _caption(traces: ImportedTraces, drafters: Sequence[str]) -> Caption:
    header = traces.header
    depths = ", ".join(
        f"{name} {header.drafters[name].offered_depth}"
        + (" (inferred)" if header.drafters[name].offered_depth_inferred else "")
        for name in drafters
    )
    return Caption(
        subject=f"{header.source_name} ({header.source_format})",
        sampling="sampling not stated",
        advice="Log longer chains, or import with the --offered-depth that they had.",
        remarks=(f"Draft tokens that each logged round offered: {depths}.",),
    )
