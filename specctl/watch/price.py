"""The cost of a change: the deployed policy on recent dense traces, before the change and since.

Live rows record what the policy did; dense rows also show what another would have done on the same
prompts. So the deployed policy is replayed on dense prompts since the likeliest change, and
compared with the best static setting, chosen on some of them and judged on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specctl.errors import ClockError, TraceMismatchError
from specctl.formatting import count
from specctl.logs.positions import Positions
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, LogChunk, map_chunks
from specctl.policy import Policy
from specctl.policy.families import shape_family
from specctl.replay.config import TuneConfig
from specctl.replay.facts import ResultRecord
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
from specctl.watch.recalibrate import compare
from specctl.watch.signals import Prompts, read_prompts

HELD_OUT = 0.5


class Price(ResultRecord):
    """The cost of a change, on dense prompts."""

    num_prompts: int  # dense prompts since the change
    tokens_per_call: Interval = UNKNOWN
    tokens_per_call_kept: Interval = UNKNOWN  # over the prompts before
    recall: Interval = UNKNOWN
    """Share that the policy verified of the offered draft tokens that the target accepts."""
    recall_before: Interval | None = None  # on the dense reference, if any
    rate_kept: Interval | None = None
    """Tokens/s since over tokens/s on the dense reference; None without it or a cost model."""
    static: str | None = None  # label of the best static setting
    static_over_deployed: Interval | None = None
    why_not: str | None = None  # reason for missing figures

    def shown(self) -> list[str]:
        """Lines for the terminal."""
        lines = []
        if self.tokens_per_call.known:
            lines.append(
                f"On {count(self.num_prompts, 'dense prompt')} since: tokens per call "
                f"{self.tokens_per_call.text('.2f')}, × "
                f"{self.tokens_per_call_kept.text('.2f')} of before."
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
        if self.static_over_deployed is not None:
            lines.append(
                f"{self.static}, the best static setting of some of them, is on the others "
                f"× {self.static_over_deployed.text('.2f')} as fast as the deployed policy."
            )
        return [*lines, *([self.why_not] if self.why_not else [])]


def price(
    since: int,
    reference: Prompts,
    stream: Prompts,
    traces: TraceSet,
    policy: Policy,
    *,
    before: TraceSet | None = None,
    cost_model: Path | None = None,
) -> Price:
    """The cost of a change.

    Dense prompts since the change are found by their place in the stream; prompts that the stream
    lacks, by the time at which they were finished.

    Args:
        since: unit of the stream.
        reference: prompts before the watch.
        traces: dense traces of the traffic.
        before: traces of the reference, None for the traffic's own; a speed needs dense ones.
        cost_model: None for counts alone.

    Raises:
        TraceError, UsageError, InputError: see `read_prompts` and `prepare`.
    """
    start = stream.start_of(since)
    try:
        dense = read_prompts(traces, policy)
    except TraceMismatchError as error:  # a drift verdict needs no price
        return Price(num_prompts=0, why_not=f"No price: {error}.")
    index = dict.fromkeys(reference.ids, -1) | {name: at for at, name in enumerate(stream.ids)}
    began = str(stream.finished[start])
    recent = np.array(
        [
            index[name] >= start if name in index else time >= began
            for name, time in zip(dense.ids, dense.finished, strict=True)
        ]
    )
    found, num = dense.take(recent), int(recent.sum())
    ours = _terms(found)
    theirs = np.concatenate([_terms(reference), _terms(stream.take(slice(start)))])
    names = [str(name) for name in found.ids]
    is_dense = before is not None and "dense" in before.header.collect
    one = Price(
        num_prompts=num,
        tokens_per_call=Resamples.draw(num).interval(ours, first_over_second) if num else UNKNOWN,
        tokens_per_call_kept=_over(ours, theirs, first_over_second),
        recall=_recall(traces, policy, names),
        recall_before=_recall(before, policy, before.prompt_ids) if before and is_dense else None,
    )
    why_not = None
    if num < MIN_PROMPTS:
        few = f"too few to say what it costs ({MIN_PROMPTS} are needed)"
        why_not = f"Only {count(num, 'dense prompt')} since the change: {few}."
    elif cost_model is None:
        why_not = "Without --cost-model there are no times."
    elif num < 2 * MIN_PROMPTS:
        few = "are too few to choose a static setting on and judge it"
        why_not = f"{num} dense prompts since the change {few}."
    if why_not is not None:
        return one.model_copy(update={"why_not": why_not})
    in_time = _in_time(traces, names, policy, before if is_dense else None, cost_model)
    return one.model_copy(update=in_time)


def _in_time(
    traces: TraceSet, names: Sequence[str], policy: Policy, before: TraceSet | None, cost: Any
) -> dict[str, Any]:
    """The fields of a `Price` with times: one half of the prompts chooses a static setting, the
    other judges it."""
    try:
        tuning = prepare(traces, TuneConfig(held_out_frac=HELD_OUT), cost)
    except ClockError as error:
        return {"why_not": f"No price in time: {error}."}
    split = split_prompts(names, held_out_frac=HELD_OUT, seed=0)
    tuning = replace(tuning, search=replace(tuning.search, split=split))
    static = compare(tuning, policy, policy.name)
    if static.lacking:
        return {"why_not": f"No price in time: {static.lacking}."}
    kept = None
    if before is not None:
        [now] = tuning.evaluator([policy], names)
        known = replace(tuning.evaluator, log=DenseLog.open(before))
        [then] = known([policy], before.prompt_ids)
        ours, theirs = (
            np.stack([sums.columns["decoded"], sums.columns["request_us"]], 1)
            for sums in (now, then)
        )
        kept = _over(ours, theirs, first_over_second)
    return {
        "rate_kept": kept,
        "static": static.static,
        "static_over_deployed": static.against_deployed,
    }


def check_pair(traces: TraceSet, served: TraceSet, option: str) -> TraceSet:
    """Returns the traces; `TraceMismatchError` if their pair or limit of texts is another."""
    ours, theirs = (one.fingerprint for one in (served, traces))
    for role in ("target_digest", "drafter_digest"):
        if getattr(ours, role) != getattr(theirs, role):
            raise TraceMismatchError(
                f"the {role} of {option} is {getattr(theirs, role)}, but the traffic's is "
                f"{getattr(ours, role)}",
                hint="name traces of the pair that serves",
            )
    limits = [
        {str(one.collect.get("max_new_tokens")) for one in of.headers} for of in (served, traces)
    ]
    if len(limits[0] | limits[1]) > 1:
        shown = [" and ".join(sorted(of)) for of in limits]
        raise TraceMismatchError(
            f"{option} has max_new_tokens {shown[1]}, the traffic {shown[0]}: every figure depends "
            "on the length of texts",
            hint=f"name traces of the same limit: specctl collect --max-new-tokens {shown[0]}",
        )
    return traces


def _recall(traces: TraceSet, policy: Policy, prompts: Sequence[str]) -> Interval:
    """Share that a policy verified of the draft tokens that a dense log offers and the target
    accepts, over the policy's rounds of some prompts."""

    def counted(chunk: LogChunk) -> tuple[Positions, Floats]:
        run = replay_chunk(policy, chunk, with_bounds=False)
        offered = np.minimum(chunk.matched[run.visited], run.remaining)
        kept = np.minimum(run.outcomes.accepted, offered)
        prompt, num = run.positions.prompt[run.request], len(run.positions.prompt_ids)
        return run.positions, sums_by(prompt, num, [kept, offered])

    part, sums = DenseLog.open(traces).only(prompts), dict[str, Any]()
    reads: Any = {
        "with_entropy": shape_family(policy.shape).reads_entropy,
        "extra": text_columns([policy]),
    }
    for positions, rows in map_chunks(part, counted, **reads):
        for name, row in zip(positions.prompt_ids, rows, strict=True):
            sums[name] = sums.get(name, 0.0) + row
    if not sums:
        return UNKNOWN
    return Resamples.draw(len(sums)).interval(np.stack([*sums.values()]), first_over_second)


def _terms(prompts: Prompts) -> Floats:
    """`[P, 2]` tokens and calls per prompt."""
    return np.stack([prompts.column(name) for name in ("tokens", "calls")], 1)


def _over(ours: Floats, theirs: Floats, figure: Any) -> Interval:
    """A figure of some prompts over that of other, independent prompts."""
    if not len(ours):
        return UNKNOWN
    sides = [Resamples.draw(len(one), seed=at) for at, one in enumerate((ours, theirs))]
    mine, other = (draws.drawn(one) for draws, one in zip(sides, (ours, theirs), strict=True))
    is_enough = all(draws.is_enough for draws in sides)
    return replace(sides[0], is_enough=is_enough).read(figure(mine) / figure(other))
