"""Logs beside each other: which are of one server, and what changed from one to another.

Start lines name the model, the engine's version, the method and the drafter. Logs of one server
agree in all of these. A log without start lines is taken as of the only server that it can be of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from specctl.errors import InputError
from specctl.formatting import count, listed
from specctl.logs.acceptance_figures import mean_ranges
from specctl.logs.advice import change_words
from specctl.logs.moments import in_order, moments
from specctl.logs.pooling import MAX_PARTS, mean_of
from specctl.logs.server_log import STOP, Interval, ServerLog
from specctl.logs.sources import Spot
from specctl.stats import MIN_PROMPTS, QUANTILE

_OF_SERVER = ("model", "version")
_OF_STOP = (*STOP, "early stop")
_OF_DRAFTS = (*_OF_SERVER, "method", "method argument", "drafter", "drafter argument", *_OF_STOP)
_OF_RUN = (*_OF_DRAFTS, "schedule")
_ALIKE = 0.02
"""Largest difference of drafted tokens a round between drafts that are as long."""
Settings = Mapping[str, Sequence[str]]
_PLAIN = Interval(Spot("", 0), "", "", num_draft_tokens=0)


def servers(logs: Sequence[ServerLog]) -> tuple[list[list[ServerLog]], list[str]]:
    """Logs by server and drafter, the one that names most first, and those without drafts with each
    drafter of their server; and sentences on what was taken as one, and what was not."""
    found, taken = list[list[ServerLog]](), list[str]()
    lengths = {one.num_draft_tokens for log in logs for one in log.intervals or (_PLAIN,)}
    for log in sorted(logs, key=lambda log: (not log.intervals, -len(log.settings))):
        facts = _OF_DRAFTS if log.intervals else _OF_SERVER
        mixed = [name for name in facts if len(log.settings.get(name, ())) > 1]
        if mixed and len(lengths) > 1:
            both = listed(log.settings[mixed[0]])
            taken.append(
                f"{log.name} has the {mixed[0]} {both}, so its steps make no clock: give the lines "
                "of each run alone."
            )
            continue
        odd = [_difference(log, server, facts) for server in found]
        fitting = [server for server, what in zip(found, odd, strict=True) if not what]
        is_one = all(not _difference(of[0], fitting[0], _OF_SERVER) for of in fitting)
        if len(fitting) > 1 and (log.intervals or not is_one):
            names = " or ".join(server[0].name for server in fitting)
            taken.append(
                f"{log.name} may be of the server of {names}, and is joined to none: keep its "
                "start lines."
            )
            fitting = []
        elif found and not fitting and len(lengths) > 1:
            taken.append(f"{odd[0]}: their steps make no clock together.")
        elif fitting and len(lengths) > 1 and (missing := _missing(log, fitting[0], facts)):
            taken.append(
                f"{log.name} does not name its {missing}: taken as of the server of "
                f"{fitting[0][0].name}. Keep its start lines."
            )
        for server in fitting:
            server.append(log)
        if log.intervals and not fitting:
            found.append([log])
    return found, taken


def _difference(log: ServerLog, server: Sequence[ServerLog], facts: Sequence[str]) -> str:
    """The first fact in which a log contradicts a server's, in words; empty if none does."""
    for other in server:
        for name in _differing(log.settings, other.settings, facts):
            mine, theirs = (listed(one.settings[name]) for one in (log, other))
            return f"{log.name} has the {name} {mine} and {other.name} {theirs}"
    return ""


def _differing(mine: Settings, theirs: Settings, facts: Sequence[str]) -> list[str]:
    """Facts that both name, and not alike."""
    both = [name for name in facts if mine.get(name) and theirs.get(name)]
    return [name for name in both if mine[name] != theirs[name]]


def _missing(log: ServerLog, server: Sequence[ServerLog], facts: Sequence[str]) -> str:
    """Facts that a log does not name: its model, and those that others of a server name."""
    said = {"model", *(name for other in server for name in other.settings)} - log.settings.keys()
    names = [name for name in facts if name in said and not name.endswith("argument")]
    return listed(names) if names else ""


def without_repeats(logs: Sequence[ServerLog]) -> tuple[list[ServerLog], list[str]]:
    """Logs without the lines that stand in one before them, as copies of a running server's log
    have, and sentences on those.

    Raises:
        InputError: a log whose lines are those of another.
    """
    kept, told, seen = list[ServerLog](), list[str](), dict[Any, ServerLog]()
    for log in logs:
        other = seen.setdefault((*_bare(log), *log.plain), log)
        if other is not log:
            what = f"has the lines of {other.name} again"
            what = "is given twice" if log.name == other.name else what
            raise InputError(f"{log.name} {what}", hint="give each log once")
    for log in logs:
        for other in kept:
            if not (repeated := _repeated(_bare(log), _bare(other))):
                continue
            lines = count(len(repeated), "line")
            told.append(f"{lines} of {log.name} stand in {other.name} too, and count once.")
            if log.intervals:
                log.intervals = [x for k, x in enumerate(log.intervals) if k not in repeated]
            else:
                log.plain = [x for k, x in enumerate(log.plain) if k not in repeated]
            again = _repeated(log.written, other.written)
            log.written = [x for k, x in enumerate(log.written) if k not in again]
            if not (log.intervals or log.plain):
                break
        else:
            kept.append(log)
    return kept, told


def _bare(log: ServerLog) -> Sequence[Any]:
    """The lines of a log without their places."""
    return [replace(one, spot=_PLAIN.spot, process="") for one in log.intervals] or log.plain


def _repeated(mine: Sequence[Any], theirs: Sequence[Any]) -> set[int]:
    """Places of lines that stand among others at the same time, or in a run of eight."""
    known = {one for one in theirs if getattr(one, "time", "")}
    found = {place for place, one in enumerate(mine) if one in known}
    runs = {tuple(theirs[k : k + MIN_PROMPTS]) for k in range(len(theirs) - MIN_PROMPTS + 1)}
    for start in range(len(mine) - MIN_PROMPTS + 1):
        run = tuple(mine[start : start + MIN_PROMPTS])
        if run in runs and len({*run}) > MIN_PROMPTS // 2:
            found |= {*range(start, start + MIN_PROMPTS)}
    return found


# --------------------------------------------------------------------------- what changed


@dataclass(frozen=True)
class _Side:
    """Logs or runs of one setting at one time, which count as one."""

    names: Sequence[str]
    ends_alike: bool  # shorter drafts end where these did: at the end of a text, or at a stop
    settings: Settings
    depth: int  # draft tokens; 0: not known
    span: tuple[float, float] | None  # from and to, where times are known
    lines: Sequence[Interval]

    def is_beside(self, other: _Side) -> bool:
        """Whether another of these settings ran for half of the shorter time of both, or more."""
        if self.span is None or other.span is None or self.depth != other.depth:
            return False
        both = min(self.span[1], other.span[1]) - max(self.span[0], other.span[0])
        least = min(end - start for start, end in (self.span, other.span))
        return 2 * both >= least and not _differing(self.settings, other.settings, _OF_RUN)

    def and_(self, other: _Side) -> _Side:
        return replace(
            self,
            names=[*self.names, *other.names],
            settings={**other.settings, **self.settings},
            lines=in_order([*self.lines, *other.lines]),
        )

    @property
    def drafted_per_round(self) -> float:
        return sum(one.num_drafted for one in self.lines) / sum(one.weight for one in self.lines)

    @property
    def num_compared(self) -> int:
        """Positions that eight lines, or all, drafted in every round; 0 if acceptance by position
        is not known, and 1, which every counted round has, if most rounds drafted at will."""
        if not all(one.at_least for one in self.lines):
            return 0
        if self.ends_alike:
            return self.depth
        even = [one for one in self.lines if one.even_length]
        if 2 * sum(one.weight for one in even) < sum(one.weight for one in self.lines):
            return 1
        lengths = sorted((one.even_length for one in even), reverse=True)
        return lengths[min(len(lengths), MIN_PROMPTS) - 1]


def compared(
    engine: str, models: Mapping[str, dict[str, Any]], lines: Mapping[str, Sequence[Interval]]
) -> list[str]:
    """Sentences on τ and tokens/s of logs or runs, each against the one before it in time, given
    figures and intervals by name. Of more than two, those that ran side by side with the same
    settings are one."""
    ends = moments(str(own[end] or "") for own in models.values() for end in ("from", "to"))
    spans = [*zip(ends[::2], ends[1::2], strict=True)] if ends else [None] * len(models)
    found, sides = list[_Side](), list[_Side]()
    for (name, own), span in zip(models.items(), spans, strict=True):
        started = max(one.num_draft_tokens or 0 for one in lines[name])
        depth = own.get("num_draft_tokens_per_round") or started
        found.append(_Side([name], engine == "llamacpp", own["settings"], depth, span, lines[name]))
    for one in sorted(found, key=lambda one: one.span[0] if one.span else 0.0):
        beside = [side for side in sides if len(models) > 2 and side.is_beside(one)][:1]
        sides = [side.and_(one) if side in beside else side for side in sides]
        sides += [] if beside else [one]
    return [
        f"{listed(after.names)} against {listed(before.names)}{_settings_words(before, after)}: "
        f"{_acceptance_words(before, after)} {_speed_words(before, after)}"
        for before, after in pairwise(sides)
    ]


def _settings_words(before: _Side, after: _Side) -> str:
    """Settings in which two sides differ, in brackets."""
    names = _differing(before.settings, after.settings, _OF_RUN)
    words = [
        f"{name} {listed(after.settings[name])} against {listed(before.settings[name])}"
        for name in names
        if not name.endswith(" argument") or name.removesuffix(" argument") not in names
    ]
    if before.depth != after.depth:
        words.append(f"{after.depth or 'unknown'} draft tokens against {before.depth or 'unknown'}")
    elif not _draft_alike(before, after):
        drafted = f"{after.drafted_per_round:.2f} against {before.drafted_per_round:.2f}"
        words.append(f"{drafted} draft tokens a round")
    return f" ({', '.join(words)})" if words else ""


def _acceptance_words(before: _Side, after: _Side) -> str:
    """A sentence on τ of the draft tokens that both sides drafted.

    Where drafts vary at will and are as long on both sides, or only means are known at one length,
    it is that of all.
    """
    depth = min(before.num_compared, after.num_compared)
    sides, is_one = (before, after), before.depth == after.depth
    if is_one and (not depth or (depth == 1 < before.depth and _draft_alike(before, after))):
        means, label = [mean_of(side.lines) for side in sides], "τ"
    elif depth:
        means = [_tau(side, depth) for side in sides]
        label = "τ" if is_one and depth == before.depth else ""
    else:
        return _mean_words(before, after)
    label = label or f"τ of the first {count(depth, 'draft token') if depth > 1 else 'draft token'}"
    (old, old_ends), (new, new_ends) = means
    moved = change_words(_change(old_ends, new_ends))
    said = [{**side.settings} for side in (after, before)]
    if apart := [name for name in _OF_STOP if said[0].get(name) != said[1].get(name)]:
        both = ["/".join(own.get(apart[0], ["not stated"])) for own in said]
        moved = f"two settings: {apart[0]} {both[0]} against {both[1]}"
    return f"{label} {new:.2f} against {old:.2f}, {moved}."


def _mean_words(before: _Side, after: _Side) -> str:
    """A sentence on means of two lengths: that of the longer drafts holds the shorter's in a
    range."""
    depth = min(before.depth, after.depth)
    if not depth:
        return "Acceptance was not compared: a draft length is not known."
    ends = []
    for side in (before, after):
        mean, interval = mean_of(side.lines)
        low, high = interval or (mean, mean)
        ends.append(mean_ranges((low, high), side.depth)[depth - 1])
    (old_low, old_high), (new_low, new_high) = ends
    verdict = "not told apart, as only means are known"
    if min(len(before.lines), len(after.lines)) < MIN_PROMPTS:
        verdict = change_words(None)
    elif new_high < old_low or old_high < new_low:
        verdict = "a fall" if new_high < old_low else "a rise"
    return (
        f"τ of the first {count(depth, 'draft token')} {new_low:.2f} to {new_high:.2f} against "
        f"{old_low:.2f} to {old_high:.2f}, {verdict}."
    )


def _tau(side: _Side, depth: int) -> tuple[float, list[float] | None]:
    """τ of the first draft tokens, and its 95% interval, by the jackknife over parts in order.

    A token's acceptance is that of the lines whose rounds all drafted it, among those that reached
    it; the first token is in every round.
    """
    lines = side.lines
    counts = np.array([[sum(one.rounds or ()) / 2, *one.at_least[:depth]] for one in lines])
    lengths = np.array([[max(one.even_length, 1)] for one in lines])
    drafted = (lengths > np.arange(depth)) | side.ends_alike
    rows = np.stack([counts[:, 1:] * drafted, counts[:, :-1] * drafted])
    parts = np.array_split(rows, min(len(lines), MAX_PARTS), axis=1)
    sums = np.stack([part.sum(1) for part in parts])  # `[P, 2, depth]`
    all_, num = sums.sum(0), len(sums)
    accepted, reached = np.moveaxis(np.concatenate([all_[None], all_ - sums]), 1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        tau, *without = 1 + np.nan_to_num(accepted / reached).cumprod(1).sum(1)
    half = QUANTILE * float(np.std(without) * np.sqrt(max(num - 1, 0)))
    return float(tau), [float(tau) - half, float(tau) + half] if num >= MIN_PROMPTS else None


def _change(before: list[float] | None, after: list[float] | None) -> list[float] | None:
    """The 95% interval of the difference of two means with these intervals."""
    if before is None or after is None:
        return None
    middle = (sum(after) - sum(before)) / 2
    half = float(np.hypot(after[1] - after[0], before[1] - before[0])) / 2
    return [middle - half, middle + half]


def _speed_words(before: _Side, after: _Side) -> str:
    """A sentence on the ratio of tokens/s at like loads, with its 95% interval.

    The logarithm of a line's tokens/s is fitted by a parabola in that of its running requests, and
    a step from one side to the other: of two draft lengths, one that is linear in the logarithm,
    told at the least and the most load.
    """
    rows = np.array(
        [
            (side, np.log(one.num_running), np.log(one.tokens_per_s))
            for side, own in enumerate((before, after))
            for one in own.lines
            if one.num_running and one.tokens_per_s
        ],
        float,
    ).reshape(-1, 3)
    sides = [rows[rows[:, 0] == side] for side in (0, 1)]
    unknown = f"Speed was not compared: fewer than {MIN_PROMPTS} lines of each have a throughput"
    if not all(map(len, sides)):
        return f"{unknown}."
    least, most = max(own[:, 1].min() for own in sides), min(own[:, 1].max() for own in sides)
    side, load, speed = rows[(least <= rows[:, 1]) & (rows[:, 1] <= most)].T
    if min((side == 0).sum(), (side == 1).sum()) < MIN_PROMPTS:
        return f"{unknown} at the same loads."
    first, last = (f"{np.exp(end):.0f}" for end in (least, most))
    steps = {first if first == last else f"{first} to {last}": side}
    if first != last and not _draft_alike(before, after):
        along = (load - least) / (most - least)
        steps = {first: side * (1 - along), last: side * along}
    terms = np.stack([*steps.values(), np.ones_like(load), load, load**2], -1)
    inverse = np.linalg.pinv(terms)
    fit = inverse @ speed
    spread = ((inverse * (speed - terms @ fit)) ** 2).sum(1)
    spread *= len(speed) / (len(speed) - np.linalg.matrix_rank(terms))
    said = []
    for at, log_ratio, error in zip(steps, fit, np.sqrt(spread), strict=False):
        ratio, low, high = np.exp(log_ratio + np.array([0, -QUANTILE, QUANTILE]) * error)
        verdict = "no difference beyond chance"
        if not low - 1e-6 <= 1 <= high + 1e-6:
            verdict = "slower" if high < 1 else "faster"
        noun = "request" if at == "1" else "requests"
        said.append(f"at {at} {noun}: x {ratio:.2f} [{low:.2f}, {high:.2f}], {verdict}")
    return f"Tokens/s {'; '.join(said)}."


def _draft_alike(before: _Side, after: _Side) -> bool:
    """Whether rounds drafted as many tokens on both sides, to a fiftieth, where these are known."""
    drafted = [side.drafted_per_round for side in (before, after)]
    return before.depth == after.depth and abs(drafted[1] - drafted[0]) <= _ALIKE * drafted[0]
