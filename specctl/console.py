"""Output of the command line: tables, progress, errors. Quiet where no person looks."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from specctl.errors import OutputError, UsageError

if TYPE_CHECKING:
    from specctl.artifacts.describe import Description
    from specctl.runtime.requests import OnTokens, Request

    TokenPrinter = Callable[[Any], OnTokens]

_WORD = re.compile(r"[^\s{}\[\],\"]+[,;]?")
_PROSE_WIDTH = 24
"""Columns at which prose that folds can still be read."""
PIPED_WIDTH = 1 << 16
"""Columns where no person looks: nothing is wrapped or cut, each row of a table is one line."""


class Ticker(Protocol):
    """Advances a progress bar."""

    def __call__(self, count: int = 1) -> None: ...


@dataclass(frozen=True)
class Answer:
    """The result of a verb.

    Attributes:
        data: JSON for scripts.
        parts: for a person, one below the other: texts, rich renderables, descriptions. A list of
            texts is printed as it stands, one a line, also where a terminal is narrower.
        then: called once it is said; may refuse.
    """

    data: Any
    parts: Sequence[Any]
    then: Callable[[], object] = lambda: None


def say(answer: Answer | None, *, as_json: bool) -> None:
    """Prints an answer to standard output, for a script or for a person."""
    if answer is None:
        return
    if as_json:
        show_json(answer.data)
    else:
        for part in answer.parts:
            show(part)
    answer.then()


def prepare_output() -> None:
    """Makes standard output take what is shown, whatever the locale; absent (`>&-`) it is silent.

    What its encoding lacks is escaped: a fit that is done must not end over a Φ. What modules log
    is shown as `warn` shows it.
    """
    if sys.stdout is None:
        # Takes its number, which no file of ours should have.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif hasattr(sys.stdout, "reconfigure"):  # tests put a StringIO in its place
        sys.stdout.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:  # which prints what no handler takes, on standard error
        logging.lastResort.setFormatter(logging.Formatter("warning: %(message)s"))


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Ticker]:
    """A progress bar on standard error, shown only on a terminal; None: the end is not known."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count=1: bar.advance(task, count)


@contextmanager
def _written() -> Iterator[None]:
    """Writes what is shown at once, so that an output that is full is refused like any other.

    A reader that has gone, as `head` does, wants no more: the command ends as it would have.

    Raises:
        OutputError: standard output cannot be written.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is tried again
        if isinstance(error, BrokenPipeError):
            return
        raise OutputError(
            "standard output",
            expected="a place that can be written",
            found=error.strerror or type(error).__name__,
            fix="free space, or send it elsewhere; what the command wrote before this is kept",
        ) from error


def show(part: Any) -> None:
    """Prints a part of an answer, colours on a terminal only.

    A terminal that is too narrow for a digest wraps the line itself: it can still be copied whole.
    """
    from rich.console import Console
    from rich.text import Text

    from specctl.artifacts.describe import Description

    if isinstance(part, list):
        with _written():
            sys.stdout.write("".join(f"{line}\n" for line in part))
        return
    console = Console(highlight=False, width=None if is_terminal() else PIPED_WIDTH)
    if isinstance(part, Description):
        part = render(part, console.width)
    exact = getattr(part, "exact_width", 0)
    if isinstance(part, str):  # no word of a sentence is broken
        exact = max(map(len, part.split()), default=0)
    console.width = max(console.width, exact)
    with _written(), suppress(SystemExit):  # by which rich ends a command that nobody reads
        for one in _titles_apart(part):
            console.print(Text(one) if isinstance(one, str) else one)


def is_terminal() -> bool:
    """Whether a person may be reading standard output."""
    return sys.stdout.isatty()


def _titles_apart(part: Any) -> Iterator[Any]:
    """The pieces of a part; a title is not folded to the width of its table."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if isinstance(part, Group):
        for one in part.renderables:
            yield from _titles_apart(one)
        return
    if isinstance(part, Table) and part.title is not None:
        title, part.title = part.title, None
        yield Text(title, "italic") if isinstance(title, str) else title
    yield part


def warn(line: str) -> None:
    """One line on standard error that needs attention and stops nothing."""
    sys.stderr.write(f"warning: {line}\n")


def show_json(value: Any) -> None:
    """Prints one JSON value to standard output; NaN, which JSON lacks, becomes null.

    Letters of any script are printed as they are. What a terminal would obey or hide, such as a
    change of direction, and what the output's encoding lacks is escaped: readers of JSON find the
    same text.
    """
    from specctl.runtime.output import finite

    text = json.dumps(finite(value), indent=2, ensure_ascii=False)
    with _written():
        sys.stdout.write("".join(c if _is_plain(c) else json.dumps(c)[1:-1] for c in text) + "\n")


def _is_plain(character: str) -> bool:
    """Whether standard output holds a character, and a terminal shows it."""
    if character.isascii() or not character.isprintable():
        return character.isprintable() or character == "\n"
    try:
        character.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def token_printer(*, stream: bool, batch_size: int, as_json: bool) -> TokenPrinter | None:
    """Prints each text as it is emitted, a heading before each; None unless asked for.

    Raises:
        UsageError: texts of one batch would run into each other, or into the JSON.
    """
    if not stream:
        return None
    if batch_size != 1 or as_json:
        raise UsageError(
            "--stream",
            expected="--batch-size 1 and no --json",
            found=f"--batch-size {batch_size}{' --json' if as_json else ''}",
            fix="leave one of them out",
        )

    def printer(tokenizer: Any) -> OnTokens:
        from specctl.runtime.conversations import TextStream

        streams: dict[str, Any] = {}

        def on_tokens(request: Request, tokens: list[int]) -> None:
            if request.request_id not in streams:
                streams.clear()
                streams[request.request_id] = TextStream(tokenizer)
                sys.stdout.write(f"\n--- {request.request_id}\n")
            sys.stdout.write(streams[request.request_id].feed(tokens))
            sys.stdout.flush()

        return on_tokens

    return printer


def render(description: Description, width: int | None = None) -> Any:
    """A rich renderable: facts above, decisions below. Names are shown, never read as markup.

    Its `exact_width` is the least width, in columns, at which no digest, key id, reference or time
    is broken: only prose folds, between its words.

    Args:
        width: columns that there are; rows of a table that needs more are shown as lines of
            `column: value` instead.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for label, value in description.facts:
        facts.add_row(Text(label, "bold"), Text(value))
    parts: list[Any] = [Text(description.title, "bold", overflow="fold"), facts]
    labels = (len(label) for label, _ in description.facts)
    values = (description.title, *(value for _, value in description.facts))
    facts_width = max(labels, default=0) + 4 + _longest_word(values)

    columns = list(zip(description.columns, *description.rows, strict=True))
    # Prose that folds keeps a width at which it can be read.
    prose = [min(_PROSE_WIDTH, max(map(len, cells))) for cells in columns]
    least = [max(_longest_word(cells), low) for cells, low in zip(columns, prose, strict=True)]
    table_width = 1 + sum(3 + own for own in least)
    if width is not None and table_width > width:
        for row in description.rows:
            parts.append(Text(""))
            for column, value in zip(description.columns, row, strict=True):
                if value != "-":
                    parts.append(Text.assemble((f"{column}: ", "bold"), value))
        table_width = max(map(_longest_word, description.rows), default=0)
    elif columns:
        table = Table()
        for cells, own in zip(columns, least, strict=True):
            is_whole = own == max(map(len, cells))
            table.add_column(cells[0], overflow="fold", min_width=own, no_wrap=is_whole)
        for row in description.rows:
            table.add_row(*map(Text, row))
        parts.append(table)
    group: Any = Group(*parts)
    group.exact_width = max(facts_width, table_width)
    return group


def _longest_word(cells: Iterable[str]) -> int:
    """Characters of the longest word; long JSON is no word, and may be broken."""
    return max((len(word) for cell in cells for word in _WORD.findall(cell)), default=0)
