"""Whether a deployed policy still fits its traffic: an alarm over every signal of its prompts.

Every signal is bet on by itself (`watch.alarm`), the signals of a group share their group's stake,
the groups share the whole. A mean of fair wealths is fair, so the alarm, which rings where the mean
reaches 1/alpha, rings with probability at most alpha while nothing changes, over the whole watch,
however often it is looked at and however the signals depend on each other.

Which signal moved is then told by its own wealth, at least 1/alpha, and by figures before and since
whose intervals lie apart. These describe an alarm; the promise is the alarm's.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from specctl.artifacts import PairFingerprint
from specctl.errors import TraceEmptyError
from specctl.formatting import Table, count, number
from specctl.logs.positions import Floats
from specctl.replay.facts import ResultRecord
from specctl.stats import MIN_PROMPTS, UNKNOWN, Interval, Number, Resamples, first_over_second
from specctl.watch.alarm import likeliest_change, p_values, wealth
from specctl.watch.signals import REST, Prompts, over, watched

CURVE_POINTS = 200
"""Of the evidence, in JSON."""


class DriftPrompt(ResultRecord):
    """A unit of the watch: its place from 0, its first prompt, and when that was finished, UTC."""

    index: int
    prompt_id: str
    finished: str | None


class DriftSignal(ResultRecord):
    """A signal before the likeliest start of its change and since; `most_wealth`: its evidence."""

    group: str
    signal: str
    moved: bool
    wealth: Number
    most_wealth: Number
    since: DriftPrompt
    before: Interval
    after: Interval


class DriftEvidence(ResultRecord):
    """Logarithms to base 10 of the evidence at some units, by group; `all` together."""

    index: tuple[int, ...]
    log10: dict[str, tuple[Number, ...]]


class DriftScores(ResultRecord):
    """`drift.json` of `specctl drift`.

    Attributes:
        alpha: bound on the probability of a false alarm.
        unit: that ranks are of. num_reference, num_units: of them; num_prompts: in the watch.
        price: what the change costs, `words` of it for people; None where it was not asked for.
    """

    kind: Literal["drift"]
    pair: PairFingerprint
    policy: str
    traces: tuple[str, ...]
    reference: tuple[str, ...] | None
    alarm: bool
    alpha: float
    unit: str
    num_reference: int
    num_units: int
    num_prompts: int
    wealth: Number
    most_wealth: Number
    alarm_at: DriftPrompt | None
    evidence: DriftEvidence
    signals: tuple[DriftSignal, ...]
    price: dict[str, Any] | None


@dataclass(frozen=True)
class Signal:
    """One signal at the end of the watch.

    Attributes:
        wealth: of the bets on it alone. most: the most it ever was.
        since: index of the first unit after the likeliest change.
        before: in the reference and in the stream up to there. after: since.
    """

    group: str
    name: str
    wealth: float
    most: float
    since: int
    before: Interval = UNKNOWN
    after: Interval = UNKNOWN

    def moved(self, alpha: float) -> bool:
        """Whether its own bets reached 1/alpha, and its intervals, where known, lie apart."""
        apart = not (self.before.low <= self.after.high and self.after.low <= self.before.high)
        return self.most >= 1 / alpha and apart


@dataclass(frozen=True)
class Drift:
    """A watch of n units of prompts.

    Attributes:
        alpha: bound on the probability of a false alarm.
        unit: of `signals.UNITS`. num_reference: units of the reference.
        alarm_at: index of the unit at which the alarm rang; None: it has not.
        wealth: of all bets after each unit, `[n]`. by_group: of each group's.
        signals: those with a wealth, most first.
    """

    alpha: float
    unit: str
    num_reference: int
    stream: Prompts
    alarm_at: int | None
    wealth: Floats
    by_group: Mapping[str, Floats]
    signals: tuple[Signal, ...]

    @property
    def moved(self) -> tuple[Signal, ...]:
        """Signals that moved by themselves."""
        return tuple(signal for signal in self.signals if signal.moved(self.alpha))

    @property
    def foremost(self) -> Signal:
        """The signal that moved with most evidence; where none did, that with most evidence."""
        return (*self.moved, *self.signals)[0]

    def scores(self, pair: PairFingerprint, **given: Any) -> DriftScores:
        """`drift.json`; `given`: the fields that the watch does not know."""
        num = self.stream.num_units
        at = np.unique(np.linspace(0, num - 1, min(num, CURVE_POINTS)).round().astype(int))
        curves = {"all": self.wealth, **self.by_group}
        return DriftScores(
            kind="drift",
            pair=pair,
            **given,
            alarm=self.alarm_at is not None,
            alpha=self.alpha,
            unit=self.unit,
            num_reference=self.num_reference,
            num_units=num,
            num_prompts=len(self.stream),
            wealth=float(self.wealth[-1]),
            most_wealth=float(self.wealth.max()),
            alarm_at=None if self.alarm_at is None else self._prompt(self.alarm_at),
            evidence=DriftEvidence(
                index=tuple(at.tolist()),
                log10={name: tuple(np.log10(curve[at]).tolist()) for name, curve in curves.items()},
            ),
            signals=tuple(
                DriftSignal(
                    group=signal.group,
                    signal=signal.name,
                    moved=signal in self.moved,
                    wealth=signal.wealth,
                    most_wealth=signal.most,
                    since=self._prompt(signal.since),
                    before=signal.before,
                    after=signal.after,
                )
                for signal in self.signals
            ),
        )

    def _prompt(self, index: int) -> DriftPrompt:
        """A unit, by its first prompt."""
        at = self.stream.start_of(index)
        finished = str(self.stream.finished[at]) or None
        return DriftPrompt(index=index, prompt_id=str(self.stream.ids[at]), finished=finished)

    def shown(self) -> list[Any]:
        """For a person."""
        num, bar = self.stream.num_units, 1 / self.alpha
        head = f"{count(num, self.unit)} watched against {self.num_reference} of the reference: "
        if self.alarm_at is None:
            head += (
                f"no alarm (evidence {_evidence(self.wealth[-1])}, at most "
                f"{_evidence(self.wealth.max())}; it rings at {bar:g})"
            )
        else:
            head += f"ALARM at {self.unit} {self.alarm_at + 1}{self._time(self.alarm_at)}"
        rows = [
            (
                signal.name,
                f"{signal.since + 1}{self._time(signal.since)}",
                signal.before.text(),
                signal.after.text(),
                f"{signal.most:.3g}",
            )
            for signal in self.moved
        ]
        heads = ("signal", f"since {self.unit}", "before", "since", "evidence")
        parts: list[Any] = [[head]]
        if rows:
            parts.append(Table("", heads, rows, left=2, wide=("evidence",)))
        still = [
            f"{signal.name} {number(signal.before.value, '.3g')}"
            for signal in self.signals
            if signal not in self.moved
            and signal.before.known
            and (signal.name != f"category {REST}" or signal.before.value or signal.after.value)
        ]
        rang = self.alarm_at is not None
        if rang and not rows:
            parts.append(
                "No signal moved by itself and beyond its interval; most evidence, "
                f"{_evidence(self.foremost.most)}, is of {self.foremost.name}."
            )
        if rang and self.unit == "prompt":
            parts.append(
                "Traffic that swings with the hour or comes in conversations rings by prompt "
                "without a change: watch it by --unit hour, day or conversation."
            )
        return [
            *parts,
            f"Not moved: {', '.join(still)}." if still else "Every signal moved.",
            f"While nothing changes, so that one {self.unit} could stand in another's place, the "
            f"alarm rings with probability {self.alpha:g} at most, over the whole watch and all "
            "signals, however often you look.",
        ]

    def _time(self, index: int) -> str:
        time = str(self.stream.finished[self.stream.start_of(index)])
        return f" ({time} UTC)" if time else ""


def _evidence(wealth: float) -> str:
    """A wealth in a few digits."""
    return number(float(wealth), ".2f" if wealth < 1000 else ".3g")


def watch(
    reference: Prompts,
    stream: Prompts,
    *,
    unit: str = "prompt",
    alpha: float = 0.05,
    seed: int = 0,
) -> Drift:
    """Watches a stream against a reference, both in units as `signals.in_units` gives them.

    The same prompts give the same answer, and more prompts behind them go on from there, as ties
    are broken by a generator of the signal's own.

    Raises:
        TraceEmptyError: too few prompts to compare with, or none to watch.
    """
    if reference.num_units < MIN_PROMPTS or not stream.num_units:
        noun = "prompts" if unit == "prompt" else f"whole {unit}s"
        raise TraceEmptyError(
            f"{noun} to watch: expected at least {MIN_PROMPTS} of the reference and one after "
            f"them, found {reference.num_units} and {stream.num_units}",
            hint="collect more, or name other traces as --reference",
        )
    ranks = ranks_of(reference, stream, seed)
    own = {group: wealth(np.stack([*found.values()], 1)) for group, found in ranks.items()}
    whole = whole_wealth(own)
    rings = np.flatnonzero(whole >= 1 / alpha)
    terms_of, num_reference = watched(reference, stream), reference.num_units
    signals, tables = list[Signal](), list[Floats]()
    for group, found in ranks.items():
        for at, (name, p) in enumerate(found.items()):
            since, own_wealth = likeliest_change(p).start, own[group][:, at]
            most = float(own_wealth.max())
            signals.append(Signal(group, name, float(own_wealth[-1]), most, since))
            terms = np.concatenate(terms_of[group][name])
            before = num_reference + since
            for part in (slice(before), slice(before, None)):
                tables.append(np.zeros_like(terms))
                tables[-1][part] = terms[part]
    signals = _estimated(signals, tables, num_reference)
    signals.sort(key=lambda signal: -signal.most)
    alarm_at = int(rings[0]) if len(rings) else None
    groups = {group: of_group.mean(1) for group, of_group in own.items()}
    return Drift(alpha, unit, num_reference, stream, alarm_at, whole, groups, tuple(signals))


def ranks_of(reference: Prompts, stream: Prompts, seed: int) -> dict[str, dict[str, Floats]]:
    """The p-values `[n]` of every signal, by group and name."""
    return {
        group: {
            name: p_values(
                over(pair[0]),
                over(pair[1]),
                np.random.default_rng((seed, zlib.crc32(name.encode()))),
            )
            for name, pair in of_group.items()
        }
        for group, of_group in watched(reference, stream).items()
    }


def whole_wealth(own: Mapping[str, Floats]) -> Floats:
    """`[n, ...]`: the mean over groups of the mean over their signals, `[n, signals, ...]`."""
    return np.asarray(np.mean([of_group.mean(1) for of_group in own.values()], 0))


def _estimated(
    signals: Sequence[Signal], tables: Sequence[Floats], num_reference: int
) -> list[Signal]:
    """Signals with their figures before and since: `tables` hold the terms of each, `[R + n, 2]`,
    0 on the other side. Resamples are drawn once for all, as they take longest."""
    num = len(tables[0])
    resamples, found = Resamples.draw(num), []
    drawn = [resamples.drawn(table) for table in tables]
    for signal, first, second in zip(signals, drawn[::2], drawn[1::2], strict=True):
        num_before = num_reference + signal.since
        before, after = (
            replace(resamples, is_enough=size >= MIN_PROMPTS).read(first_over_second(sums))
            for size, sums in ((num_before, first), (num - num_before, second))
        )
        found.append(replace(signal, before=before, after=after))
    return found


def prometheus(drift: Drift, labels: Mapping[str, str]) -> str:
    """The result in the text format of Prometheus, for a node exporter's text files."""

    def line(name: str, value: float, **more: str) -> str:
        pairs = {**labels, **more}.items()
        escaped = ",".join(
            '{}="{}"'.format(
                key, text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            )
            for key, text in pairs
        )
        return f"{name}{{{escaped}}} {value:g}"

    return "\n".join(
        [
            "# HELP specctl_drift_alarm 1 if the policy no longer fits its traffic",
            "# TYPE specctl_drift_alarm gauge",
            line("specctl_drift_alarm", drift.alarm_at is not None),
            "# HELP specctl_drift_prompts Prompts that were watched",
            "# TYPE specctl_drift_prompts gauge",
            line("specctl_drift_prompts", len(drift.stream)),
            "# HELP specctl_drift_evidence Evidence of a change; the alarm rings at 1/alpha",
            "# TYPE specctl_drift_evidence gauge",
            line("specctl_drift_evidence", float(drift.wealth[-1])),
            "# HELP specctl_drift_signal_evidence The same, of one signal alone",
            "# TYPE specctl_drift_signal_evidence gauge",
            *(
                line("specctl_drift_signal_evidence", signal.wealth, signal=signal.name)
                for signal in drift.signals
            ),
            "",
        ]
    )
