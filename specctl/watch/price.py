"""What a change costs: the deployed policy on recent dense traces, before it and since.

Live rows say what the policy did; only dense ones say what another would have done on the same
prompts. So of dense prompts since the likeliest change the deployed policy is replayed, beside the
best static setting, which some of them choose and the others judge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specctl.errors import ClockError, TraceMismatchError
from specctl.formatting import count
from specctl.logs.positions import Positions
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy import Policy
from specctl.policy.families import shape_family
from specctl.replay.config import ShowProgress, TuneConfig, no_progress
from specctl.replay.outcomes import text_columns
from specctl.replay.rounds import replay_chunk
from specctl.replay.tune.tuning import prepare
from specctl.stats import (
    MIN_PROMPTS,
    UNKNOWN,
    Floats,
    Interval,
    Resamples,
    first_over_second,
    split_prompts,
    sums_by,
)
from specctl.watch.drift import Drift
from specctl.watch.recalibrate import Recalibration, compare
from specctl.watch.signals import Prompts, read_prompts

HELD_OUT = 0.5


@dataclass(frozen=True)
class Price:
    """The cost of a change, as far as dense prompts tell.

    Attributes:
        num_prompts: dense ones since the change.
        tokens, tokens_kept: tokens per call on them, and over those of the prompts before.
        recall: of the draft tokens that their trees offer and the target accepts, in the policy's
            rounds, the share that it verified. recall_before: on the dense reference, if any.
        rate_kept: tokens/s on them over those on the dense reference; None without one, or without
            a cost model.
        static: the deployed policy beside the best static setting; None where that is not known.
        why_not: what could not be said, in words.
    """

    num_prompts: int
    tokens: Interval
    tokens_kept: Interval
    rate_kept: Interval | None
    static: Recalibration | None
    why_not: str
    recall: Interval = UNKNOWN
    recall_before: Interval | None = None

    def to_json(self) -> dict[str, Any]:
        rate, static = self.rate_kept, self.static
        return {
            "num_prompts": self.num_prompts,
            "tokens_per_call": self.tokens.to_json(),
            "tokens_per_call_kept": self.tokens_kept.to_json(),
            "recall": self.recall.to_json(),
            "recall_before": None if self.recall_before is None else self.recall_before.to_json(),
            "rate_kept": None if rate is None else rate.to_json(),
            "static": None if static is None else static.static,
            "static_over_deployed": None if static is None else static.against_deployed.to_json(),
            "why_not": self.why_not or None,
            "words": self.shown(),
        }

    def shown(self) -> list[str]:
        """For a person."""
        lines = []
        if self.tokens.known:
            lines.append(
                f"On {count(self.num_prompts, 'dense prompt')} since: tokens per call "
                f"{self.tokens.text('.2f')}, × {self.tokens_kept.text('.2f')} of before."
            )
        if self.recall.known:
            known = self.recall_before
            before = "" if known is None else f", {known.text('.2f')} on the dense reference"
            lines.append(
                "Recall of its gates and limits (of the offered tokens that the target accepts, "
                f"the share that it verified): {self.recall.text('.2f')}{before}."
            )
        if self.rate_kept is not None:
            lines.append(f"Speed by the cost model: × {self.rate_kept.text('.2f')} of before.")
        if self.static is not None:
            lines.append(
                f"{self.static.static}, the best static setting of some of them, is on the others "
                f"× {self.static.against_deployed.text('.2f')} as fast as the deployed policy."
            )
        return [*lines, *([self.why_not] if self.why_not else [])]


def price(
    drift: Drift,
    reference: Prompts,
    traces: TraceSet,
    policy: Policy,
    *,
    before: TraceSet | None = None,
    cost_model: Path | None = None,
    progress: ShowProgress = no_progress,
    warn: Callable[[str], None] = lambda _: None,
) -> Price:
    """What the likeliest change costs.

    Dense prompts since it are those of the stream, by their names, and others by the time at which
    they were finished.

    Args:
        reference: prompts before the watch. before: their traces, None for the traffic's own; a
            speed is told of dense ones.
        traces: dense, of the traffic. cost_model: None for counts alone.

    Raises:
        TraceError, UsageError, InputError: see `read_prompts` and `prepare`.
    """
    stream = drift.stream
    since = stream.start_of(drift.foremost.since)
    try:
        dense = read_prompts(traces, policy)
    except TraceMismatchError as error:  # the alarm stands without a price
        return Price(0, UNKNOWN, UNKNOWN, None, None, f"No price: {error}.")
    index = dict.fromkeys(reference.ids, -1) | {name: at for at, name in enumerate(stream.ids)}
    start = str(stream.finished[since])
    recent = np.array(
        [
            index[name] >= since if name in index else time >= start
            for name, time in zip(dense.ids, dense.finished, strict=True)
        ]
    )
    found, num = dense.take(recent), int(recent.sum())
    ours, theirs = (
        _terms(found),
        np.concatenate([_terms(reference), _terms(stream.take(slice(since)))]),
    )
    tokens = Resamples.draw(num, seed=0).interval(ours, first_over_second) if num else UNKNOWN
    one = Price(num, tokens, _over(ours, theirs, first_over_second), None, None, "")
    names = [str(name) for name in found.ids]
    one = replace(one, recall=_recall(traces, policy, names))
    if before is not None and "dense" in before.header.collect:
        one = replace(one, recall_before=_recall(before, policy, before.prompt_ids))
    if num < MIN_PROMPTS:
        few = f"Only {count(num, 'dense prompt')} since the change: too few to say what it costs "
        return replace(one, why_not=f"{few}({MIN_PROMPTS} are needed).")
    if cost_model is None:
        return replace(one, why_not="Without --cost-model nothing is said of time.")
    if num < 2 * MIN_PROMPTS:
        few = f"{num} dense prompts since the change are too few to choose a static setting on"
        return replace(one, why_not=f"{few} and judge it.")
    split = split_prompts(names, held_out_frac=HELD_OUT, seed=0)
    try:
        tuning = prepare(traces, TuneConfig(held_out_frac=HELD_OUT), cost_model, warn=warn)
    except ClockError as error:
        return replace(one, why_not=f"Nothing is said of time: {error}.")
    tuning = replace(tuning, search=replace(tuning.search, split=split))
    with progress("scorings", tuning.num_scorings) as tick:
        static = compare(tuning, policy, policy.name, on_setting=tick)
    if static.lacking:
        return replace(one, why_not=f"No price in time: {static.lacking}.")
    kept = None
    if before is not None and "dense" in before.header.collect:
        rate, evaluate = tuning.search.objective.rate, tuning.evaluator
        [now] = evaluate([policy], names)
        known = replace(evaluate, log=DenseLog.open(before))
        [then] = known([policy], before.prompt_ids)
        kept = _over(now.sums, then.sums, rate)
    return replace(one, rate_kept=kept, static=static)


def check_pair(traces: TraceSet, served: TraceSet, option: str) -> TraceSet:
    """Refuses traces of another pair, or of texts of another length, than the traffic's.

    Raises:
        TraceMismatchError: naming the option.
    """
    ours, theirs = (one.fingerprint for one in (served, traces))
    for role in ("target_digest", "drafter_digest"):
        if getattr(ours, role) != getattr(theirs, role):
            raise TraceMismatchError(
                f"{option}, {role}: expected {getattr(ours, role)}, as in the traces of the "
                f"traffic, found {getattr(theirs, role)}",
                hint="name traces of the pair that serves",
            )
    limits = [
        {str(one.collect.get("max_new_tokens")) for one in of.headers} for of in (served, traces)
    ]
    if len(limits[0] | limits[1]) > 1:
        shown = [" and ".join(sorted(of)) for of in limits]
        raise TraceMismatchError(
            f"{option}, max_new_tokens: expected {shown[0]}, as in the traces of the traffic, "
            f"since the length of a text moves every figure, found {shown[1]}",
            hint=f"name traces of the same limit: specctl collect --max-new-tokens {shown[0]}",
        )
    return traces


def _recall(traces: TraceSet, policy: Policy, prompts: Sequence[str]) -> Interval:
    """Of the draft tokens that the trees of a dense log offer and the target accepts, where the
    policy's rounds begin, the share that it verified; of some prompts."""

    def counted(chunk: LogChunk) -> tuple[Positions, Floats]:
        run = replay_chunk(policy, chunk, with_bounds=False)
        offered = np.minimum(chunk.matched[run.visited], run.remaining)
        kept = np.minimum(run.outcomes.accepted, offered)
        prompt, num = run.positions.prompt[run.request], len(run.positions.prompt_ids)
        return run.positions, sums_by(prompt, num, [kept, offered])

    log, sums = DenseLog.open(traces).only(prompts), dict[str, Any]()
    reads: Any = {
        "with_entropy": shape_family(policy.shape).reads_entropy,
        "extra": text_columns([policy]),
    }
    for positions, rows in log.each(counted, **reads):
        for name, row in zip(positions.prompt_ids, rows, strict=True):
            sums[name] = sums.get(name, 0.0) + row
    if not sums:
        return UNKNOWN
    return Resamples.draw(len(sums), seed=0).interval(np.stack([*sums.values()]), first_over_second)


def _terms(prompts: Prompts) -> Floats:
    """`[P, 2]` tokens and calls."""
    return np.stack([prompts.column(name) for name in ("tokens", "calls")], 1)


def _over(ours: Floats, theirs: Floats, figure: Any) -> Interval:
    """A figure of some prompts over that of others, which are independent of them."""
    if not len(ours):
        return UNKNOWN
    sides = [Resamples.draw(len(one), seed=at) for at, one in enumerate((ours, theirs))]
    mine, other = (draws.drawn(one) for draws, one in zip(sides, (ours, theirs), strict=True))
    is_enough = all(draws.is_enough for draws in sides)
    return replace(sides[0], is_enough=is_enough).read(figure(mine) / figure(other))
