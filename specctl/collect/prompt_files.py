"""Entries of files of prompts and responses, and the count of those that cannot be used.

| file                                               | entry                      |
|----------------------------------------------------|----------------------------|
| JSON lines                                         | an object or text, a line  |
| JSON: one array, objects over several lines, or an | an item                    |
| object whose only list holds the entries           |                            |
| CSV with a header; commas, semicolons, tabs, bars  | a row                      |
| Parquet, with the keys as columns                  | a row                      |
| `.txt`, or any file with `--format text`           | a line that is not blank   |

All but Parquet may be compressed by gzip, bzip2 or xz, be UTF-8, UTF-16 or UTF-32, and have line
ends of any system. Keys are read without regard to capitals.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from specctl.contents import HEAD_BYTES, encoding_of, no_text, unpacked
from specctl.durable import file_sha256
from specctl.errors import PromptError, PromptLineError, reason_of, shown
from specctl.runtime.config import PromptFormat

log = logging.getLogger(__name__)
A = TypeVar("A")
B = TypeVar("B")
MAX_NAME_BYTES = 256
"""Longest id or category; every row repeats them."""
SHOWN_PLACES = 4
"""Places that a count of skipped entries names."""
TALKS = ("messages", "conversations", "conversation", "turns")
TEXTS = ("prompt", "instruction", "question", "text", "input")
IDS = ("custom_id", "prompt_id", "question_id", "task_id", "id", "conversation_id", "uuid", "_id")
ANSWERS = ("response", "token_ids")
OTHERS = (
    *("url", "error", "context", "system", "system_prompt", "image", "images", "history", "role"),
    *("entry_point", "category", "answer", "raw", "eos"),
)
TEXT_KEYS = frozenset((*TALKS, *TEXTS, *ANSWERS, "body"))
"""Keys of texts; an entry has one of them."""
KEYS = TEXT_KEYS.union(IDS, OTHERS)
"""All keys that are read."""
_SHOWN = re.compile(r"\S")
_PAGES = (b"<!doctype html", b"<html")
"""First bytes of a web page, in lower case."""
LONE = "\x1f"
"""Delimiter of a table of one column, in which a comma is text."""


@dataclass(frozen=True)
class Entry:
    """One entry of a file."""

    path: str
    number: int = 1
    unit: str = "line"  # or item, or row
    # Stands in ids in place of the text's digest, which lets others confirm a guessed text.
    mark: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)  # what has a value

    def refuse(self, reason: str, detail: str = "", *, hint: str = "") -> PromptLineError:
        """The error for this entry.

        Args:
            reason: equal for all entries of one kind.
            detail: of this entry.
        """
        return PromptLineError(self.path, f"{self.unit} {self.number}", reason, detail, hint=hint)

    def holding(self, value: object) -> Entry | PromptLineError:
        """This entry with the value of its JSON: an object, a text, or a list of messages."""
        if isinstance(value, str):
            value = {"prompt": value}
        elif isinstance(value, list) and value and all(map(is_message, value)):
            value = {"messages": value}
        if not isinstance(value, dict):
            return self.refuse(f"{kind(value)}, not a JSON object")
        row = {name.strip().lower(): one for name, one in value.items() if one is not None}
        return replace(self, row=row)

    def text(self, value: object, name: str) -> str:
        """A text that can be encoded. JSON can spell half a surrogate pair, which cannot."""
        if not isinstance(value, str):
            raise self.refuse(f"{name} must be a string, not {kind(value)}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.refuse(f"{name} contains half a surrogate pair") from error
        return value

    def name(self, key: str) -> str:
        """A short text or number under a key; empty if there is none."""
        value = self.row.get(key, "")
        if isinstance(value, dict) and len(value) == 1:  # {"$oid": ...} of MongoDB's exports
            value = value.get("$oid", value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(int(value) if value == value // 1 else value)
        text = self.text(value, repr(key)).strip()
        if len(text.encode()) > MAX_NAME_BYTES:
            raise self.refuse(f"{key!r} has more than {MAX_NAME_BYTES} bytes")
        return text

    def identifier(self, turns: Sequence[str] | None) -> str | None:
        """The entry's own id, or its place in the file if `turns` are known, see `place_name`."""
        found = next(filter(None, map(self.name, IDS)), None)
        return self.place_name(turns) if found is None and turns is not None else found

    def place_name(self, turns: Sequence[str]) -> str:
        """The entry's place, and eight digits of a digest of its turns or of the file.

        With the place alone, `--resume` with another file would take its line 3 as done.
        """
        mark = self.mark or hashlib.sha256("\0".join(turns).encode()).hexdigest()[:8]
        return f"{self.unit}-{self.number}-{mark}"

    def keys(self) -> str:
        """The keys that have a value, for an error message."""
        found = ", ".join(map(repr, sorted(self.row)[:8])) or "none"
        return f"{'columns' if self.unit == 'row' else 'keys'} with a value: {found}"


def kind(value: object) -> str:
    """A JSON value's kind, in words."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}
    kinds |= {type(None): "nothing", int: "a number", float: "a number"}
    return kinds.get(type(value), type(value).__name__)  # of Parquet: bytes, datetime


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: white space, or characters without a shape or a width."""
    return not any(char.isprintable() and char != " " for char in text)


def is_message(value: object) -> bool:
    """Whether a JSON value is one message of a conversation."""
    return isinstance(value, dict) and any(key in value for key in ("role", "from"))


def usable(
    items: Iterable[A | PromptLineError],
    use: Callable[[A], B],
    source: Path,
    *,
    strict: bool,
    absent: str = "has no response",
    unit: str = "entries",
) -> list[B]:
    """The results of `use` for all items that it does not refuse; a warning counts the others.

    Args:
        items: also errors of what cannot be read.
        source: the file that they come from.
        strict: refuse the first one that cannot be used.
        absent: the error's sentence for a file without items.

    Raises:
        PromptError: nothing can be used; `PromptLineError` for the only item, or with `strict`.
    """
    found, errors = list[B](), list[PromptLineError]()
    for item in items:
        try:
            if isinstance(item, PromptLineError):
                raise item
            found.append(use(item))
        except PromptLineError as error:
            if strict:
                hint = error.hint or "correct it, or leave --strict out, which skips it"
                parts = (error.path, error.place, error.reason, error.detail)
                raise PromptLineError(*parts, hint=hint) from error
            errors.append(error)
    if not found and len(errors) == 1:
        raise errors[0]
    if not found and errors:
        text = f"{source}: none of {len(errors)} {unit} can be used: {_reasons(errors)}"
        raise PromptError(text, hint=errors[0].hint)
    if not found:
        raise PromptError(f"{source} {absent}")
    if errors:
        numbers = (len(errors), len(errors) + len(found), unit)
        log.warning("%s: %d of %d %s skipped: %s", source, *numbers, _reasons(errors))
    return found


def _reasons(errors: Sequence[PromptLineError]) -> str:
    """Reasons and places."""
    alike: dict[str, list[PromptLineError]] = {}
    for error in errors:
        alike.setdefault(error.reason, []).append(error)
    found = []
    for reason, same in alike.items():
        places = ", ".join(error.place for error in same[:SHOWN_PLACES])
        more = len(same) - SHOWN_PLACES
        tail = f" and {more} more" if more > 0 else ""
        details = list(dict.fromkeys(error.detail for error in same if error.detail))
        tail += "".join(f": {one}" for one in details[:1]) + ", ..." * (len(details) > 1)
        found.append(f"{reason} ({places}{tail})")
    return "; ".join(found)


# --------------------------------------------------------------------------- files


def read_entries(
    path: Path,
    use: Callable[[Entry], object],
    *,
    fix: str,
    absent: str,
    strict: bool,
    hide_text: bool,
    format: PromptFormat = "auto",
) -> None:
    """Calls `use` with every entry of a file, see `usable`.

    Args:
        fix: the next step if there is no such file.
        hide_text: let ids of places hold a digest of the file, see `Entry.mark`.
        format: `text` takes each line of any file as a text.

    Raises:
        PromptError: also of a file of another kind, or one that cannot be decoded as a whole.
    """
    try:
        if not path.is_file():
            if path.exists() and not path.is_dir():
                fix = "write its text into a file, and name that"
                raise PromptError(f"{path} is a pipe or a device", hint=fix)
            problem = "is a folder" if path.is_dir() else "is no such file"
            raise PromptError(f"{path} {problem}", hint=fix)
        start = Entry(str(path), mark=file_sha256(path)[:8] if hide_text else "")
        name = re.sub(r"\.(gz|bz2|xz)$", "", path.name.lower())
        found = _found(start, name, format)
        items = (one if isinstance(one, PromptLineError) else at.holding(one) for at, one in found)
        usable(items, use, path, strict=strict, absent=absent)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        text = f"{path} is compressed, and damaged or cut off: {error}"
        raise PromptError(text, hint="fetch it again") from error
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {reason_of(error)}") from error


Found = Iterator[tuple[Entry, Any]]
"""Entries, each with the value of its JSON, or with the error that it cannot be read."""
Line = tuple[Entry, str | PromptLineError]
"""A line, or the error that it cannot be decoded."""


def _found(start: Entry, name: str, format: PromptFormat) -> Found:
    with open(start.path, "rb") as file:
        stream = unpacked(file)
        head, is_packed = stream.read(HEAD_BYTES), stream is not file
    if head.startswith(b"PAR1") and not is_packed:
        return _parquet_rows(start)
    what, fix = no_text(head) or ("", "")
    if head.lower().startswith(_PAGES):
        what, fix = "a web page", "download the file that it shows"
    if not what and encoding_of(head)[0] == "utf-8" and b"\0" in head.partition(b"\n")[0]:
        what = "no text: it has bytes 0 in its first line"
    if what:
        twice = "compressed, and what it holds is " * is_packed
        fix = fix or ("decompress it first" if is_packed else "give a text, JSON, CSV or Parquet")
        raise PromptError(f"{start.path} is {twice}{what}", hint=fix)
    every = list(_lines(start))
    lines = [(e, text) for e, text in every if isinstance(text, PromptLineError) or text.strip()]
    if not lines:
        return iter(())
    entry, first = lines[0]
    text = "" if isinstance(first, PromptLineError) else first
    begins, value = text.lstrip()[:1], None
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
    names, delimiter = ([], ",") if begins in ("{", "[") else _header(text)
    if format == "text" or (name.endswith(".txt") and not isinstance(value, dict)):
        if len(names) > 1:
            log.warning(
                "%s: a line is a prompt, though the first one is a table's header: %s",
                *(start.path, ", ".join(names)),
            )
        return ((e, one.rstrip("\r\n") if isinstance(one, str) else one) for e, one in lines)
    if len(names) > 1 or name.endswith((".csv", ".tsv")):
        return _csv_rows(start, _whole(every), delimiter)
    if begins in ("", "{", "[", '"'):
        return _json_values(start, value, every, lines)
    problem = f"{shown(text.strip(), max_chars=40)!r} is neither JSON nor a table's header"
    raise entry.refuse(problem, hint="for plain text, one prompt a line, give --format text")


def _lines(start: Entry) -> Iterator[Line]:
    """All lines, with their ends. Only line feeds end a line: JSON strings may contain U+2028."""
    with open(start.path, "rb") as file:
        lines = opened = unpacked(file)
        encoding, mark = encoding_of(opened.read(HEAD_BYTES))
        opened.seek(mark)
        if encoding != "utf-8":
            lines = map(str.encode, io.TextIOWrapper(opened, encoding, newline="\n"))
        try:
            for number, raw in enumerate(lines, start=1):
                entry = replace(start, number=number)
                try:
                    yield entry, raw.decode()
                except UnicodeDecodeError as error:
                    where = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
                    fix = "convert the file to UTF-8"
                    yield entry, entry.refuse("not UTF-8", where, hint=fix)
        except UnicodeError as error:
            name = encoding[:6].upper()
            raise PromptError(f"{start.path} begins as {name} and goes on otherwise") from error


def _whole(lines: list[Line]) -> str:
    """The text of a file whose entries are not lines."""
    texts = []
    for _, text in lines:
        if isinstance(text, PromptLineError):
            raise text
        texts.append(text)
    return "".join(texts)


# --------------------------------------------------------------------------- JSON


def _json_values(start: Entry, value: Any, every: list[Line], lines: list[Line]) -> Found:
    """The values of JSON lines; where the first one, `value`, is no object, those in the text."""
    if not isinstance(value, dict | str) or (len(lines) == 1 and _held(value) is not None):
        try:
            is_line = value is not None and len(lines) == 1
            values = [value] if is_line else list(_values(_whole(every)))
        except (ValueError, RecursionError, PromptLineError) as error:
            if str(lines[0][1]).lstrip().startswith("["):
                raise _no_json(start, error) from error
        else:
            for number, item in enumerate(_items(values), start=1):
                yield replace(start, number=number, unit="item"), item
            return
    for entry, text in lines:
        try:
            yield entry, text if isinstance(text, PromptLineError) else json.loads(text.rstrip())
        except (ValueError, RecursionError) as error:
            yield entry, _no_json(entry, error)


def _values(text: str) -> Iterator[Any]:
    """The JSON values of a text, one after the other."""
    decoder, at = json.JSONDecoder(), 0
    while (found := _SHOWN.search(text, at)) is not None:
        value, at = decoder.raw_decode(text, found.start())
        yield value


def _items(values: list[Any]) -> list[Any]:
    """The entries: of the only array or the only object, or the values themselves."""
    only = values[0] if len(values) == 1 else None
    if isinstance(only, list) and not (only and all(map(is_message, only))):
        return only
    held = _held(only)
    return values if held is None else held


def _held(value: Any) -> list[Any] | None:
    """The entries inside an object that is none, under its only list: `data`, `rows`, ..."""
    if not isinstance(value, dict) or not set(value).isdisjoint(KEYS):
        return None
    lists = [one for one in value.values() if isinstance(one, list)]
    if len(lists) != 1 or not all(isinstance(one, dict | str) for one in lists[0]):
        return None
    if any(map(is_message, lists[0])):  # of one talk, under a key that is not read
        return None
    # The Hub's viewer wraps each row again.
    return [one.get("row", one) if isinstance(one, dict) else one for one in lists[0]]


def _no_json(entry: Entry, error: Exception) -> PromptLineError:
    if isinstance(error, PromptLineError):
        return error
    if not isinstance(error, json.JSONDecodeError):  # a huge number, or too deep
        return entry.refuse("JSON that cannot be read", str(error))
    at = replace(entry, number=entry.number + error.lineno - 1)
    line = (error.doc.splitlines() or [""])[error.lineno - 1]
    text = f"{shown(line, max_chars=40)!r} from column {error.colno} on"
    is_begin = line.startswith("[") and error.pos <= 1
    hint = "for plain text, one prompt a line, give --format text" if is_begin else ""
    return at.refuse("no JSON", text, hint=hint)


# --------------------------------------------------------------------------- tables


def _header(line: str) -> tuple[list[str], str]:
    """The columns of a table's header, lower-case, and what stands between them; no columns if the
    line is no header with a column of prompts or responses."""
    for delimiter in (*",;\t|", LONE):
        with suppress(csv.Error):
            cells = next(csv.reader([line], delimiter=delimiter, strict=True), [])
            names = [cell.strip().lower() for cell in cells]
            if (len(names) > 1 or delimiter == LONE) and not TEXT_KEYS.isdisjoint(names):
                return names, delimiter
    return [], ","


def _csv_rows(start: Entry, text: str, delimiter: str) -> Found:
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names = [cell.strip().lower() for cell in next(filter(any, reader), [])]
    _check_columns(start, names, "name it in the first line: 'prompt'")
    number = 0
    while True:
        fault: tuple[str, ...] = ()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            cells, fault = [], ("no row of CSV", str(error))
        if any(cells) and (any(cells[len(names) :]) or len(cells) < len(names)):
            fault = "another number of cells than columns", f"{len(cells)} for {len(names)}"
        if any(cells) or fault:
            number += 1
            entry = replace(start, number=number, unit="row")
            row = {name: cell for name, cell in zip(names, cells, strict=False) if cell}
            yield entry, entry.refuse(*fault) if fault else row


def _check_columns(start: Entry, names: list[str], fix: str) -> None:
    if TEXT_KEYS.isdisjoint(map(str.lower, names)):
        found = ", ".join(repr(shown(name, max_chars=40)) for name in names[:12])
        raise PromptError(f"{start.path} has no column of prompts, but {found}", hint=fix)


def _parquet_rows(start: Entry) -> Found:
    """Rows of a Parquet file, with the columns that are read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(start.path, page_checksum_verification=True)
        names = file.schema_arrow.names
        _check_columns(start, names, "rename the column of the prompts to 'prompt'")
        # Threads of pyarrow, beside those of torch, would abort a process that ends.
        number, known = 0, [name for name in names if name.lower() in KEYS]
        for batch in file.iter_batches(batch_size=64, columns=known, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield replace(start, number=number, unit="row"), row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        text = f"{start.path}: the Parquet file cannot be decoded: {error}"
        raise PromptError(text, hint="fetch it again") from error
