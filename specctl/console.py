"""Output of the command line: tables, progress, warnings, JSON."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from specctl.errors import OutputError, reason_of
from specctl.formatting import Detail, Table
from specctl.progress import Tick, show_progress

_DIGEST = re.compile(r"((?:sha256|ed25519):[0-9a-f]{12})[0-9a-f]{52}")
LINE_S = 10.0
"""Time between lines of progress off a terminal."""
PIPED_WIDTH = 1 << 16
"""Columns in a pipe, so that no text is wrapped or cut."""


@dataclass(frozen=True)
class Answer:
    """The result of a verb.

    Attributes:
        data: the answer as JSON.
        parts: the answer as text, the verdict first: sentences, tables, descriptions, groups of
            them. A list of strings is printed line by line, never folded.
        then: called after printing; may raise.
    """

    data: Any
    parts: Sequence[Any]
    then: Callable[[], object] = lambda: None


has_answered = False
"""Whether this process has printed an answer to standard output."""


def say(answer: Answer | None, *, as_json: bool, wide: bool = False) -> None:
    """Prints an answer to standard output, as JSON or as text."""
    global has_answered
    if answer is None:
        return
    has_answered = True
    if as_json:
        show_json(answer.data)
    else:
        for part in answer.parts:
            show(part, wide=wide)
    answer.then()


class _Warnings(logging.Handler):
    """Shows warnings of the package's modules as lines of the command line."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(record.getMessage())


def prepare_output() -> None:
    """Prepares standard output for any locale; a closed one (`>&-`) stays silent.

    Characters that its encoding lacks are escaped: a fit must not fail at its end over a Φ. Log
    records of modules are shown by `warn`, and progress by `progress`.
    """
    global has_answered
    has_answered = False
    show_progress(progress)
    if sys.stdout is None:
        # Takes its number, which no file of ours should have.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif hasattr(sys.stdout, "reconfigure"):  # tests put a StringIO in its place
        sys.stdout.reconfigure(errors="backslashreplace")
    ours = logging.getLogger("specctl")
    if not any(isinstance(one, _Warnings) for one in ours.handlers):
        ours.addHandler(_Warnings(logging.WARNING))


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Tick]:
    """A bar on standard error; off a terminal, a line every `LINE_S`. None: unknown total."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        with lines_of_progress(label, total) as tick:
            yield tick
        return
    columns = rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn()
    elapsed, left = rich.TimeElapsedColumn(), rich.TimeRemainingColumn()
    times = elapsed, rich.TextColumn("so far,"), left, rich.TextColumn("left")
    with rich.Progress(*columns, *times, console=console) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


@dataclass(eq=False)
class _Counted:
    """Work that a line of progress names."""

    label: str
    total: int | None
    done: int = 0

    def __str__(self) -> str:
        known = f" of {self.total:,}" if self.total is not None else ""
        return f"{self.label}: {self.done:,}{known}" if known or self.done else self.label


_work: list[_Counted] = []
"""The work under way, outermost first; the outermost has the thread that writes the lines."""


@contextmanager
def lines_of_progress(label: str, total: int | None = None) -> Iterator[Tick]:
    """A line on standard error every `LINE_S`, off a terminal, with all work under way."""
    own, is_over = _Counted(label, total), threading.Event()
    _work.append(own)
    thread = threading.Thread(target=_report, args=(is_over,), name="progress", daemon=True)
    if _work[0] is own:
        thread.start()

    def advance(count: int) -> None:
        own.done += count

    try:
        yield advance
    finally:
        _work.remove(own)
        if thread.is_alive():
            is_over.set()
            thread.join()


def _report(is_over: threading.Event) -> None:
    started = time.monotonic()
    while not is_over.wait(LINE_S):
        from rich.console import Console

        with suppress(AttributeError, OSError, ValueError):  # standard error was closed
            if Console(stderr=True).is_terminal:  # whose bars say it
                return
            spent = timedelta(seconds=round(time.monotonic() - started))
            sys.stderr.write(f"{', '.join(map(str, _work))}, {spent} so far\n")
            sys.stderr.flush()


@contextmanager
def no_warnings() -> Iterator[None]:
    """Suppresses the warnings of work that runs again later."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _written() -> Iterator[None]:
    """Flushes standard output after the block, to report a full disk as any other output error.

    If the reader has gone (`| head`), the command ends as usual.

    Raises:
        OutputError: standard output cannot be written.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no second attempt
        if isinstance(error, BrokenPipeError):
            return
        raise OutputError(
            f"standard output cannot be written: {reason_of(error)}",
            hint="free space, or send it elsewhere; what the command wrote before this is kept",
        ) from error


def show(part: Any, *, wide: bool = False) -> None:
    """Prints a part of an answer, with colours only on a terminal.

    Tables always fit the width of the terminal. Texts fold between words, only on a terminal.

    Args:
        wide: details, all columns and whole digests; in a pipe, each row of a table is one line.
    """
    from rich.console import Console
    from rich.text import Text

    for piece in _pieces(part, wide=wide):
        console = Console(highlight=False)
        if isinstance(piece, Table):
            console.width = PIPED_WIDTH if wide and not is_terminal() else console.width
            piece = (piece if wide else _with_short_ids(piece.narrow())).fitted(console.width)
        text = piece
        if isinstance(piece, str):
            text = Text(piece)
        if isinstance(text, Text):
            longest = max(map(len, text.plain.split()), default=0)
            console.width = max(console.width if is_terminal() else PIPED_WIDTH, longest)
        with _written(), suppress(SystemExit):  # rich's end of a command whose reader has gone
            if isinstance(piece, list):
                sys.stdout.write("".join(f"{line}\n" for line in piece))
            else:
                console.print(text)


def _pieces(part: Any, *, wide: bool) -> Iterator[Any]:
    """Lists of lines, texts, and tables without their title and legend."""
    from rich.text import Text

    from specctl.artifacts.card import Description

    if not wide and (isinstance(part, Detail) or (isinstance(part, Table) and part.is_detail)):
        return
    if isinstance(part, Description):
        yield from [part.verdict] if part.verdict else []
        yield Text(part.title, "bold")
        facts = part.facts + (part.details if wide else ())
        yield from _pieces(Table("", ("", ""), facts, left=2), wide=wide)
        columns, left = part.columns, len(part.columns)
        rows = Table("", columns, part.rows, part.legend, left=left, wide=part.wide)
        yield from _pieces(rows, wide=wide)
    elif isinstance(part, Table):
        if part.title:
            yield Text(part.title, "italic")
        if part.rows:
            yield part
        if part.legend:
            yield part.legend
    else:
        yield part


def _with_short_ids(table: Table) -> Table:
    """The table with the first twelve digits of each digest."""
    rows = [[_DIGEST.sub(r"\1", cell) for cell in row] for row in table.rows]
    return replace(table, rows=rows)


def is_terminal() -> bool:
    """Whether a person may be reading standard output."""
    return sys.stdout.isatty()


def warn(line: str) -> None:
    """Prints a warning on standard error."""
    sys.stderr.write(f"warning: {line}\n")


def note(line: str) -> None:
    """Prints a line on standard error that is no warning."""
    sys.stderr.write(f"{line}\n")


def show_json(value: Any) -> None:
    """Prints one JSON value to standard output; NaN, which JSON lacks, becomes null.

    Letters of any script are printed as they are. What a terminal would obey or hide, such as a
    change of direction, and what the output's encoding lacks is escaped: readers of JSON find the
    same text.
    """
    from specctl.records import finite

    text = json.dumps(finite(value), indent=2, ensure_ascii=False)
    with _written():
        sys.stdout.write("".join(c if _is_plain(c) else json.dumps(c)[1:-1] for c in text) + "\n")


def _is_plain(character: str) -> bool:
    """Whether a character can be encoded for standard output and is visible on a terminal."""
    if character.isascii() or not character.isprintable():
        return character.isprintable() or character == "\n"
    try:
        character.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
