"""`specctl replay` on an imported log: chains of fixed length, by batch size, and the oracle.

A chain of K tokens accepts min(K, a) where the log accepted a, exactly, as long as K is within
what the log offered; beyond it the rounds that the log cut short are censored and bounded. The
rounds are walked, bounded, scored and put into batches as those of any other log. The oracle
drafts exactly what will be accepted. SpecDecode-Bench calls these FIXED_K and ORACLE
(`predictor.py`; paper 2601.11580).

With a batch size above 1, or a table of draft tokens by batch size, requests run in waves: in
file order, B at a time, each wave until it is empty, so that a length by batch size follows the
batch as it shrinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from specctl.artifacts.describe import Description
from specctl.errors import InputError, UsageError
from specctl.formatting import terminal_table
from specctl.logs.import_lines import Spot, parse_json
from specctl.logs.imported_log import AcceptedLengths, ImportedLog
from specctl.logs.positions import Bools, Ints, Longs
from specctl.policy import Chain, PerRequest, Policy, RootOnly
from specctl.policy.family import MAX_DEPTH
from specctl.replay.batch_simulation import (
    BatchLoop,
    check_batch_size,
    run_closed,
    steps_of_batch,
)
from specctl.replay.config import ReplayConfig, ShowProgress, no_progress, refuse_ignored
from specctl.replay.cost.model import CostModel, replay_clock
from specctl.replay.outcomes import Outcomes
from specctl.replay.results import Caption, ReplayResult, Result
from specctl.replay.rounds import (
    RequestBounds,
    Rounds,
    WalkedPart,
    join_walked,
    walk_outcomes,
)
from specctl.replay.score import score
from specctl.replay.submissions import COUNTS, Submissions
from specctl.replay.walk import walk
from specctl.results import MARKED_BELOW, ImportScores
from specctl.runtime.policy_spec import resolve_policy

PLAIN, ORACLE, TABLE = "ar", "oracle", "k-table"


@dataclass(frozen=True)
class ChainSchedule:
    """How long a chain is.

    Attributes:
        entries: vLLM's `num_speculative_tokens_per_batch_size`, [first, last, K], inclusive.
            Batch sizes between two entries, and above the last, keep the K before them; the first
            entry starts at 1 (vLLM's `SpeculativeConfig`; notes/live-engines.md, 1.3). vLLM looks
            up the number of requests scheduled in the step, which is what decodes here. Empty for
            the oracle, whose chain is as long as it is accepted.
    """

    entries: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def fixed(cls, num_draft_tokens: int) -> ChainSchedule:
        """A chain of that many tokens always; 0 is plain decoding."""
        _check_length(num_draft_tokens)
        return cls(((1, 1, num_draft_tokens),))

    @classmethod
    def parse(cls, text: str) -> ChainSchedule:
        """A table from JSON such as `[[1, 4, 5], [5, 16, 3], [17, 64, 1]]`."""
        try:
            value = parse_json(text, Spot("batch-size table", 1))
        except InputError as error:
            raise _bad_table("JSON", error.found) from error
        rows = value if isinstance(value, list) else [value]
        for row in rows:
            if not isinstance(row, list) or [type(v) for v in row] != [int, int, int]:
                raise _bad_table("a list of [first, last, K]", str(row)[:40])
        entries = tuple(sorted((first, last, length) for first, last, length in rows))
        if not entries or entries[0][0] != 1:
            raise _bad_table("an entry that starts at batch size 1", str(list(entries[:1])))
        for first, last, length in entries:
            _check_length(length)
            if not 1 <= first <= last:
                raise _bad_table("1 <= first <= last in every entry", f"[{first}, {last}, …]")
        for low, high in pairwise(entries):
            if high[0] <= low[1]:
                raise _bad_table("entries in order that do not overlap", f"{low} before {high}")
        return cls(entries)

    @property
    def is_oracle(self) -> bool:
        """Whether the chain is as long as it is accepted."""
        return not self.entries

    def lengths(self) -> Any:
        """`[largest first + 1]` int64, draft tokens by batch size; larger ones keep the last."""
        firsts, _, lengths = np.array(self.entries, np.int64).T
        sizes = np.arange(firsts[-1] + 1)
        return lengths[np.maximum(np.searchsorted(firsts, sizes, side="right") - 1, 0)]

    def submissions(self, log: AcceptedLengths) -> Submissions:
        """What the chain does at every position; of a table, its longest chain."""
        longest = 0 if self.is_oracle else max(length for _, _, length in self.entries)
        outcomes = chain_outcomes(log, None if self.is_oracle else longest)
        most = int(outcomes.drafted.max(initial=0))
        return Submissions(
            policy=_chain_policy(min(most, MAX_DEPTH)),
            positions=log.positions,
            drafts=most > 0,
            max_tokens=most + 1,
            chain_lengths=self.lengths() if len(self.entries) > 1 else None,
            **{name: getattr(outcomes, name) for name in COUNTS},
        )


def _check_length(num_draft_tokens: int) -> None:
    if not 0 <= num_draft_tokens <= MAX_DEPTH:
        raise UsageError(
            "chain over imported traces",
            expected=f"0 to {MAX_DEPTH} draft tokens",
            found=str(num_draft_tokens),
            fix="0 is plain decoding",
        )


def _bad_table(expected: str, found: str) -> UsageError:
    fix = "write [[first, last, K], ...] as for vLLM's num_speculative_tokens_per_batch_size"
    return UsageError("batch-size table", expected=expected, found=found, fix=fix)


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
    _check_length(num_draft_tokens)
    policy, outcomes = _chain_policy(num_draft_tokens), chain_outcomes(log, num_draft_tokens)
    return join_walked(policy, [walk_outcomes(policy, log.positions, outcomes)])


def replay_oracle(log: AcceptedLengths) -> Rounds:
    """Every round of the chain that drafts exactly what will be accepted.

    As many calls as the deepest logged chain, and no draft token rejected. It never drafts past
    what the log offered; rounds cut there are counted as censored. Its `policy` is the chain of
    the logged depth (up to `MAX_DEPTH`), whose rounds these are; it drafts and verifies less.
    """
    policy, positions = _chain_policy(min(log.offered_depth, MAX_DEPTH)), log.positions
    visited, first = walk(positions, log.accepted + 1), positions.start[:-1]
    calls = np.add.reduceat(visited, first, dtype=np.float64)
    tokens = calls + np.add.reduceat(np.where(visited, log.accepted, 0), first)
    bounds = RequestBounds(calls, calls, tokens, tokens)
    outcomes = chain_outcomes(log, None, np.flatnonzero(visited))
    return join_walked(policy, [WalkedPart(positions, visited, outcomes, bounds)])


def chain_outcomes(
    log: AcceptedLengths, num_draft_tokens: int | None, rows: slice | Longs = slice(None)
) -> Outcomes:
    """A chain at some positions; None for the oracle's.

    In a chain the deepest accepted token's rank is its depth. An accepted length tells how a
    longer chain would have fared wherever it ended early, so an expansion is missing only at the
    censored rounds.
    """
    depth, remaining = log.offered_depth, log.positions.remaining[rows]
    accepted = log.accepted[rows]
    is_censored = (accepted >= depth) & (accepted < remaining)

    def everywhere(value: int) -> Ints:
        """`[R]`, of which nothing is copied."""
        return np.broadcast_to(np.int32(value), remaining.shape)

    high, drafted, missing = accepted, accepted, everywhere(0)
    if num_draft_tokens is None:
        missing = is_censored.astype(np.int32)
        verified, expanded = drafted + 1, np.maximum(drafted - 1, 0)
    else:
        accepted = high = np.minimum(accepted, num_draft_tokens)
        drafted, verified = everywhere(num_draft_tokens), everywhere(num_draft_tokens + 1)
        expanded = everywhere(max(num_draft_tokens - 1, 0))
        if num_draft_tokens > depth:
            high = np.where(is_censored, np.minimum(num_draft_tokens, remaining), accepted)
            missing = np.where(is_censored, np.int32(num_draft_tokens - depth), np.int32(0))
    return Outcomes(
        accepted=accepted,
        low=accepted,
        high=high,
        verified=verified,
        drafted=drafted,
        levels=drafted,
        expanded=expanded,
        tcr=accepted,
        wanted=np.maximum(drafted, missing),
        missing=missing,
        censored=(missing > 0).astype(np.int32),
        bins=everywhere(-1),
    )


def _chain_policy(num_draft_tokens: int) -> Policy:
    shape = Chain(num_draft_tokens=num_draft_tokens) if num_draft_tokens else RootOnly()
    return Policy(shape=shape)


# ----------------------------------------------------------------- in waves


def wave_figures(
    log: AcceptedLengths,
    schedule: ChainSchedule,
    *,
    batch_size: int = 1,
    clock: CostModel | None = None,
) -> dict[str, Any]:
    """Totals of a run in waves, as `replay.json` has them.

    Args:
        batch_size: requests that start together.
        clock: a cost model; `time_us` is that of all steps, prompts' reading excluded, and None
            without a clock.

    Returns:
        Besides what the names say: `num_tokens` emitted by rounds, so without the one that each
        prompt's reading gives; `calls`, target verifications, counted once a request, and
        `num_steps`, batched forwards; `histogram`, rounds by accepted draft tokens, from 0 on;
        `num_censored`, rounds that a deeper log might have let accept more. Bounds are for replay
        without a batch: where the length follows the batch, a longer acceptance changes who meets
        later.
    """
    check_batch_size(batch_size)
    submissions, positions = schedule.submissions(log), log.positions
    verify = submissions.verification(PerRequest(), batch_size)
    loop = BatchLoop(positions, np.arange(positions.num_requests), verify, batch_size)
    rounds = run_closed(loop, in_waves=True)
    calls, drafted = len(rounds.row), rounds.verified - 1
    past: Bools = (
        drafted >= log.offered_depth if schedule.is_oracle else drafted > log.offered_depth
    )
    num_drafted, num_accepted = int(drafted.sum()), int(rounds.accepted.sum())
    num_tokens = int(positions.remaining[positions.start[:-1]].sum())
    num_censored = int((log.is_censored[rounds.row] & past).sum())
    time_us: float | None = None
    if clock is not None:
        time_us = float(np.sum(clock.round_us(steps_of_batch(submissions, rounds, "ragged"))))
    return {
        "batch_size": batch_size,
        "num_requests": positions.num_requests,
        "num_tokens": num_tokens,
        "calls": calls,
        "num_steps": len(rounds.first),
        "verified_tokens": calls + num_drafted,
        "num_drafted": num_drafted,
        "num_accepted": num_accepted,
        "histogram": np.bincount(rounds.accepted).tolist(),
        "num_censored": num_censored,
        "time_us": time_us,
        "mean_acceptance_length": 1 + num_accepted / calls,
        "tokens_per_s": None if time_us is None else 1e6 * num_tokens / time_us,
        "draft_utilisation": num_accepted / num_drafted if num_drafted else None,
        "censored_share": num_censored / calls,
        "is_marked": 1 - num_censored / calls < MARKED_BELOW,
    }


@dataclass(frozen=True)
class WavesResult:
    """Totals of chains over one import.

    Attributes:
        facts: import, drafters, cost model; plain JSON values.
        baseline: label of the policy that the others are compared with.
        k_table: as it was given; None without one.
        runs: `wave_figures` by label.
    """

    facts: dict[str, Any]
    caption: Caption
    baseline: str
    batch_size: int
    k_table: str | None
    runs: Mapping[str, dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        load = {"batch_size": self.batch_size, "order": "waves", "k_table": self.k_table}
        policies = [
            {"policy": label, **run, "against": self._against(run)}
            for label, run in self.runs.items()
        ]
        head = {"kind": "replay-waves", **self.facts, "load": load, "baseline": self.baseline}
        return {**head, "policies": policies}

    def _against(self, run: dict[str, Any]) -> dict[str, float]:
        """Ratios to the baseline's; times only with a cost model."""
        base = self.runs[self.baseline]
        compared = {"calls": "calls", "verified": "verified_tokens", "time_us": "time_us"}
        return {n: run[of] / base[of] for n, of in compared.items() if base[of] is not None}

    def shown(self) -> list[Any]:
        """The table, then notes."""
        from rich.text import Text

        base = self.runs[self.baseline]
        timed = ["tokens/s", "time ×"] if base["time_us"] is not None else []
        names = ["steps", "calls", "verified", "τ", "calls ×", "verified ×", *timed]
        title = (
            f"{self.caption.subject}: {base['num_requests']} requests, {base['num_tokens']} "
            f"tokens, batch size {self.batch_size}, {self.caption.sampling}"
        )
        rows = [self._cells(label, run) for label, run in self.runs.items()]
        table = terminal_table(title, ["policy", *names, "use", "censored"], rows)
        marked = [(label, run) for label, run in self.runs.items() if run["is_marked"]]
        notes = [
            f"× is relative to {self.baseline}.",
            f"Waves: requests in file order, {self.batch_size} at a time, each wave until it is "
            "empty. Totals of one order, so without intervals; time is that of rounds, prompts' "
            "reading excluded.",
            *(
                f"* {label}: {run['censored_share']:.1%} of its rounds run out of the log, so it "
                f"may need fewer calls than shown. {self.caption.advice}"
                for label, run in marked
            ),
            *self.caption.remarks,
        ]
        return [table, *map(Text, notes)]

    def _cells(self, label: str, run: dict[str, Any]) -> list[str]:
        ratios, use = self._against(run), run["draft_utilisation"]
        timed = []
        if run["tokens_per_s"] is not None:
            timed = [f"{run['tokens_per_s']:.0f}", f"{ratios['time_us']:.3f}"]
        return [
            label + ("*" if run["is_marked"] else ""),
            str(run["num_steps"]),
            str(run["calls"]),
            str(run["verified_tokens"]),
            f"{run['mean_acceptance_length']:.3f}",
            f"{ratios['calls']:.3f}",
            f"{ratios['verified']:.3f}",
            *timed,
            "-" if use is None else f"{use:.0%}",
            f"{run['censored_share']:.2%}",
        ]


# ----------------------------------------------------------------- the verb


def replay_import(
    log: ImportedLog,
    config: ReplayConfig,
    model: CostModel | None = None,
    *,
    progress: ShowProgress = no_progress,
) -> Result:
    """Scores chains on imported acceptance: one request at a time, or in waves.

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
    drafters = config.drafters or log.drafters
    candidates = candidates_of(drafters, config)
    baseline = _label(drafters[0], config.specs[config.baseline - 1])
    facts, caption = _facts(log, drafters, model), _caption(log, drafters)
    in_waves = config.batch_size > 1 or config.k_table is not None
    if in_waves:
        refuse_ignored(
            {"--by-category": config.by_category},
            expected="requests replayed one at a time",
            found="batches, which mix categories",
        )
    rounds: dict[str, Rounds] = {}
    waves: dict[str, dict[str, Any]] = {}
    with progress("policies", len(candidates)) as tick:
        for label, (drafter, schedule) in candidates.items():
            lengths = log.lengths(drafter)
            if in_waves:
                waves[label] = wave_figures(
                    lengths, schedule, batch_size=config.batch_size, clock=model
                )
            elif schedule.is_oracle:
                rounds[label] = replay_oracle(lengths)
            else:
                rounds[label] = replay_chain(lengths, schedule.entries[0][2])
            tick()
    if in_waves:
        return WavesResult(facts, caption, baseline, config.batch_size, config.k_table, waves)
    scored = score(
        list(rounds),
        list(rounds.values()),
        clock=None if model is None else replay_clock(model),
        baseline=list(rounds).index(baseline),
        seed=config.seed,
    )
    scores = ImportScores(kind="replay", **facts, baseline=baseline, policies=tuple(scored))
    return ReplayResult(scores, caption, by_category=config.by_category)


def candidates_of(
    drafters: Sequence[str], config: ReplayConfig
) -> dict[str, tuple[str, ChainSchedule]]:
    """Every policy for every drafter by label; plain decoding once, it has no drafter."""
    schedules = {spec: schedule_of(spec) for spec in config.specs}
    if config.k_table is not None:
        schedules[TABLE] = ChainSchedule.parse(config.k_table)
    specs = [*config.specs, *([TABLE] if config.k_table is not None else ())]
    found = [
        (_label(drafter, spec), (drafter, schedules[spec]))
        for spec in specs
        for drafter in (drafters[:1] if spec == PLAIN else drafters)
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


def schedule_of(spec: str) -> ChainSchedule:
    """How long the chains of a named policy are."""
    if spec == ORACLE:
        return ChainSchedule()
    words, _, budget = spec.partition("+")
    named = resolve_policy(words)
    shape = named.policy.shape
    if named.artifact_digest is not None:
        found = "an artifact, fitted on a pair that an import does not name"
    elif budget or not isinstance(shape, Chain | RootOnly):
        found = "one that looks at more than accepted lengths"
    else:
        return ChainSchedule.fixed(shape.num_draft_tokens if isinstance(shape, Chain) else 0)
    raise UsageError(
        f"policy {spec!r} on imported traces",
        expected=f"ar, chain:num_draft_tokens=K or {ORACLE}: an import holds how far one chain was "
        "accepted, no tree and no probability",
        found=found,
        fix="replay it on dense traces: specctl collect --dense",
    )


def _label(drafter: str, spec: str) -> str:
    return spec if spec == PLAIN else f"{drafter}/{spec}"


def _facts(log: ImportedLog, drafters: Sequence[str], model: CostModel | None) -> dict[str, Any]:
    """What the scores hold for; an import names no models."""
    from specctl import __version__

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
        share = sum(drafter.misaligned.values()) / max(drafter.num_entries, 1)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(drafter.misaligned.items()))
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
