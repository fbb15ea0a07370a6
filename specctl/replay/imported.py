"""`specctl replay` on an imported log: chains of fixed length, by batch size, and the oracle.

A chain of K tokens accepts min(K, a) where the log accepted a, exactly, as long as K is within
what the log offered; beyond it the rounds that the log cut short are censored and bounded. The
rounds are walked, bounded, scored and put into batches as those of any other log. The oracle
drafts exactly what will be accepted. SpecDecode-Bench calls these FIXED_K and ORACLE
(`predictor.py`; paper 2601.11580).

In batches requests join in file order, under the batching of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specctl.artifacts.describe import Description
from specctl.errors import UsageError
from specctl.logs.acceptance_figures import UNKNOWN_BATCHES, ChainClock, explain, sweep_of
from specctl.logs.acceptance_lists import LAST_ROUND, misfit_share
from specctl.logs.imported_log import AcceptedLengths, ImportedLog
from specctl.logs.positions import Ints, Longs
from specctl.policy import Chain, ChainSchedule, Policy, RootOnly
from specctl.policy.family import MAX_DEPTH
from specctl.replay.adaptive import ADAPTIVE, AdaptiveSlot, longest_chain, read_slots
from specctl.replay.batch_figures import totals_of
from specctl.replay.batch_simulation import Load, Simulation, simulate
from specctl.replay.config import ReplayConfig, ShowProgress, no_progress, refuse_ignored
from specctl.replay.cost.files import clock_of, warn_outside
from specctl.replay.cost.model import CostModel, steps_of
from specctl.replay.outcomes import Outcomes
from specctl.replay.peer import drawn, peer_figures
from specctl.replay.results import (
    Caption,
    ImportBatchScores,
    PeerScores,
    Result,
    peer_result,
    replay_result,
    totals_result,
)
from specctl.replay.rounds import RequestBounds, Rounds, walk_outcomes
from specctl.replay.score import score
from specctl.replay.submissions import Submissions
from specctl.replay.walk import walk
from specctl.results import ImportScores
from specctl.runtime.policy_spec import resolve_policy

PLAIN, ORACLE = "ar", "oracle"
ChainShape = RootOnly | Chain | ChainSchedule
"""Shapes that accepted lengths can tell."""
Candidate = ChainShape | dict[int, AdaptiveSlot] | None
"""One of them, SGLang's adaptive lengths, or None: the oracle."""


# ----------------------------------------------------------------- one request at a time


def replay_chain(log: AcceptedLengths, num_draft_tokens: int) -> Rounds:
    """Every round of a chain of fixed length; `score` turns them into figures.

    Every round verifies `num_draft_tokens` + 1 tokens, as engines submit them, also where fewer
    tokens remain. A drafter that at times proposes nothing (an n-gram without a match) verifies
    less than that; the log does not say where.

    Args:
        num_draft_tokens: K; 0 is plain decoding.

    Raises:
        UsageError: K below 0 or above `MAX_DEPTH`.
    """
    if not 0 <= num_draft_tokens <= MAX_DEPTH:
        raise UsageError(
            "chain over imported traces",
            expected=f"0 to {MAX_DEPTH} draft tokens",
            found=str(num_draft_tokens),
            fix="0 is plain decoding",
        )
    outcomes, most = chain_outcomes(log, num_draft_tokens)
    policy = _chain_policy(num_draft_tokens)
    size = num_draft_tokens + 1
    return walk_outcomes(policy, log.positions, outcomes, size, outcomes.accepted, most)


def replay_oracle(log: AcceptedLengths) -> Rounds:
    """Every round of the chain that drafts exactly what will be accepted.

    As many calls as the deepest logged chain, and no draft token rejected. It never drafts past
    what the log offered; rounds cut there are counted as censored. Its `policy` is the chain of
    the logged depth (up to `MAX_DEPTH`), whose rounds these are; it drafts and verifies less.
    """
    visited, first = walk(log.positions, log.accepted + 1), log.positions.start[:-1]
    calls = np.add.reduceat(visited, first, dtype=np.float64)
    tokens = calls + np.add.reduceat(np.where(visited, log.accepted, 0), first)
    outcomes, _ = chain_outcomes(log, None, np.flatnonzero(visited))
    policy = _chain_policy(min(log.offered_depth, MAX_DEPTH))
    bounds = RequestBounds(calls, calls, tokens, tokens)
    return Rounds(policy, log.positions, visited, outcomes, bounds, log.offered_depth + 1)


def chain_outcomes(
    log: AcceptedLengths, num_draft_tokens: int | None, rows: slice | Longs = slice(None)
) -> tuple[Outcomes, Ints]:
    """A chain at some positions, and the most that it may accept there; None for the oracle's.

    In a chain the deepest accepted token's rank is its depth. An accepted length tells how a
    longer chain would have fared wherever it ended early, so an expansion is missing only at the
    censored rounds.
    """
    depth, remaining = log.offered_depth, log.positions.remaining[rows]
    accepted = most = log.accepted[rows]
    drafted: Ints | int = accepted
    missing: Ints | int = 0
    is_censored = (accepted >= depth) & (accepted < remaining)
    if num_draft_tokens is None:
        missing = is_censored.astype(np.int32)
    else:
        drafted = num_draft_tokens
        accepted = most = np.minimum(accepted, num_draft_tokens)
        if num_draft_tokens > depth:
            most = np.where(is_censored, np.minimum(num_draft_tokens, remaining), accepted)
            missing = np.where(is_censored, np.int32(num_draft_tokens - depth), np.int32(0))
    outcomes = Outcomes.of(
        accepted,
        verified=drafted + 1,
        levels=drafted,
        wanted=np.maximum(drafted, missing),
        missing=missing,
        censored=np.greater(missing, 0),
        tcr=accepted,
    )
    return outcomes, most


def _chain_policy(num_draft_tokens: int) -> Policy:
    shape = Chain(num_draft_tokens=num_draft_tokens) if num_draft_tokens else RootOnly()
    return Policy(shape=shape)


# ----------------------------------------------------------------- in batches


def submissions_at(log: AcceptedLengths, candidate: Candidate) -> Submissions:
    """The chain's outcome at every position; of lengths by batch, the longest chain's."""
    slots = candidate if isinstance(candidate, dict) else None
    shape = longest_chain(slots) if slots else candidate
    assert not isinstance(shape, dict)
    outcomes, _ = chain_outcomes(log, None if shape is None else max(_lengths(shape)))
    most = int(outcomes.verified.max(initial=1))
    policy = _chain_policy(min(most - 1, MAX_DEPTH)) if shape is None else Policy(shape=shape)
    return Submissions(policy, log.positions, outcomes, most, adaptive=slots)


def _lengths(shape: ChainShape) -> tuple[int, ...]:
    """Draft tokens of a chain; of a schedule one number an entry."""
    if isinstance(shape, ChainSchedule):
        return shape.num_draft_tokens
    return (shape.num_draft_tokens if isinstance(shape, Chain) else 0,)


def _length_at(shape: ChainShape, batch_size: int) -> int:
    """Draft tokens of each request of a batch."""
    return shape.length_at(batch_size) if isinstance(shape, ChainSchedule) else _lengths(shape)[0]


# ----------------------------------------------------------------- the verb


def replay_import(
    log: ImportedLog,
    config: ReplayConfig,
    model: CostModel | None = None,
    *,
    progress: ShowProgress = no_progress,
    warn: Callable[[str], None],
) -> Result:
    """Scores chains on imported acceptance: one request at a time, or in batches.

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
        found="an import, whose requests run in its order",
    )
    drafters = config.drafters or log.drafters
    candidates = candidates_of(drafters, config)
    of, words = _of_one(drafters, config.specs[config.baseline - 1])
    baseline = _label(of[0], words)
    facts, caption = _facts(log, drafters, model), _caption(log, drafters)
    if config.has_load:
        refuse_ignored(
            {"--by-category": config.by_category},
            expected="requests replayed one at a time",
            found="batches, which mix categories",
        )
    is_peer = config.definition != "specctl"
    if is_peer and model is None:
        raise UsageError(
            "--definition",
            expected="--cost-model, whose times it weighs",
            found="none",
            fix="give the clock of its simulator: --cost-model h100-llama-3.1-8b-eagle",
        )
    rounds: dict[str, Rounds] = {}
    runs: dict[str, Simulation] = {}
    load = Load(config.batch_size, engine=config.engine, in_order=True)
    with progress("policies", len(candidates)) as tick:
        for label, (drafter, candidate) in candidates.items():
            lengths = log.lengths(drafter)
            if config.has_load:
                runs[label] = simulate(submissions_at(lengths, candidate), load, model)
            elif isinstance(candidate, ChainShape):
                rounds[label] = replay_chain(lengths, _length_at(candidate, config.batch_size))
            else:
                rounds[label] = replay_oracle(lengths)
            tick()
    asked = {label: run.steps for label, run in runs.items()}
    warn_outside(model, asked | {label: steps_of(run) for label, run in rounds.items()}, warn)
    if config.has_load:
        totals = totals_of(runs, baseline, has_time=model is not None)
        found = ImportBatchScores(
            kind="replay-batch", **facts, load=vars(load).copy(), baseline=baseline, policies=totals
        )
        return totals_result(found, caption)
    if is_peer and model is not None:
        figures = peer_figures(rounds, baseline, model, config.batch_size, config.seed)
        by_peer = PeerScores(
            kind="replay-peer",
            **facts,
            definition="specdecode-bench",
            batch_size=config.batch_size,
            num_requests=len(drawn(log.positions.num_requests)),
            baseline=baseline,
            policies=figures,
        )
        return peer_result(by_peer, caption)
    scored = score(
        list(rounds),
        list(rounds.values()),
        clock=None if model is None else model.replayed_us,
        baseline=list(rounds).index(baseline),
        seed=config.seed,
    )
    scores = ImportScores(kind="replay", **facts, baseline=baseline, policies=tuple(scored))
    return replay_result(scores, caption, by_category=config.by_category)


def candidates_of(
    drafters: Sequence[str], config: ReplayConfig
) -> dict[str, tuple[str, Candidate]]:
    """Every policy for every drafter by label; plain decoding once, it has no drafter."""
    named: list[tuple[str, Sequence[str], Candidate]] = []
    for spec in config.specs:
        of, words = _of_one(drafters, spec)
        named.append((words, of, shape_of(words)))
    if config.adaptive is not None:
        named.append((ADAPTIVE, drafters, read_slots(config.adaptive)))
    found = [
        (_label(drafter, spec), (drafter, candidate))
        for spec, of, candidate in named
        for drafter in (of[:1] if spec == PLAIN else of)
    ]
    candidates = dict(found)
    if len(candidates) < len(found):
        raise UsageError(
            "policies and drafters",
            expected="each of them once",
            found=", ".join(label for label, _ in found),
            fix="remove the repeated one",
        )
    return candidates


def _of_one(drafters: Sequence[str], spec: str) -> tuple[Sequence[str], str]:
    """The drafters and the words of a policy, which may be one drafter's: `eagle/oracle`, as the
    rows of tables are named."""
    drafter, slash, words = spec.partition("/")
    return ([drafter], words) if slash and drafter in drafters else (drafters, spec)


def shape_of(spec: str) -> ChainShape | None:
    """The chain of a named policy; None for the oracle."""
    if spec == ORACLE:
        return None
    words, _, budget = spec.partition("+")
    named = resolve_policy(words)
    shape = named.policy.shape
    if named.artifact_digest is not None:
        found = "an artifact, fitted on a pair that an import does not name"
    elif budget or not isinstance(shape, ChainShape):
        found = "one that looks at more than accepted lengths"
    else:
        return shape
    raise UsageError(
        f"policy {spec!r} on imported traces",
        expected=f"ar, chain, schedule or {ORACLE}: an import holds how far one chain was "
        "accepted, no tree and no probability",
        found=found,
        fix="replay it on dense traces: specctl collect --dense",
    )


def _label(drafter: str, spec: str) -> str:
    return spec if spec == PLAIN else f"{drafter}/{spec}"


def _facts(log: ImportedLog, drafters: Sequence[str], model: CostModel | None) -> dict[str, Any]:
    """The conditions of the scores; an import names no models."""
    from specctl.version import __version__

    header = log.header
    return {
        "specctl_version": __version__,
        "traces_digest": log.digest,
        "source": {
            "format": header.source_format,
            "name": header.source_name,
            "digest": header.source_digest,
        },
        "entry_predicts": header.entry_predicts,
        "drafters": {
            name: {
                "offered_depth": log.lengths(name).offered_depth,
                "offered_depth_inferred": header.drafters[name].offered_depth_inferred,
            }
            for name in drafters
        },
        "cost_model": None if model is None else model.digest,
        "clock": clock_of(model, None),
    }


def _caption(log: ImportedLog, drafters: Sequence[str]) -> Caption:
    header = log.header
    depths = ", ".join(f"{name} {offered_depth(log, name)}" for name in drafters)
    return Caption(
        subject=f"{header.source_name} ({header.source_format})",
        sampling="sampling not stated",
        advice="Log longer chains, or import with the --offered-depth that they had.",
        remarks=(f"Draft tokens that each logged round offered: {depths}.",),
    )


def offered_depth(log: ImportedLog, drafter: str) -> str:
    """Draft tokens of each round, in words."""
    found = log.header.drafters[drafter]
    return f"{found.offered_depth}" + (" (inferred)" if found.offered_depth_inferred else "")


def explain_import(
    log: ImportedLog, clock: ChainClock | None, load: str
) -> dict[str, dict[str, Any]]:
    """By drafter, every length up to the offered depth replayed, and what that means.

    Args:
        clock, load: see `logs.acceptance_figures.explain`.
    """
    found = {}
    for name in log.drafters:
        lengths = log.lengths(name)
        depth = min(lengths.offered_depth, MAX_DEPTH)
        chains = [replay_chain(lengths, k).outcomes.accepted for k in range(1, depth + 1)]
        taus = [1 + float(accepted.mean()) for accepted in chains]
        deepest = chains[-1] if chains else np.zeros(1, np.int32)
        figures = {
            "num_rounds": len(deepest),
            "mean_acceptance_length": 1 + float(deepest.mean()),
            "marginal_prob": [float(np.mean(deepest >= j)) for j in range(1, depth + 1)],
            "fixed_length_sweep": sweep_of([(tau, tau) for tau in taus], "every length replayed")
            if taus
            else None,
            "why_no_sweep": None if taus else "no draft token was ever accepted",
            "not_known": [f"acceptance beyond {depth} draft tokens", UNKNOWN_BATCHES],
        }
        found[name] = explain(figures, clock, load)
    return found


def describe_imported_log(log: ImportedLog) -> Description:
    """An import that can be replayed, for a person."""
    header = log.header
    facts = (
        ("source", f"{header.source_name}  {header.source_digest}"),
        (
            "requests",
            f"{header.num_requests} ({header.num_without_rounds} without rounds left out)",
        ),
        ("positions", f"{header.num_positions} ({header.num_cut_tokens} tokens cut off)"),
        ("entry i drafts", "token i" if header.entry_predicts == "same" else "token i + 1"),
    )
    rows = []
    for name, drafter in header.drafters.items():
        accepted = replay_oracle(log.lengths(name)).outcomes.accepted
        share = misfit_share(drafter.misaligned, drafter.num_entries)
        kinds = ", ".join(
            f"{count} {kind}"
            for kind, count in sorted(drafter.misaligned.items())
            if kind != LAST_ROUND  # a warning and the tokens cut off say those
        )
        rows.append(
            (
                name,
                offered_depth(log, name),
                f"{1 + accepted.mean():.3f}",
                f"{drafter.num_censored / log.positions.num_rows:.2%} of positions",
                f"{share:.2%}" + (f": {kinds}" if kinds else ""),
            )
        )
    columns = ("drafter", "offered depth", "τ at that depth", "censored", "misaligned entries")
    return Description(f"imported traces {log.digest}", facts, columns, tuple(rows))
