"""Whether a deployed policy still fits its traffic: an alarm over every signal of its prompts.

Each signal is a bet of its own (`watch.alarm`). Groups share the stake equally, and so do the
signals of a group. A mean of fair wealths is fair. The alarm rings when the mean reaches 1/alpha,
so it rings with probability at most alpha while nothing changes, over the whole watch, however
often it is read and however the signals depend on each other.

A signal moved if its own wealth reached 1/alpha and the intervals of its figures before and since
do not overlap. This explains an alarm; the bound holds for the alarm only.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specctl.artifacts import PairFingerprint
from specctl.errors import TraceEmptyError, UsageError
from specctl.formatting import Detail, Table, count, number
from specctl.logs.positions import Floats
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import support_of
from specctl.policy import as_chain
from specctl.replay.facts import ResultRecord
from specctl.replay.outcomes import check_replayable
from specctl.runtime.words import resolve_policy
from specctl.stats import MIN_PROMPTS, Interval, Number, Resamples, first_over_second
from specctl.watch.alarm import LEAST_ALPHA, likeliest_change, p_values, wealth
from specctl.watch.price import Price, check_pair, price
from specctl.watch.signals import REST, Prompts, Terms, in_units, over, read_prompts, watched

CURVE_POINTS = 200
"""Points of the evidence curve in JSON."""


class DriftPrompt(ResultRecord):
    """A unit of the watch."""

    index: int  # from 0
    prompt_id: str  # of its first prompt
    finished: str | None  # when that was finished, UTC

    @classmethod
    def of(cls, stream: Prompts, index: int) -> DriftPrompt:
        at = stream.start_of(index)
        finished = str(stream.finished[at]) or None
        return cls(index=index, prompt_id=str(stream.ids[at]), finished=finished)

    def __str__(self) -> str:
        return f"{self.index + 1}" + (f" ({self.finished} UTC)" if self.finished else "")


class DriftSignal(ResultRecord):
    """A signal before and since the likeliest start of its change."""

    group: str
    signal: str
    moved: bool
    wealth: Number  # of the bets on it alone, at the end
    most_wealth: Number
    since: DriftPrompt
    before: Interval  # in the reference, and in the stream before `since`
    after: Interval  # in the stream from `since` on


class DriftEvidence(ResultRecord):
    """The evidence over the watch."""

    index: tuple[int, ...]  # units
    log10: dict[str, tuple[Number, ...]]  # of the wealth at these units, by group and for `all`


class Drift(ResultRecord):
    """The outcome of a watch over units of prompts."""

    alarm: bool
    alpha: float  # bound on the probability of a false alarm
    unit: str  # of `signals.UNITS`
    num_reference: int
    num_units: int
    num_prompts: int
    wealth: Number  # of all bets, at the end
    most_wealth: Number
    alarm_at: DriftPrompt | None
    evidence: DriftEvidence
    signals: tuple[DriftSignal, ...]  # most evidence first

    @property
    def moved(self) -> tuple[DriftSignal, ...]:
        """Signals that moved."""
        return tuple(signal for signal in self.signals if signal.moved)

    @property
    def foremost(self) -> DriftSignal:
        """The signal with most evidence; if any moved, of the moved ones."""
        return (*self.moved, *self.signals)[0]

    def shown(self) -> list[Any]:
        """Text and tables for the terminal."""
        units = f"{count(self.num_units, self.unit)} against {self.num_reference} of the reference"
        if self.alarm_at is None:
            evidence = f"evidence {_digits(self.wealth)}, alarm at {1 / self.alpha:g}"
            parts: list[Any] = [f"No alarm: {units} ({evidence})."]
        else:
            parts = [f"ALARM at {self.unit} {self.alarm_at}: {units}."]
        if self.moved:
            columns = {
                "signal": "signal",
                f"since {self.unit}": "since",
                "before": "before:.3f",
                "since": "after:.3f",
                "evidence": "most_wealth:.3g",
            }
            table = Table.of("", self.moved, columns)
            parts.append(replace(table, left=2, wide=("evidence",)))
        elif self.alarm_at is not None:
            parts.append(
                "No signal moved by itself and by more than its interval; most evidence, "
                f"{_digits(self.foremost.most_wealth)}, is of {self.foremost.signal}."
            )
        if self.alarm_at is not None and self.unit == "prompt":
            parts.append(
                "Traffic that swings with the hour or comes in conversations rings by prompt "
                "without a change: watch it by --unit hour, day or conversation."
            )
        still = [
            f"{one.signal} {number(one.before.value, '.3g')}"
            for one in self.signals
            if not one.moved
            and one.before.known
            and (one.signal != f"category {REST}" or one.before.value or one.after.value)
        ]
        return [
            *parts,
            f"False alarm: probability {self.alpha:g} at most over the whole watch.",
            Detail(f"Highest evidence so far: {_digits(self.most_wealth)}."),
            Detail(f"Not moved: {', '.join(still)}." if still else "Every signal moved."),
            Detail(
                f"The bound holds while nothing changes, so that one {self.unit} could stand in "
                "another's place."
            ),
        ]


class DriftScores(Drift):
    """`drift.json`."""

    kind: Literal["drift"] = "drift"
    pair: PairFingerprint
    policy: str
    traces: tuple[str, ...]
    reference: tuple[str, ...] | None
    price: Price | None  # of the change; None without --dense or an alarm

    def shown(self) -> list[Any]:
        return [*super().shown(), *(self.price.shown() if self.price else ())]


def _digits(wealth: float) -> str:
    return number(wealth, ".2f" if wealth < 1000 else ".3g")


def watch_traces(
    traces: list[str],
    policy: str,
    *,
    reference: list[str] | None = None,
    reference_prompts: int = 200,
    unit: str = "prompt",
    dense: list[str] | None = None,
    cost_model: Path | None = None,
    alpha: float = 0.05,
    seed: int = 0,
) -> tuple[DriftScores, list[Any]]:
    """Watches the traffic of a deployed policy.

    Args:
        traces: live traces of the traffic.
        policy: words or an artifact.
        reference: traces to compare with; None: the first units with `reference_prompts` prompts.
        unit: of `signals.UNITS`.
        alpha: bound on the probability of a false alarm.
        dense: recent traces to price a change with; in time if there is a cost model.
        seed: for ties of figures.

    Returns:
        The verdict, and its text and tables for the terminal.

    Raises:
        UsageError: alpha is too small, or the policy cannot be replayed.
        TraceEmptyError: too few prompts.
        TraceMismatchError: traces of another pair or policy.
    """
    if not LEAST_ALPHA <= alpha < 1:
        raise UsageError(
            f"--false-alarm-prob is a probability from {LEAST_ALPHA:g} to below 1, not {alpha:g}"
        )
    served = TraceSet.open(*traces)
    deployed = resolve_policy(policy, served.fingerprint, allow_lossy=True).policy
    if any("engine" in header.collect for header in served.headers):
        deployed = as_chain(deployed)  # as the engine ran it
    every = read_prompts(served, deployed)
    stream = in_units(every, unit)
    num_left_out = len(every) - len(stream)
    before = check_pair(TraceSet.open(*reference), served, "--reference") if reference else None
    recent = check_pair(TraceSet.open(*dense), served, "--dense") if dense else None
    if recent is not None:
        support_of(recent.header)  # refuses live traces
        check_replayable(deployed)
    if before is not None:
        known = in_units(read_prompts(before, deployed), unit)
    else:
        known, stream = stream.split(reference_prompts)
        if not len(stream):
            units = "" if unit == "prompt" else f", {count(known.num_units, unit)}"
            raise TraceEmptyError(
                f"the traffic, {count(len(known), 'prompt')}{units}, has nothing to watch after "
                f"the {reference_prompts} of --reference-prompts",
                hint="wait for traffic, lower --reference-prompts, or name --reference traces",
            )
    found = watch(known, stream, unit=unit, alpha=alpha, seed=seed)
    cost = None
    if recent is not None and found.alarm:
        since = found.foremost.since.index
        cost = price(since, known, stream, recent, deployed, policy, cost_model)
    scores = DriftScores(
        **dict(found),
        pair=served.fingerprint,
        policy=policy,
        traces=tuple(traces),
        reference=None if reference is None else tuple(reference),
        price=cost,
    )
    parts = scores.shown()
    if num_left_out:
        parts.append(
            f"{count(num_left_out, 'prompt')} of a {unit} that may not be whole are left out."
        )
    if recent is not None and not found.alarm:
        parts.append("No alarm: --dense was not looked at.")
    return scores, parts


def watch(
    reference: Prompts,
    stream: Prompts,
    *,
    unit: str = "prompt",
    alpha: float = 0.05,
    seed: int = 0,
) -> Drift:
    """Watches a stream against a reference, both from `signals.in_units`.

    Deterministic: each signal has a generator of its own for ties, so that prompts appended to the
    stream do not change earlier evidence.

    Raises:
        TraceEmptyError: too few prompts to compare with, or none to watch.
    """
    num_reference, num = reference.num_units, stream.num_units
    if num_reference < MIN_PROMPTS or not num:
        noun = "prompts" if unit == "prompt" else f"whole {unit}s"
        raise TraceEmptyError(
            f"a watch needs at least {MIN_PROMPTS} {noun} of the reference and one after them: "
            f"there are {num_reference} and {num}",
            hint="collect more, or name other traces as --reference",
        )
    terms = watched(reference, stream)
    ranks, own, whole = evidence(terms, seed)
    resamples, signals = Resamples.draw(num_reference + num), list[DriftSignal]()
    for group, found in ranks.items():
        for at, (name, p) in enumerate(found.items()):
            since, most = likeliest_change(p).start, float(own[group][:, at].max())
            sides = _around(resamples, np.concatenate(terms[group][name]), num_reference + since)
            signals.append(
                DriftSignal(
                    group=group,
                    signal=name,
                    moved=most >= 1 / alpha and lie_apart(*sides),
                    wealth=float(own[group][-1, at]),
                    most_wealth=most,
                    since=DriftPrompt.of(stream, since),
                    before=sides[0],
                    after=sides[1],
                )
            )
    rings = np.flatnonzero(whole >= 1 / alpha)
    points = np.unique(np.linspace(0, num - 1, min(num, CURVE_POINTS)).round().astype(int))
    curves = {"all": whole, **{group: of_group.mean(1) for group, of_group in own.items()}}
    logs = {name: tuple(np.log10(curve[points]).tolist()) for name, curve in curves.items()}
    return Drift(
        alarm=len(rings) > 0,
        alpha=alpha,
        unit=unit,
        num_reference=num_reference,
        num_units=num,
        num_prompts=len(stream),
        wealth=float(whole[-1]),
        most_wealth=float(whole.max()),
        alarm_at=DriftPrompt.of(stream, int(rings[0])) if len(rings) else None,
        evidence=DriftEvidence(index=tuple(points.tolist()), log10=logs),
        signals=tuple(sorted(signals, key=lambda signal: -signal.most_wealth)),
    )


def lie_apart(one: Interval, other: Interval) -> bool:
    """Whether two intervals do not overlap."""
    return not (one.low <= other.high and other.low <= one.high)


def _around(resamples: Resamples, terms: Floats, place: int) -> tuple[Interval, Interval]:
    """A figure of terms `[R + n, 2]` before a place and from it on, on the same resamples."""
    sides = []
    for part in (slice(place), slice(place, None)):
        table = np.zeros_like(terms)
        table[part] = terms[part]
        is_enough = len(terms[part]) >= MIN_PROMPTS
        drawn = first_over_second(resamples.drawn(table))
        sides.append(replace(resamples, is_enough=is_enough).read(drawn))
    return sides[0], sides[1]


def evidence(
    terms: Terms, seed: int
) -> tuple[dict[str, dict[str, Floats]], dict[str, Floats], Floats]:
    """The p-values `[n]` of every signal by group and name, the wealth `[n, signals]` of the bets
    on each by group, and the wealth `[n]` of all: the mean over groups of the mean over signals."""
    ranks = {
        group: {
            name: p_values(
                over(before), over(since), np.random.default_rng((seed, zlib.crc32(name.encode())))
            )
            for name, (before, since) in of_group.items()
        }
        for group, of_group in terms.items()
    }
    own = {group: wealth(np.stack([*found.values()], 1)) for group, found in ranks.items()}
    return ranks, own, np.mean([of_group.mean(1) for of_group in own.values()], 0)


def prometheus(drift: Drift, policy: str) -> str:
    """The result in the text format of Prometheus, for a node exporter's text files."""
    watched, alone = {"policy": policy}, [(one.signal, one.wealth) for one in drift.signals]
    gauges: list[tuple[str, str, list[tuple[dict[str, str], float]]]] = [
        ("alarm", "1 if the policy no longer fits its traffic", [(watched, drift.alarm)]),
        ("prompts", "Prompts that were watched", [(watched, drift.num_prompts)]),
        ("evidence", "Evidence of a change; the alarm rings at 1/alpha", [(watched, drift.wealth)]),
        (
            "signal_evidence",
            "Evidence of a change in one signal",
            [({**watched, "signal": signal}, value) for signal, value in alone],
        ),
    ]
    lines = []
    for end, words, values in gauges:
        name = f"specctl_drift_{end}"
        lines += [f"# HELP {name} {words}", f"# TYPE {name} gauge"]
        for labels, value in values:
            # A label is escaped as a string of JSON is.
            escaped = {key: json.dumps(text, ensure_ascii=False) for key, text in labels.items()}
            pairs = ",".join(f"{key}={text}" for key, text in escaped.items())
            lines.append(f"{name}{{{pairs}}} {value:g}")
    return "\n".join(lines) + "\n"
