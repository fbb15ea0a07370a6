"""The result of a replay: records, one JSON document, and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from specctl import formatting
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.replay.batch_figures import BatchFigures, BatchTotals
from specctl.replay.config import Engine
from specctl.replay.cost.files import clock_of, decision_facts
from specctl.replay.cost.model import CostModel
from specctl.replay.facts import MARKED_BELOW, TraceFacts
from specctl.replay.held_out import ScoredPrompts
from specctl.replay.score import PolicyFigures, PolicyScores
from specctl.runtime.words import NamedPolicy
from specctl.stats import Interval, intervals_over


class ReplayScores(TraceFacts):
    """`replay.json`: policies replayed one request at a time; `baseline` is a label."""

    kind: Literal["replay"]
    baseline: str
    policies: tuple[PolicyScores, ...] = Field(min_length=1)


class ServingScores(TraceFacts):
    """Figures of policies that serve one load."""

    kind: Literal["replay-serving"]
    load: dict[str, Any]
    baseline: str
    policies: tuple[BatchFigures, ...]


class BatchScores(TraceFacts):
    """Totals of policies over dense traces, in the order of the log."""

    kind: Literal["replay-batch"]
    load: dict[str, Any]
    baseline: str
    policies: tuple[BatchTotals, ...]


AnyScores = ReplayScores | ServingScores | BatchScores
Columns = dict[str, Callable[[Any], str]]
"""Headings, and how a row's cell is written."""


@dataclass(frozen=True)
class Result:
    """The result of a replay: one JSON value, a verdict, tables and sentences."""

    scores: AnyScores  # the record of `replay.json`
    verdict: str
    tables: list[formatting.Table]
    lines: list[str]  # below them

    def to_json(self) -> dict[str, Any]:
        """The content of `replay.json`."""
        return {"kind": self.scores.kind, **self.scores.to_json()}

    def shown(self) -> list[Any]:
        """The verdict, tables and sentences, top to bottom."""
        return [self.verdict, *self.tables, *self.lines]


def facts_of(
    traces: TraceSet,
    log: DenseLog,
    model: CostModel | None,
    named: Sequence[NamedPolicy],
    scored: ScoredPrompts,
) -> dict[str, Any]:
    """The fields of `TraceFacts`."""
    from specctl.version import __version__

    header, check = traces.header, None if model is None else model.failed_check
    return {
        "specctl_version": __version__,
        "traces_digest": log.digest,
        "target": header.collect.get("target", "unnamed"),
        "drafter": header.collect.get("drafter", "unnamed"),
        "target_digest": header.target_digest,
        "drafter_digest": header.drafter_digest,
        "sampling": header.sampling,
        "support": vars(log.support).copy(),
        "cost_model": None if model is None else model.digest,
        "clock": clock_of(model, traces.fingerprint),
        "time_error": None if model is None else model.time_error,
        "check_error": check and check.error,
        **decision_facts(model, {one.label: (one.policy, one.spec) for one in named}),
        **scored.facts,
    }


# ----------------------------------------------------------------- tables


def _name(scores: TraceFacts, figures: Any) -> str:
    """The policy with its marks."""
    return scores.marked(figures.policy) + ("*" if figures.is_marked else "")


def _range(figures: PolicyFigures, name: str, spec: str, over: float = 1.0) -> str | None:
    """The range of a figure if the log lacks expansions; else None."""
    if not figures.is_marked:
        return None
    bound = figures.bounds[name]
    low, high = (f"{end / over:{spec}}" for end in (bound.low, bound.high))
    return low if low == high else f"{low} to {high}"


def _against(figures: PolicyFigures, name: str, bound: str, count: int) -> str:
    """A ratio to the baseline: with its interval, or its range."""
    found = figures.against[name]
    baseline = count / found.value if found.value else math.nan
    return _range(figures, bound, ".2f", baseline) or found.text(".2f")


def _timed_figure(figures: PolicyFigures, found: Interval, spec: str) -> str:
    """A time; unknown if the log lacks expansions."""
    return "n/a" if figures.is_marked else found.text(spec)


SEQUENTIAL: Columns = {
    "calls": lambda f: _range(f, "calls", ".0f") or str(f.calls),
    "verified": lambda f: _range(f, "verified_tokens", ".0f") or str(f.verified_tokens),
    "τ": lambda f: _range(f, "mean_acceptance_length", ".2f") or f.tau.text(".2f"),
    "calls ×": lambda f: _against(f, "calls", "calls", f.calls),
    "verified ×": lambda f: _against(f, "verified", "verified_tokens", f.verified_tokens),
    "tokens/s": lambda f: _timed_figure(f, f.ratios["tokens_per_s"], ".0f"),
    "speed ×": lambda f: _timed_figure(f, _inverse(f.against["time_us"]), ".2f"),
    "use": lambda f: formatting.number(
        math.nan if f.is_marked else f.ratios["draft_utilisation"].value, ".0%"
    ),
    "support": lambda f: f"{f.expansion_support:.2%}",
}
TOTALS: Columns = {
    "steps": lambda f: str(f.num_steps),
    "calls": lambda f: str(f.calls),
    "drafts": lambda f: str(f.num_drafts),
    "drafted": lambda f: str(f.num_drafted),
    "accepted": lambda f: str(f.num_accepted),
    "τ": lambda f: f"{f.mean_acceptance_length:.3f}",
    "calls ×": lambda f: f"{f.against['calls']:.3f}",
    "verified ×": lambda f: f"{f.against['verified']:.3f}",
    "tokens/s": lambda f: f"{f.tokens_per_s:.0f}",
    "speed ×": lambda f: f"{1 / f.against['time_us']:.3f}",
    "use": lambda f: formatting.number(f.draft_utilisation, ".0%"),
    "support": lambda f: f"{f.expansion_support:.2%}",
}
TIMED = ("tokens/s", "speed ×")
"""Columns that need a cost model."""
WIDE = ("verified ×", "use", "support", "drafts", "drafted", "accepted")
WIDE_TIMED = (*WIDE, "verified", "calls ×")
WIDE_SERVING = ("TTFT p50", "verified", "batch", "support")
"""Columns that `--wide` adds."""
ENGINES: dict[Engine, str] = {
    "specctl": "requests join as slots free up",
    "vllm": "vLLM's batching: prompts share the rounds' forward, lengths follow a step later",
    "llamacpp": "llama.cpp's batching and texts' ends: prompts share the rounds' forward",
}
SERVING: dict[str, tuple[str, Callable[[Any], str]]] = {
    "tokens_per_s": ("tokens/s", lambda found: found.text(".0f")),
    "× tokens_per_s": ("×", lambda found: found.text(".2f")),
    "tpot_p50_us": ("TPOT p50", lambda found: formatting.number(found.value / 1e3)),
    "tpot_p99_us": ("p99", lambda found: formatting.number(found.value / 1e3)),
    "ttft_p50_us": ("TTFT p50", lambda found: formatting.number(found.value / 1e3)),
    "goodput_share": ("good", lambda found: formatting.number(found.value, ".0%")),
    "mean_acceptance_length": ("τ", lambda found: formatting.number(found.value)),
    "verified_per_step": ("verified", lambda found: formatting.number(found.value)),
    "requests_per_step": ("batch", lambda found: formatting.number(found.value)),
}
"""Shown figures of a load: heading, and how a cell is written."""


def _fastest(scores: AnyScores, found: dict[str, Interval | float]) -> str:
    """The verdict on speed: the fastest policy that can win, beside the baseline.

    Args:
        found: known speeds over the baseline's, by policy.
    """
    baseline = scores.baseline
    able = {name: gain for name, gain in found.items() if name != baseline and scores.can_win(name)}
    if not able or not scores.can_win(baseline):
        return f"No verdict on speed beside {scores.marked(baseline)}: see the notes."
    best = max(able, key=lambda name: _value(able[name]))
    gain = able[best]
    end = f"{scores.provisos(best, baseline)}."
    if isinstance(gain, float):
        return f"Fastest: {best}, × {gain:.2f} the speed of {baseline}{end}"
    if gain.low > 1:
        return f"Fastest: {best}, × {gain.text('.2f')} the speed of {baseline}{end}"
    if gain.high < 1:
        return f"{baseline} is the fastest for sure: next {best}, × {gain.text('.2f')}{end}"
    return f"No policy is faster than {baseline} for sure: {best} × {gain.text('.2f')}{end}"


def _value(gain: Interval | float) -> float:
    return gain if isinstance(gain, float) else gain.value


def fewest_calls(scores: AnyScores, figures: Sequence[Any]) -> str:
    """The verdict on calls, of the policies that the log holds and that are unseen.

    Beside the baseline it takes a ratio whose interval is clear of 1; totals have no interval.
    """
    known = [f for f in figures if not f.is_marked and scores.is_unseen(f.policy)]
    if not known:
        return "No verdict: the log lacks what these policies draft, or they were fitted on it."
    best = min(known, key=lambda f: f.calls)
    if not figures[1:]:
        return f"{best.policy}: {best.calls:,} calls for {best.num_tokens:,} tokens."
    base = next((f for f in known if f.policy == scores.baseline), None)
    others = [f for f in known if f is not base]
    if base is None or not others:
        return f"Fewest calls: {best.policy} {best.calls:,}."
    next_best = min(others, key=lambda f: f.calls)
    of_base, of_next = (f"{f.policy} {f.calls:,}" for f in (base, next_best))
    gain, end = next_best.against["calls"], ""
    if isinstance(gain, Interval) and not gain.is_bounded:
        end = "; too few prompts for an interval"
    elif isinstance(gain, Interval) and gain.low <= 1 <= gain.high:
        words = f"{of_next}, {of_base}, × {gain.text('.2f')}"
        return f"No policy needs fewer calls than {base.policy} for sure: {words}."
    pair = [of_base, of_next] if best is base else [of_next, of_base]
    return f"Fewest calls: {', '.join(pair)}{end}."


def _inverse(ratio: Interval) -> Interval:
    return Interval(1 / ratio.value, 1 / ratio.high, 1 / ratio.low)


def _table(
    scores: TraceFacts, title: str, columns: Columns, rows: Sequence[Any], wide: Sequence[str]
) -> formatting.Table:
    """One row a policy."""
    cells = [[_name(scores, row), *(write(row) for write in columns.values())] for row in rows]
    return formatting.Table(title, ["policy", *columns], cells, wide=wide)


def _unsupported(scores: TraceFacts, figures: Sequence[Any], so: str) -> list[str]:
    """Lines on policies that the log lacks expansions of: what follows, and what to do."""
    lines = []
    for f in figures:
        if not f.is_marked:
            continue
        reasons = []
        if f.expansion_support < MARKED_BELOW:
            lacking = 1 - f.expansion_support
            reasons.append(f"the log lacks {lacking:.1%} of the expansions that it wants")
        if 1 - f.censored_share < MARKED_BELOW:
            reasons.append(f"{f.censored_share:.1%} of its rounds leave the log")
        how = (scores.beyond_log or {}).get(f.policy, "collect with a larger --width")
        lines.append(f"* {f.policy}: {' and '.join(reasons)}{so}; {how}.")
    return lines


def replay_result(
    scores: ReplayScores, remarks: Sequence[str] = (), *, by_category: bool = False
) -> Result:
    """Scores of policies, replayed one request at a time.

    Args:
        remarks: further lines below the table.
        by_category: show a table for each category too.
    """
    pooled = [policy.pooled for policy in scores.policies]
    groups = [pooled]
    if by_category:
        groups += map(list, zip(*(policy.by_category for policy in scores.policies), strict=True))
    baseline = next(f for f in pooled if f.policy == scores.baseline)
    without = [name for name in SEQUENTIAL if "×" in name and baseline.is_marked]
    wide = WIDE if pooled[0].time_us is None else WIDE_TIMED
    tables = []
    for group in groups:
        first = group[0]
        where = "" if first.group == "all" else f"{first.group}: "
        title = (
            f"{formatting.pair_title(scores.target, scores.drafter)}\n{where}"
            f"{formatting.count(first.num_prompts, 'prompt')}, "
            f"{formatting.count(first.num_tokens, 'token')}, "
            f"{formatting.sampling(scores.sampling)}; {intervals_over(first.num_prompts)}"
        )
        hidden = without if first.time_us is not None else [*without, *TIMED]
        columns = {name: write for name, write in SEQUENTIAL.items() if name not in hidden}
        tables.append(_table(scores, title, columns, group, wide))
    timed = [f for f in pooled if f.time_us is not None and not f.is_marked]
    gains: dict[str, Interval | float] = {f.policy: _inverse(f.against["time_us"]) for f in timed}
    lines = [
        f"The log does not hold what {scores.baseline} does, so nothing is compared with it."
        if without
        else f"× is relative to {scores.marked(scores.baseline)}, paired by prompt.",
        *_times(scores),
        *scores.footnotes(),
        *_unsupported(scores, pooled, ", so its figures are ranges"),
        *remarks,
    ]
    verdict = _fastest(scores, gains) if timed and pooled[1:] else fewest_calls(scores, pooled)
    return Result(scores, verdict, tables, lines)


def _times(scores: TraceFacts) -> list[str]:
    return [] if scores.clock is None else [f"Times: {scores.clock}."]


def serving_result(scores: ServingScores, remarks: Sequence[str] = ()) -> Result:
    """Figures of policies that serve one load; ratios to the baseline are `× name`.

    Args:
        remarks: further lines below the table.
    """
    policies, rate = scores.policies, scores.load["arrival_rate_per_s"]
    arrivals = "closed loop" if rate is None else f"{rate:g} requests/s"
    first = policies[0]
    title = (
        f"{formatting.pair_title(scores.target, scores.drafter)}\n"
        f"batch size {first.batch_size}, {arrivals}, {formatting.sampling(scores.sampling)}; "
        f"{first.num_runs} runs of {first.num_requests} requests; "
        f"{intervals_over(first.num_prompts, 'prompt and run')}"
    )
    is_steady = all(figures.steady is not None for figures in policies)
    rows = []
    for f in policies:
        found: Any = {**((f.steady if is_steady else f.whole) or {})}
        found |= {f"× {name}": span for name, span in (f.against or {}).items()}
        names = [name for name in SERVING if name in found]
        cells = [SERVING[name][1](found[name]) for name in names]
        rows.append([_name(scores, f), *cells, f"{f.expansion_support:.2%}"])
    headings = ["policy", *(SERVING[name][0] for name in names), "support"]
    table = formatting.Table(title, headings, rows, wide=WIDE_SERVING)
    gains: dict[str, Interval | float] = {
        f.policy: f.against["tokens_per_s"] for f in policies if f.against and not f.is_marked
    }
    part = "without ramp-up and drain" if is_steady else "with ramp-up and drain"
    lines = [
        f"× is tokens/s relative to {scores.marked(scores.baseline)}, paired by prompt and run; "
        "TPOT and p99 are in ms.",
        *_times(scores),
        formatting.Detail(
            f"Simulated under the cost model, {part}; trees of a batch verified back to back; "
            f"{ENGINES[scores.load['engine']]}. TTFT is in ms; verified and batch are tokens and "
            "requests of a step."
        ),
        *scores.footnotes(),
        *_unsupported(scores, policies, ""),
        *remarks,
    ]
    verdict = _fastest(scores, gains)
    if not policies[1:]:
        verdict = f"{first.policy}: {formatting.number(found['tokens_per_s'], '.0f')} tokens/s."
    return Result(scores, verdict, [table], lines)


def totals_result(scores: BatchScores, remarks: Sequence[str] = ()) -> Result:
    """Totals of policies over a log in its order.

    Args:
        remarks: further lines below the table.
    """
    first, load = scores.policies[0], scores.load
    title = (
        f"{formatting.pair_title(scores.target, scores.drafter)}\n"
        f"{formatting.count(first.num_requests, 'request')}, {first.num_tokens:,} tokens, "
        f"batch size {load['batch_size']}, {formatting.sampling(scores.sampling)}"
    )
    timed = [f for f in scores.policies if f.time_us is not None and not f.is_marked]
    gains: dict[str, Interval | float] = {f.policy: 1 / f.against["time_us"] for f in timed}
    lines = [
        f"× is relative to {scores.marked(scores.baseline)}; totals of one run in the log's order, "
        "so without intervals.",
        *_times(scores),
        formatting.Detail(
            f"{ENGINES[load['engine']]}; drafts are the calls that verify draft tokens."
        ),
        *scores.footnotes(),
        *_unsupported(scores, scores.policies, ", so it may need fewer calls than shown"),
        *remarks,
    ]
    hidden = () if first.time_us is not None else TIMED
    columns = {name: write for name, write in TOTALS.items() if name not in hidden}
    has_verdict = timed and scores.policies[1:]
    verdict = _fastest(scores, gains) if has_verdict else fewest_calls(scores, scores.policies)
    table = _table(scores, title, columns, scores.policies, WIDE)
    return Result(scores, verdict, [table], lines)


KINDS: dict[str, tuple[type[AnyScores], Callable[[Any], Result]]] = {
    "replay": (ReplayScores, replay_result),
    "replay-serving": (ServingScores, serving_result),
    "replay-batch": (BatchScores, totals_result),
}
"""By `kind` of a `replay.json`: its record, and what shows it."""
