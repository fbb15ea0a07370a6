"""Logs beside each other: which are of one server, and what changed from one to another.

Start lines name the model, the engine's version, the method and the drafter. Logs of one server
agree in all of these. A log without start lines is taken as of the only server that it can be of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from specctl.errors import InputError
from specctl.formatting import listed
from specctl.logs.advice import change_words
from specctl.logs.moments import moments
from specctl.logs.server_log import STOP, Interval, ServerLog
from specctl.logs.sources import Spot
from specctl.stats import MIN_PROMPTS, QUANTILE

_OF_SERVER = ("model", "version")
_OF_STOP = (*STOP, "early stop")
_OF_DRAFTS = (*_OF_SERVER, "method", "method argument", "drafter", "drafter argument", *_OF_STOP)
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
    for name in facts:
        for other in server:
            mine, theirs = log.settings.get(name), other.settings.get(name)
            if mine and theirs and mine != theirs:
                return f"{log.name} has the {name} {listed(mine)} and {other.name} {listed(theirs)}"
    return ""


def _missing(log: ServerLog, server: Sequence[ServerLog], facts: Sequence[str]) -> str:
    """Facts that a log does not name: its model, and those that others of a server name."""
    said = {"model", *(name for other in server for name in other.settings)} - log.settings.keys()
    names = [name for name in facts if name in said and not name.endswith("argument")]
    return listed(names) if names else ""


def refuse_repeats(logs: Sequence[ServerLog]) -> None:
    """Raises InputError for a log whose lines are those of another."""
    seen: dict[Any, ServerLog] = {}
    for log in logs:
        lines = [replace(one, spot=_PLAIN.spot, process="") for one in log.intervals]
        other = seen.setdefault((*lines, *log.plain), log)
        if other is not log:
            what = f"has the lines of {other.name} again"
            what = "is given twice" if log.name == other.name else what
            raise InputError(f"{log.name} {what}", hint="give each log once")


# --------------------------------------------------------------------------- what changed


def compared(
    models: Mapping[str, dict[str, Any]], lines: Mapping[str, Sequence[Interval]]
) -> list[str]:
    """A sentence on τ and tokens/s of two logs or runs of one draft length, the later against the
    earlier, given figures and intervals by name."""
    lengths = {
        own.get("num_draft_tokens_per_round") or len(own.get("marginal_prob", ()))
        for own in models.values()
    }
    if len(models) != 2 or len(lengths) > 1 or not all(lengths):
        return []
    known = moments(str(own["from"] or "") for own in models.values()) or (0, 0)
    earlier, later = (
        name for _, name in sorted(zip(known, models, strict=True), key=itemgetter(0))
    )
    before, after = (
        models[name].get("mean_acceptance_length") or models[name]["mean_of_interval_means"]
        for name in (earlier, later)
    )
    moved = change_words(_change(models[earlier]["mean_interval"], models[later]["mean_interval"]))
    said = [{**models[name].get("settings", {})} for name in (later, earlier)]
    if apart := [name for name in _OF_STOP if said[0].get(name) != said[1].get(name)]:
        both = ["/".join(own.get(apart[0], ["not stated"])) for own in said]
        moved = f"two settings: {apart[0]} {both[0]} against {both[1]}"
    return [
        f"{later} against {earlier}: τ {after:.2f} against {before:.2f}, {moved}. "
        + _speed_words(lines[earlier], lines[later])
    ]


def _change(before: list[float] | None, after: list[float] | None) -> list[float] | None:
    """The 95% interval of the difference of two means with these intervals."""
    if before is None or after is None:
        return None
    middle = (sum(after) - sum(before)) / 2
    half = float(np.hypot(after[1] - after[0], before[1] - before[0])) / 2
    return [middle - half, middle + half]


def _speed_words(before: Sequence[Interval], after: Sequence[Interval]) -> str:
    """A sentence on the ratio of tokens/s at like loads, with its 95% interval.

    The logarithm of a line's tokens/s is fitted by a parabola in that of its running requests, and
    a step from one log to the other.
    """
    rows = np.array(
        [
            (side, np.log(one.num_running), np.log(one.tokens_per_s))
            for side, lines in enumerate((before, after))
            for one in lines
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
    terms = np.stack([side, np.ones_like(load), load, load**2], -1)
    inverse = np.linalg.pinv(terms)
    fit = inverse @ speed
    spread = (inverse[0] * (speed - terms @ fit)) @ (inverse[0] * (speed - terms @ fit))
    spread *= len(speed) / (len(speed) - np.linalg.matrix_rank(terms))
    ratio, low, high = np.exp(fit[0] + np.array([0, -QUANTILE, QUANTILE]) * np.sqrt(spread))
    loads = " to ".join(dict.fromkeys(f"{np.exp(end):.0f}" for end in (least, most)))
    verdict = "slower" if high < 1 else "faster" if low > 1 else "no difference beyond chance"
    return f"Tokens/s at {loads} requests: x {ratio:.2f} [{low:.2f}, {high:.2f}], {verdict}."
