"""Order in time of what lines say, by the times that stand in them.

Exports print the newest line first, and files of several servers are joined end to end. So lines
are read oldest first, and intervals stand in order of time where each has one, else of their lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from specctl.logs.server_log import Interval
from specctl.logs.wrappers import Line

_CALENDAR = re.compile(
    r"(?:(\d{4})-)?(?:(\d\d)-(\d\d)[T ]|([A-Z][a-z]{2}) ([ \d]\d) )(\d\d):(\d\d):(\d\d)"
)
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"
_UPTIME = re.compile(r"(\d+)\.(\d\d)\.(\d{3})\.\d{3}")
"""llama.cpp: minutes, seconds, milliseconds and microseconds since its start."""
_DAY_S = 86_400
_HALF_S = 7 * 31 * _DAY_S
"""From the last of June to the first of the year: months have 31 days, as only the order counts."""
_YEAR_S = 2 * _HALF_S


def moments(times: Iterable[str]) -> list[float] | None:
    """Seconds in one order of time; None where a time is unknown, or they fall with a restart.

    Times without a year, as vLLM prints them, are of one half of a year: 01-01 is after 12-31.
    """
    found = [_moment(time) for time in times]
    known = [one for one in found if one is not None]
    kinds = {kind for kind, _ in known}
    if len(known) < len(found) or ("uptime" in kinds and len(kinds) > 1):
        return None
    seconds = [second for _, second in known]
    if kinds == {"uptime"}:
        return seconds if seconds == sorted(seconds) else None
    if "day" in kinds:
        seconds = [second % _YEAR_S for second in seconds]
        if max(seconds) - min(seconds) > _HALF_S:
            seconds = [one + _YEAR_S * (one < _HALF_S) for one in seconds]
    return seconds


def _moment(time: str) -> tuple[str, float] | None:
    """A kind of time, and its seconds."""
    if found := _CALENDAR.search(time):
        year, month, day, name, date, *clock = found.groups()
        month = _MONTHS.find(name) // 3 + 1 if name else month
        hours, minutes, seconds = map(int, clock)
        of_day = (hours * 60 + minutes) * 60 + seconds
        of_year = (int(month) * 31 + int(date or day)) * _DAY_S + of_day
        return "year" if year else "day", int(year or 0) * _YEAR_S + of_year
    if found := _UPTIME.fullmatch(time):
        minutes, seconds, ms = map(int, found.groups())
        return "uptime", minutes * 60 + seconds + ms / 1e3
    return None


def oldest_first(lines: Iterable[Line]) -> Sequence[Line]:
    """Lines as they stand, or backwards where the times of processes fall more often than rise."""
    found, last, rises = [*lines], dict[tuple[str, str], float](), 0
    for line in found:
        if (moment := _moment(line.time)) is not None:
            kind, second = moment
            before = last.get((line.process, kind), second)
            rises += (second > before) - (second < before)
            last[line.process, kind] = second
    return found[::-1] if rises < 0 else found


def in_order(intervals: Sequence[Interval]) -> list[Interval]:
    """Intervals by time, or as their lines stand."""
    known = moments(one.time for one in intervals)
    if known is None:
        return [*intervals]
    return [intervals[place] for place in sorted(range(len(known)), key=known.__getitem__)]
