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
from specctl.logs.trace_set import TraceSet
from specctl.policy import Policy
from specctl.replay.config import TuneConfig
from specctl.replay.cost.files import decision_facts
from specctl.replay.facts import ResultRecord, to_time
from specctl.replay.tune.tuning import prepare
from specctl.stats import (
    MIN_PROMPTS,
    UNKNOWN,
    Interval,
    Resamples,
    first_over_second,
    split_prompts,
)
from specctl.watch.recalibrate import compare
from specctl.watch.signals import COLUMNS, Prompts, read_prompts

HELD_OUT = 0.5


class Price(ResultRecord):
    """The cost of a change, on dense prompts."""

    num_prompts: int  # dense prompts since the change
    tokens_per_call: Interval = UNKNOWN
    tokens_per_call_kept: Interval = UNKNOWN  # over the prompts before
    static: str | None = None  # label of the best static setting
    static_over_deployed: Interval | None = None
    proviso: str | None = None  # what that takes for granted
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
        if self.static_over_deployed is not None:
            lines.append(
                f"{self.static}, the best static setting of some of them, is on the others "
                f"× {self.static_over_deployed.text('.2f')} as fast as the deployed policy"
                f"{self.proviso or ''}."
            )
        return [*lines, *([self.why_not] if self.why_not else [])]


def price(
    since: int,
    reference: Prompts,
    stream: Prompts,
    traces: TraceSet,
    policy: Policy,
    words: str,
    cost_model: Path | None = None,
) -> Price:
    """The cost of a change.

    Dense prompts since the change are found by their place in the stream; prompts that the stream
    lacks, by the time at which they were finished.

    Args:
        since: unit of the stream.
        reference: prompts before the watch.
        traces: dense traces of the traffic.
        words: of the policy, as the user named it.
        cost_model: None for counts alone.

    Raises:
        TraceError, UsageError, InputError: see `read_prompts` and `prepare`.
    """
    start = stream.start_of(since)
    try:
        dense = read_prompts(traces, policy)
    except TraceMismatchError as error:  # a drift verdict needs no price
        return Price(num_prompts=0, why_not=f"No price: {error.line}.")
    index = dict.fromkeys(reference.ids, -1) | {name: at for at, name in enumerate(stream.ids)}
    began = str(stream.finished[start])
    recent = [
        index[name] >= start if name in index else time >= began
        for name, time in zip(dense.ids, dense.finished, strict=True)
    ]
    found, num = dense.take(np.array(recent, bool)), sum(recent)
    if num < MIN_PROMPTS:
        few = f"too few to say what it costs ({MIN_PROMPTS} are needed)"
        why_not = f"Only {count(num, 'dense prompt')} since the change: {few}."
        return Price(num_prompts=num, why_not=why_not)
    before = np.concatenate([reference.sums, stream.take(slice(start)).sums])
    terms = [COLUMNS.index(name) for name in ("tokens", "calls")]
    sides = (found.sums[:, terms], before[:, terms])
    resamples = [Resamples.draw(len(side), seed=at) for at, side in enumerate(sides)]
    now, then = (
        first_over_second(draws.drawn(side)) for draws, side in zip(resamples, sides, strict=True)
    )
    counted = Price(
        num_prompts=num,
        tokens_per_call=resamples[0].read(now),
        tokens_per_call_kept=resamples[0].read(now / then),
    )
    if cost_model is None:
        in_time: dict[str, Any] = {"why_not": "Without --cost-model there are no times."}
    elif num < 2 * MIN_PROMPTS:
        few = "are too few to choose a static setting on and judge it"
        in_time = {"why_not": f"{num} dense prompts since the change {few}."}
    else:
        in_time = _in_time(traces, [str(name) for name in found.ids], policy, words, cost_model)
    return counted.model_copy(update=in_time)


def _in_time(
    traces: TraceSet, names: Sequence[str], policy: Policy, words: str, cost_model: Path
) -> dict[str, Any]:
    """The fields of a `Price` with times: one half of the prompts chooses a static setting, the
    other judges it."""
    try:
        tuning = prepare(traces, TuneConfig(held_out_frac=HELD_OUT), cost_model)
    except ClockError as error:
        return {"why_not": f"No price in time: {error.line}."}
    decisions = decision_facts(tuning.clock, {policy.name: (policy, words)})
    if decisions["without_decision_cost"]:
        how = to_time({**decisions, "target": traces.fingerprint.target})
        return {"why_not": f"No price in time: decisions of {policy.name} are not timed; {how}."}
    split = split_prompts(names, held_out_frac=HELD_OUT, seed=0)
    tuning = replace(tuning, search=replace(tuning.search, split=split))
    found = compare(tuning, policy, policy.name)
    if found.lacking:
        return {"why_not": f"No price in time: {found.lacking}."}
    return {
        "static": found.static,
        "static_over_deployed": found.against_deployed,
        "proviso": found.facts.provisos(policy.name) or None,
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
