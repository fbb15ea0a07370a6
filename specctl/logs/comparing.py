"""Logs beside each other: which are of one server, and what changed from one to another.

Start lines name the model, the engine's version, the method and the drafter. Logs of one server
agree in all of these. A log without start lines is taken as of the only server that it can be of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specctl.errors import InputError
from specctl.formatting import listed
from specctl.logs.server_log import Interval, ServerLog
from specctl.logs.sources import Spot

_OF_SERVER = ("model", "version")
_OF_DRAFTS = (*_OF_SERVER, "method", "method argument", "drafter", "drafter argument")
_PLAIN = Interval(Spot("", 0), "", "", num_draft_tokens=0)


def servers(logs: Sequence[ServerLog]) -> tuple[list[list[ServerLog]], list[str]]:
    """Logs by server and drafter, the one that names most first, and those without drafts with each
    drafter of their server; and sentences on what was taken as one, and what was not."""
    found, taken = list[list[ServerLog]](), list[str]()
    lengths = {one.num_draft_tokens for log in logs for one in log.intervals or (_PLAIN,)}
    for log in sorted(logs, key=lambda log: (not log.intervals, -len(log.settings))):
        facts = _OF_DRAFTS if log.intervals else _OF_SERVER
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
        elif fitting and (missing := _missing(log, fitting[0], facts)):
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
    """Facts that others of a server name and a log does not."""
    said = {name for other in server for name in other.settings} - log.settings.keys()
    names = [name for name in facts if name in said and not name.endswith("argument")]
    return listed(names) if names else ""


def refuse_repeats(logs: Sequence[ServerLog]) -> None:
    """Raises InputError for a log whose lines are those of another."""
    seen: dict[Any, ServerLog] = {}
    for log in logs:
        lines = [replace(one, spot=_PLAIN.spot, process="") for one in log.intervals]
        other = seen.setdefault((*lines, *log.plain), log)
        if other is not log:
            raise InputError(
                f"{log.name} has the lines of {other.name} again", hint="give each log once"
            )
