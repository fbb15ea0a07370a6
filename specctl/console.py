"""What the command line shows: tables, progress, errors. Quiet where no person looks."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from specctl.errors import OutputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from specctl.artifacts.describe import Description
    from specctl.artifacts.load import Artifact
    from specctl.collect.live import CollectSummary
    from specctl.runtime.requests import OnTokens, Request
    from specctl.train.report import FitReport

    TokenPrinter = Callable[[Any], OnTokens]


_WORD = re.compile(r"[^\s{}\[\],\"]+[,;]?")
_PROSE_WIDTH = 24
"""Columns at which prose that folds can still be read."""
PIPED_WIDTH = 1 << 16
"""Columns where no person looks: nothing is wrapped or cut, each row of a table is one line."""


class Ticker(Protocol):
    """Advances a progress bar."""

    def __call__(self, count: int = 1) -> None: ...


def prepare_output() -> None:
    """Makes standard output take what is shown, whatever the locale; absent (`>&-`) it is silent.

    What its encoding lacks is escaped: a fit that is done must not end over a Φ. What modules log
    is told as `warn` tells it.
    """
    if sys.stdout is None:
        # Takes its number, which no file of ours should have.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif hasattr(sys.stdout, "reconfigure"):  # tests put a StringIO in its place
        sys.stdout.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:  # which prints what no handler takes, on standard error
        logging.lastResort.setFormatter(logging.Formatter("warning: %(message)s"))


@contextmanager
def _told() -> Iterator[None]:
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


def show(renderable: Any) -> None:
    """Prints to standard output, colours on a terminal only.

    A terminal that is too narrow for a digest wraps the line itself: it can still be copied whole.
    """
    from rich.console import Console

    console = Console(highlight=False, width=None if is_terminal() else PIPED_WIDTH)
    console.width = max(console.width, _exact_width(renderable))
    with _told(), suppress(SystemExit):  # by which rich ends a command that nobody reads
        for part in _titles_apart(renderable):
            console.print(part)


def _exact_width(renderable: Any) -> int:
    """Columns at which no word of a sentence, and nothing exact of a table, is broken."""
    if isinstance(renderable, str):
        return max(map(len, renderable.split()), default=0)
    return int(getattr(renderable, "exact_width", 0))


def terminal_width() -> int | None:
    """Columns of the terminal that a person may be reading; None where there is none."""
    from rich.console import Console

    return Console().width if is_terminal() else None


def is_terminal() -> bool:
    """Whether a person may be reading standard output."""
    return sys.stdout.isatty()


def _titles_apart(renderable: Any) -> Iterator[Any]:
    """The parts of what is shown; a title is not folded to the width of its table, and brackets
    in a path are no markup."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if isinstance(renderable, Group):
        for part in renderable.renderables:
            yield from _titles_apart(part)
        return
    if isinstance(renderable, Table) and renderable.title is not None:
        title, renderable.title = renderable.title, None
        yield Text(title, "italic") if isinstance(title, str) else title
    yield Text(renderable) if isinstance(renderable, str) else renderable


def warn(line: str) -> None:
    """One line on standard error that needs attention and stops nothing."""
    sys.stderr.write(f"warning: {line}\n")


def show_lines(lines: Sequence[str], *, as_json: bool) -> None:
    """Prints texts one a line, or as a JSON list."""
    if as_json:
        show_json(list(lines))
    else:
        with _told():
            sys.stdout.write("".join(f"{line}\n" for line in lines))


def show_json(value: Any) -> None:
    """Prints one JSON value to standard output; NaN, which JSON lacks, becomes null.

    Letters of any script are printed as they are. What a terminal would obey or hide, such as a
    change of direction, and what the output's encoding lacks is escaped: readers of JSON find the
    same text.
    """
    from specctl.runtime.output import finite

    text = json.dumps(finite(value), indent=2, ensure_ascii=False)
    with _told():
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


def collect_lines(summary: CollectSummary) -> str:
    """What a collection did, for a person."""
    metrics = summary.metrics
    lines = [
        f"{summary.num_committed} prompts committed to {summary.out}"
        f" ({summary.num_skipped} were there before, {summary.num_planned} planned)",
    ]
    if metrics.calls:
        lines.append(
            f"{metrics.num_tokens} tokens, {metrics.calls} calls, "
            f"τ {metrics.mean_acceptance_length:.2f}, {metrics.tokens_per_s:.0f} tokens/s"
        )
    if summary.num_cut:
        lines.append(f"{summary.num_cut} conversations outgrew the context and were cut")
    if summary.num_dropped:
        lines.append(
            f"{summary.num_dropped} prompts with {summary.num_dropped_rounds} rounds were dropped, "
            "as writing fell behind; --resume decodes them again"
        )
    return "\n".join(lines)


def show_fit(
    artifact: Artifact,
    report: FitReport[Any],
    out: Path,
    *,
    as_json: bool,
) -> None:
    """What `specctl fit ...` prints once the artifact is written."""
    digest = artifact.digest
    if as_json:
        told = {
            "out": str(out),
            "artifact_digest": digest,
            "report": report.data.model_dump(mode="json"),
        }
        show_json(told)
    else:
        show(report.terminal())
        show(f"wrote {out}  {digest}")


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
    return _printer


def _printer(tokenizer: Any) -> OnTokens:
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


def render(description: Description, width: int | None = None) -> Any:
    """A rich renderable: facts above, decisions below. Names are shown, never read as markup.

    Its `exact_width` is the least width, in columns, at which no digest, key id, reference or time
    is broken: only prose folds, between its words.

    Args:
        width: columns that there are; rows of a table that needs more are shown as lines instead.
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
    table_width = 1 + sum(3 + _least_width(cells) for cells in columns)
    if width is not None and table_width > width:
        parts += _lines(description) if columns else []
        table_width = max(map(_longest_word, description.rows), default=0)
    elif columns:
        table = Table()
        for cells in columns:
            least = _least_width(cells)
            is_whole = least == max(map(len, cells))
            table.add_column(cells[0], overflow="fold", min_width=least, no_wrap=is_whole)
        for row in description.rows:
            table.add_row(*(Text(cell) for cell in row))
        parts.append(table)
    group: Any = Group(*parts)
    group.exact_width = max(facts_width, table_width)
    return group


def _lines(description: Description) -> Iterator[Any]:
    """Rows as lines of `column: value`, an empty line before each; `-` says nothing."""
    from rich.text import Text

    for row in description.rows:
        yield Text("")
        for column, value in zip(description.columns, row, strict=True):
            if value != "-":
                yield Text.assemble((f"{column}: ", "bold"), value)


def _longest_word(cells: tuple[str, ...]) -> int:
    """Characters of the longest word; long JSON is no word, and may be broken."""
    return max((len(word) for cell in cells for word in _WORD.findall(cell)), default=0)


def _least_width(cells: tuple[str, ...]) -> int:
    """Of a column: prose that folds keeps a width at which it can be read."""
    return max(_longest_word(cells), min(_PROSE_WIDTH, max(map(len, cells))))
