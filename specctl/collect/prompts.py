"""Prompt files to prompts. Malformed input is refused by line.

| format       | keys read                                             | decoded as       |
|--------------|-------------------------------------------------------|------------------|
| `spec-bench` | turns, question_id, category                          | chat             |
| `humaneval`  | prompt, task_id                                       | raw continuation |
| `gsm8k`      | question, answer (the number after ####), id          | chat             |
| `sharegpt`   | conversations (the human turns only), id              | chat             |
| `jsonl`      | prompt or turns, id, category, answer, raw            | chat unless raw  |
| `text`       | one line is one prompt                                | chat             |

`specctl.runtime.conversations.conversation_ids` makes token ids of a prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

from specctl.answers import final_answer
from specctl.durable import file_sha256
from specctl.embedded import PROMPTS
from specctl.errors import PromptError, PromptLineError, UsageError

EMBEDDED = "embedded"
Row = Mapping[str, Any]
MAX_NAME_BYTES = 256
"""Of ids and categories, which stand in every row."""


@dataclass(frozen=True)
class Prompt:
    """One unit of collection and of splits.

    Attributes:
        prompt_id: unique within the source, stable between runs.
        category: empty where unknown.
        turns: what the user says, at least one, none blank.
        answer: the checkable answer, or None.
        chat: wrap it in the tokenizer's chat template; off for text to be continued as it is.
    """

    prompt_id: str
    category: str
    turns: tuple[str, ...]
    answer: str | None = None
    chat: bool = True


@dataclass(frozen=True)
class Naming:
    """How a prompt without an id is distinguished from another one in its place.

    Attributes:
        key: of the digest of its text; without one, anyone can confirm a guessed text.
        by_file: by a digest of the whole file instead.
    """

    key: bytes = b""
    by_file: bool = False

    def mark(self, turns: tuple[str, ...], path: str) -> str:
        """Eight digits."""
        if self.by_file:
            return _file_digest(path, os.stat(path).st_mtime_ns)[:8]
        text = "\0".join(turns).encode()
        if self.key:
            return hashlib.blake2b(text, key=self.key, digest_size=4, person=b"prompt").hexdigest()
        return hashlib.sha256(text).hexdigest()[:8]


BY_TEXT = Naming()


@cache
def _file_digest(path: str, modified_ns: int) -> str:
    del modified_ns  # another time, another file
    return file_sha256(Path(path))


@dataclass(frozen=True)
class Spot:
    """Where in a file a record stands: its 1-based line, or item of a JSON array."""

    path: str
    number: int
    unit: str = "line"
    naming: Naming = BY_TEXT

    def refuse(self, expected: str, found: str, fix: str = "correct it") -> PromptError:
        """The error for this record."""
        if self.unit == "line":
            return PromptLineError(self.path, self.number, expected=expected, found=found, fix=fix)
        what = f"{self.path}, {self.unit} {self.number}"
        return PromptError(what, expected=expected, found=found, fix=fix)


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
            decide (see the table above).
        limit: prompts at most; later ones are neither read nor checked.
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


# --------------------------------------------------------------------------- formats


def detect_format(row: Row, spot: Spot) -> str:
    """The format that the keys of the first record belong to.

    Raises:
        PromptError: none, or several that would read different texts from it.
    """
    claims = {
        "turns": "spec-bench" if "question_id" in row else "jsonl",
        "prompt": "humaneval" if "task_id" in row else "jsonl",
        "question": "gsm8k",
        "conversations": "sharegpt",
    }
    matching = [name for key, name in claims.items() if key in row]
    if len(matching) == 1:
        return matching[0]
    raise spot.refuse(
        f"the keys of one format among {', '.join(READERS)}",
        f"keys {sorted(row)[:8]} of {' and '.join(matching) or 'none'}",
        "state the format with --format",
    )


def read_spec_bench(row: Row, spot: Spot) -> Prompt:
    """Spec-Bench and MT-Bench `question.jsonl`."""
    turns = _turns(row, spot)
    name = _identifier(row, spot, "question_id", turns)
    return Prompt(name, _category(row, spot), turns)


def read_humaneval(row: Row, spot: Spot) -> Prompt:
    """HumanEval: code to be continued, so no chat template."""
    turns = (_text(row, "prompt", spot),)
    return Prompt(_identifier(row, spot, "task_id", turns), "code", turns, chat=False)


def read_gsm8k(row: Row, spot: Spot) -> Prompt:
    """GSM8K; the worked solution is kept as its final number."""
    answer = final_answer(_text(row, "answer", spot))
    if not answer:
        raise spot.refuse("an answer that ends in '#### <number>'", "no final number")
    turns = (_text(row, "question", spot),)
    return Prompt(_identifier(row, spot, "id", turns), "arithmetic", turns, answer)


def read_sharegpt(row: Row, spot: Spot) -> Prompt:
    """ShareGPT: the human turns; the replies and system texts are not ours to repeat."""
    messages = row.get("conversations")
    if not isinstance(messages, list):
        raise spot.refuse("'conversations' as a list", _kind(messages))
    turns = tuple(
        _text(message, "value", spot)
        for message in messages
        if _is_row(message, spot) and message.get("from") in ("human", "user")
    )
    if not turns:
        raise spot.refuse("a conversation with a human turn", "none", "remove it")
    return Prompt(_identifier(row, spot, "id", turns), "chat", turns)


def read_jsonl(row: Row, spot: Spot) -> Prompt:
    """The format of the embedded set: `prompt` or `turns`, the rest optional."""
    if ("prompt" in row) == ("turns" in row):
        raise spot.refuse("one of 'prompt' and 'turns'", "both" if "prompt" in row else "neither")
    raw = row.get("raw", False)
    if not isinstance(raw, bool):
        raise spot.refuse("'raw' as true or false", _kind(raw))
    turns = _turns(row, spot) if "turns" in row else (_text(row, "prompt", spot),)
    return Prompt(
        _identifier(row, spot, "id", turns),
        _category(row, spot),
        turns,
        _optional(row, "answer", spot),
        chat=not raw,
    )


READERS: dict[str, Callable[[Row, Spot], Prompt]] = {
    "spec-bench": read_spec_bench,
    "humaneval": read_humaneval,
    "gsm8k": read_gsm8k,
    "sharegpt": read_sharegpt,
    "jsonl": read_jsonl,
}
"""Formats whose records are JSON objects."""
FORMATS = ("auto", "text", *READERS)


def check_text(text: object, name: str, spot: Spot) -> str:
    """A string with something in it that UTF-8 can hold.

    JSON can spell half a surrogate pair, which no tokenizer can encode.
    """
    if not isinstance(text, str):
        raise spot.refuse(f"{name} as a string", _kind(text))
    if not text.strip():
        raise spot.refuse(f"{name} with text in it", "a blank string")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise spot.refuse(f"{name} as Unicode text", "half a surrogate pair")
    return text


def check_name(text: object, name: str, spot: Spot) -> str:
    """A text that stands in every row, of at most `MAX_NAME_BYTES`."""
    num_bytes = len(check_text(text, name, spot).encode())
    if num_bytes > MAX_NAME_BYTES:
        raise spot.refuse(f"{name} of at most {MAX_NAME_BYTES} bytes", str(num_bytes), "shorten it")
    return str(text)


def _text(row: Row, key: str, spot: Spot) -> str:
    if key not in row:
        raise spot.refuse(f"key {key!r}", f"keys {sorted(row)[:8]}")
    return check_text(row[key], repr(key), spot)


def _turns(row: Row, spot: Spot) -> tuple[str, ...]:
    turns = row.get("turns")
    if not isinstance(turns, list):
        raise spot.refuse("'turns' as a list of strings", _kind(turns))
    if not turns:
        raise spot.refuse("at least one turn", "an empty list")
    return tuple(check_text(turn, "each turn", spot) for turn in turns)


def _optional(row: Row, key: str, spot: Spot) -> str | None:
    return None if row.get(key) is None else check_text(row[key], repr(key), spot)


def _category(row: Row, spot: Spot) -> str:
    return "" if row.get("category") is None else check_name(row["category"], "'category'", spot)


def spot_id(spot: Spot, turns: tuple[str, ...]) -> str:
    """Id of a prompt without one: its place, and eight digits that tell it from others.

    The place alone would let `--resume` with another file take its line 3 for one already done.
    """
    return f"{spot.unit}-{spot.number}-{spot.naming.mark(turns, spot.path)}"


def _identifier(row: Row, spot: Spot, key: str, turns: tuple[str, ...]) -> str:
    """The record's own id, or one from its place and text."""
    found = row.get(key)
    if found is None:
        return spot_id(spot, turns)
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    return check_name(found, repr(key), spot)


def _is_row(value: object, spot: Spot) -> bool:
    if not isinstance(value, dict):
        raise spot.refuse("messages as objects with 'from' and 'value'", _kind(value))
    return True


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}
    return "nothing" if value is None else names.get(type(value), "a number")
