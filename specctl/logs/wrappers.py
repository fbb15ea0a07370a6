"""Lines of servers, taken out of what carried them: terminals, containers, clusters, loggers.

A line of an engine is found by a mark, a text that only this engine prints, wherever it stands. So
most wrappers need no name: what stands before the mark tells the process and the time. Four change
the text itself and are undone: colours, JSON loggers, records that were split (Kubernetes' CRI
marks all but the last part `P`), and lines that a terminal or an editor folded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from specctl.logs.sources import Source, Spot, text_lines


@dataclass(frozen=True)
class Line:
    """A line of an engine: the text from its mark on, and what stood before it."""

    spot: Spot
    mark: str
    text: str  # behind the mark
    before: str = ""
    process: str = ""  # pod, host, process and ranks; empty if nothing tells
    time: str = ""  # the nearest before the mark, as it stands there


_MARKS = {
    "SpecDecoding": "SpecDecoding metrics: *",
    "prompt throughput": "Avg prompt throughput: *",
    "Speculative metrics": "Speculative metrics: *",
    "DiffusionDecoding": "DiffusionDecoding metrics: *",
    "server version": "vLLM (?:API )?server version *",
    "▀▄▀": "▀▄▀ █ +version +",  # in the logo of vLLM's start
    "LLM engine": r"Initializing an? (?:V\d )?LLM engine \(v",
    "non-default args": "non-default args: *",
    "Decode batch": "Decode batch",
    "server_args": "server_args=",
    "draft acceptance": "draft acceptance(?: rate)? *= *",
    "acc per pos": r"acc per pos *= *\(",
    "eval time": "(?<!prompt )eval time *= *",
    "processing task": "processing task",
    "stop processing": "stop processing: *",
    "implementation": "(?:adding speculative implementation|no implementations specified)",
    "p_min=": r"- n_max=(?=\d)",
    "model '": "loading (?:draft )?model '",
    "synthetic": "synthetic (?:speculative )?acceptance(?: is enabled|: )",
}
"""Marks by a word of each, for which a line is searched first: much faster."""
_MARK = re.compile("|".join(_MARKS.values()))
_ECHO = re.compile(r"Received request |(?:Receive|Finish): obj=|\"(?:prompt|content|input)\": *\"")
"""Stands before the text of a request, which may quote a log."""
_ENDS = {
    "SpecDecoding metrics:": re.compile(r"\s*Draft acceptance rate|.*Avg\s*Draft.*:\s*[\d.na]+%"),
    "Decode batch": re.compile(r".*#queue-req:\s*\d"),
}
"""Ends of the lines that are long enough to be folded."""
_MAX_FOLDS = 12
_STARTS = re.compile(
    r"\s*(?:\(|\[|\{|\d{4}-\d\d-\d\d|[A-Z][a-z]{2} [ \d]\d |\d+\.\d+\.\d{3}\.\d{3} |"
    r"(?:INFO|WARNING|ERROR|DEBUG)\b|Prefill batch|(?:slot|srv|llama_\w+) )"
)
"""Beginnings of a line of its own, which continues none before it."""
_ESCAPES = ("\x1b", "^[", "#033", "u001b", "x1b", "\\033")
_COLOURS = re.compile(r"(?:\x1b|\^\[|#033|\\u001b|\\x1b|\\033)\[[0-9;?]*[A-Za-z]|\x1b[@-Z\\-_]")
_CRI = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)) (?P<stream>stdout|stderr) "
    r"(?P<part>[PF])(?::\S*)? "
)
_MAX_BEFORE = 300
"""Characters in which CRI's fields stand."""
_TEXTS = ("message", "msg", "log", "MESSAGE", "textPayload", "line", "text", "event", "body")
_TIMES = ("asctime", "time", "timestamp", "ts", "@timestamp", "_timestamp")
_NAMES = (
    *("vllm_process_name", "process", "pid", "_PID", "container_name", "container", "pod"),
    *("pod_name", "namespace_name", "hostname", "host", "_HOSTNAME", "instance", "replica"),
)
_PROCESSES = (
    re.compile(r"\[pod/([^\]]+)\]"),  # kubectl logs --prefix
    re.compile(r"^\[(\d{2,7})\] "),  # a process, or a port of llama.cpp's router
    re.compile(r"^([\w.\-]+) +\| "),  # docker compose
    re.compile(r"(?:^|\s)([\w.\-@]+\[\d+\]): "),  # syslog, journald
    re.compile(r"(?:^|[\s/])((?=[a-z])[a-z0-9]+(?:-[a-z0-9]+){2,})(?=[\s:|>\]])"),  # a pod
    re.compile(r"\((\w[\w.\-]* pid=\d+(?:, ip=[\d.:]+)?)\)"),  # vLLM, Ray
    re.compile(r"\[\d{4}-\d\d-\d\d [\d:.]+((?: (?:DP|TP|PP|EP|ATTN_\w+)\d+)+)\]"),  # SGLang
)
_TIME = re.compile(
    r"(?:\d{4}-\d\d-\d\d[T ]|\d\d-\d\d |[A-Z][a-z]{2} [ \d]\d )\d\d:\d\d:\d\d|"
    r"\b\d+\.\d\d\.\d{3}\.\d{3}\b"
)


def engine_lines(source: Source) -> Iterator[Line]:
    """Lines with a mark of an engine, whole where their parts are there."""
    held: tuple[Line, Line] | None = None  # as it stands, and with what followed
    folds, earlier = 0, ""
    for spot, text, fields in _records(source):
        if earlier and not _STARTS.match(text) and _has_mark(earlier[-30:] + text.strip()[:30]):
            text = earlier + text.strip()  # folded within a mark
        marks = [*_MARK.finditer(text)] if _has_mark(text) else []
        marks = [] if marks and _ECHO.search(text, 0, marks[0].start()) else marks
        earlier = "" if marks else text.rstrip()
        is_more = not marks and folds < _MAX_FOLDS
        if held and is_more and not _STARTS.match(text) and not _TIME.search(text):
            held = held[0], replace(held[1], text=held[1].text.rstrip() + text.strip())
            folds += 1
            if not is_cut(held[1]):
                yield held[1]
                held = None
            continue
        if held is not None:
            yield held[0]
            held = None
        start = 0
        for found, after in zip_longest(marks, marks[1:]):
            before, end = text[start : found.start()], after.start() if after else len(text)
            start = found.end()
            names = [value for name, value in fields.items() if name != "time"]
            names += [name.strip() for pattern in _PROCESSES for name in pattern.findall(before)]
            process = " ".join(dict.fromkeys(names))
            times = _TIME.findall(before) or [fields.get("time", "")]
            mark = found[0].rstrip(" (=")
            line = Line(spot, mark, text[found.end() : end], before, process, times[-1])
            if after is None and is_cut(line):
                held, folds = (line, line), 0
            else:
                yield line
    if held is not None:
        yield held[0]


def is_cut(line: Line) -> bool:
    """Whether the end is missing that lines of this mark have."""
    end = _ENDS.get(line.mark)
    return end is not None and end.match(line.text) is None


def _records(source: Source) -> Iterator[tuple[Spot, str, dict[str, str]]]:
    """Texts that a server wrote in one piece, without colours, and their loggers' fields."""
    parts: dict[str, tuple[Spot, str]] = {}
    since_mark = _MAX_FOLDS
    for spot, line in text_lines(source):
        raw = line.rstrip("\n")
        text, fields = raw, dict[str, str]()
        is_cri = " stderr " in raw or " stdout " in raw
        if is_cri and (cri := _CRI.search(raw, 0, _MAX_BEFORE)):
            before, part = raw[: cri.start()], raw[cri.end() :]
            key, text, fields = before + cri["stream"], before + part, {"time": cri["time"]}
            first, begun = parts.pop(key, (spot, ""))
            if _has_mark(begun) and _has_mark(text):
                yield first, _plain(begun), fields  # its rest is not there
            elif begun:
                spot, text = first, begun + part
            if cri["part"] == "P":
                parts[key] = spot, text
                continue
        is_marked = _has_mark(text) or '"MESSAGE"' in text
        since_mark = 0 if is_marked else since_mark + 1
        if "{" in text and since_mark <= _MAX_FOLDS:
            text = _unwrapped(text, fields)
        yield spot, _plain(text), fields
    for spot, text in parts.values():
        yield spot, _plain(text), {}


def _has_mark(text: str) -> bool:
    """Whether a line may have a mark."""
    return any(word in text for word in _MARKS)


def _plain(text: str) -> str:
    """Without colours and hard blanks."""
    if any(escape in text for escape in _ESCAPES):
        text = _COLOURS.sub("", text)
    return text.replace("\xa0", " ")


def _unwrapped(text: str, fields: dict[str, str], depth: int = 3) -> str:
    """The message of a JSON logger, and its process and time in `fields`; other text as it is."""
    before, brace, rest = text.partition("{")
    try:
        found, _ = json.JSONDecoder(strict=False).raw_decode(brace + rest)
    except ValueError:
        return text
    records = [found, *(one for one in found.values() if isinstance(one, dict))]
    records += [one["labels"] for one in records[1:] if isinstance(one.get("labels"), dict)]
    for record in records:
        fields |= {
            key: str(record[key]) for key in _NAMES if isinstance(record.get(key), str | int)
        }
        for key in _TIMES:
            if isinstance(record.get(key), str):
                fields["time"] = record[key]
    for message in (_as_text(record.get(key)) for record in records for key in _TEXTS):
        if message is not None:
            return before + (_unwrapped(message, fields, depth - 1) if depth else message)
    return text


def _as_text(value: Any) -> str | None:
    """A message; journald has one with colours as a list of bytes."""
    if isinstance(value, list) and value and all(isinstance(n, int) and n < 256 for n in value):
        return bytes(value).decode(errors="replace")
    return value if isinstance(value, str) else None
