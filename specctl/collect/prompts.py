"""Prompt files to prompts. Malformed input is refused by line.

How a prompt becomes token ids (chat template or plain text) is the runtime's to say:
`specctl.runtime.conversations.conversation_ids`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from specctl.collect.formats import (
    BY_TEXT,
    READERS,
    Naming,
    Prompt,
    Row,
    Spot,
    check_text,
    detect_format,
    spot_id,
)
from specctl.embedded import PROMPTS
from specctl.errors import PromptError, UsageError

EMBEDDED = "embedded"
FORMATS = ("auto", "text", *READERS)


def load_prompts(
    source: str | Path,
    *,
    format: str = "auto",
    limit: int | None = None,
    naming: Naming = BY_TEXT,
) -> list[Prompt]:
    """Reads prompts in file order.

    Args:
        source: a file, or `embedded` for the set that ships with the package (`./embedded` for
            a file of that name).
        format: one of `FORMATS`. `auto`: `.txt` is text, otherwise the keys of the first record
            decide (see `specctl.collect.formats`).
        limit: prompts at most; what follows is neither read nor checked.
        naming: of prompts without an id.

    Raises:
        UsageError: an unknown format, or a limit below 1.
        PromptError: no such file, not a file, nothing in it, no format that fits, or one id
            twice; `PromptLineError` where one line is to blame.
    """
    _check_options(format, limit)
    path = _resolve(source)
    with readable(path):
        prompts = _unique(_parse(path, format, naming), limit)
    if not prompts:
        raise PromptError(
            str(path), expected="at least one prompt", found="none", fix="fill the file"
        )
    return prompts


def load_prompt_files(
    sources: Sequence[str | Path], *, format: str = "auto", limit: int | None = None
) -> list[Prompt]:
    """The prompts of several files, in order; see `load_prompts`.

    Args:
        limit: prompts of each file at most.

    Raises:
        PromptError: one id in two files, beside what `load_prompts` refuses.
    """
    found: dict[str, Prompt] = {}
    for source in sources:
        for prompt in load_prompts(source, format=format, limit=limit):
            if prompt.prompt_id in found:
                raise PromptError(
                    str(source),
                    expected="ids that no other file has",
                    found=repr(prompt.prompt_id),
                    fix="rename one of them",
                )
            found[prompt.prompt_id] = prompt
    return list(found.values())


def _check_options(format: str, limit: int | None) -> None:
    if format not in FORMATS:
        raise UsageError(
            "--format",
            expected=f"one of {', '.join(FORMATS)}",
            found=repr(format),
            fix="name one of them",
        )
    if limit is not None and limit < 1:
        raise UsageError(
            "--limit", expected="at least 1", found=str(limit), fix="leave it out to read all"
        )


def _resolve(source: str | Path) -> Path:
    if source == EMBEDDED:
        return PROMPTS
    path = Path(source)
    if not path.is_file():
        raise PromptError(
            str(path),
            expected="a prompt file",
            found="a folder" if path.is_dir() else "no such file",
            fix=f"name a file, or {EMBEDDED!r}",
        )
    return path


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns the operating system's refusals to read into `PromptError` naming `path`."""
    try:
        yield
    except OSError as error:
        raise PromptError(
            str(path),
            expected="a file that can be read",
            found=error.strerror or type(error).__name__,
            fix="correct its permissions",
        ) from error


def _parse(path: Path, format: str, naming: Naming) -> Iterator[tuple[Spot, Prompt]]:
    if format == "text" or (format == "auto" and path.suffix == ".txt"):
        for spot, line in _filled_lines(path, naming):
            text = check_text(line.rstrip("\r\n"), "the line", spot)
            yield spot, Prompt(spot_id(spot, (text,)), "", (text,))
        return
    for spot, row in json_rows(path, naming):
        format = detect_format(row, spot) if format == "auto" else format
        yield spot, READERS[format](row, spot)


def _unique(parsed: Iterator[tuple[Spot, Prompt]], limit: int | None) -> list[Prompt]:
    """Collects prompts; an id used twice would merge two units of splitting into one."""
    first: dict[str, Spot] = {}
    prompts = []
    for spot, prompt in islice(parsed, limit):
        earlier = first.setdefault(prompt.prompt_id, spot)
        if earlier is not spot:
            found = f"{prompt.prompt_id!r}, which {earlier.unit} {earlier.number} has too"
            raise spot.refuse("an id that is not used yet", found)
        prompts.append(prompt)
    return prompts


def _lines(path: Path, naming: Naming) -> Iterator[tuple[Spot, str]]:
    """All lines. Split at line feeds alone: JSON strings may hold U+2028."""
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            spot = Spot(str(path), number, naming=naming)
            yield spot, _decode(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw, spot)


def _filled_lines(path: Path, naming: Naming) -> Iterator[tuple[Spot, str]]:
    return ((spot, line) for spot, line in _lines(path, naming) if line.strip())


def _decode(raw: bytes, spot: Spot) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
        raise spot.refuse("UTF-8", found, "convert the file to UTF-8") from error


def json_rows(path: Path, naming: Naming = BY_TEXT) -> Iterator[tuple[Spot, Row]]:
    """Objects of a JSON-lines file, or of one JSON array (as ShareGPT is published)."""
    start, first = next(_filled_lines(path, naming), (Spot(str(path), 1), ""))
    if first.lstrip().startswith("["):
        text = "".join(line for _, line in _lines(path, naming))
        items = _json(text, replace(start, number=1))
        spots = (replace(start, number=number, unit="item") for number in count(1))
        yield from ((spot, _object(item, spot)) for spot, item in zip(spots, items, strict=False))
    else:
        yield from (
            (spot, _object(_json(line, spot), spot)) for spot, line in _filled_lines(path, naming)
        )


def _json(text: str, spot: Spot) -> Any:
    """The value of a text that starts at `spot`; a syntax error is refused where it stands."""
    try:
        return json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        at = replace(spot, number=spot.number + error.lineno - 1)
        found = f"{error.msg} at column {error.colno}"
        raise at.refuse("JSON", found, "correct it, or state --format text") from error
    except (ValueError, RecursionError) as error:  # a huge number, or nested too deep
        raise spot.refuse("JSON of sane size", str(error), "remove it") from error


def _object(value: object, spot: Spot) -> Row:
    if not isinstance(value, dict):
        raise spot.refuse("a JSON object", f"a {type(value).__name__}")
    return value
