"""Reads prompts from files. Errors name the line or row.

| format       | keys read                                             | decoded as       |
|--------------|-------------------------------------------------------|------------------|
| `spec-bench` | turns, question_id, category                          | chat             |
| `humaneval`  | prompt, task_id                                       | raw continuation |
| `gsm8k`      | question, answer (the number after ####), id          | chat             |
| `sharegpt`   | conversations (the human turns only), id              | chat             |
| `jsonl`      | prompt or turns, id, category, answer, raw            | chat unless raw  |
| `text`       | one line is one prompt                                | chat             |

All but `text` are JSON lines, one JSON array, or Parquet with the keys as columns; SPEED-Bench is
`spec-bench` as Parquet.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from specctl.answers import final_answer
from specctl.durable import file_sha256
from specctl.embedded import PROMPTS
from specctl.errors import (
    PromptError,
    PromptLineError,
    UsageError,
    check_choice,
    reason_of,
    shown,
)

log = logging.getLogger(__name__)
EMBEDDED = "embedded"
MAX_NAME_BYTES = 256
"""Longest id or category; every row repeats them."""
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""Start of SPEED-Bench turns whose text NVIDIA may not redistribute."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: the unit of collection and of splits.

    Attributes:
        prompt_id: unique within the source, stable between runs.
        category: empty if unknown.
        turns: the user's messages, at least one, none blank.
        answer: the checkable answer, if there is one.
        chat: apply the tokenizer's chat template; False continues the text as it is.
    """

    prompt_id: str
    category: str
    turns: tuple[str, ...]
    answer: str | None = None
    chat: bool = True


@dataclass(frozen=True)
class Entry:
    """One line of a file, one item of a JSON array, or one row of a Parquet file."""

    path: str
    number: int = 1
    unit: str = "line"  # or item, or row
    # Stands in ids in place of the text's digest, which lets others confirm a guessed text.
    mark: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)  # the JSON object, or non-null columns

    @classmethod
    def first(cls, path: Path, *, hide_text: bool) -> Self:
        """The first line of a file."""
        return cls(str(path), mark=file_sha256(path)[:8] if hide_text else "")

    def refuse(self, problem: str, fix: str = "") -> PromptError:
        """The error for this entry."""
        if self.unit == "line":
            return PromptLineError(self.path, self.number, problem, hint=fix)
        what = f"{self.path}, {self.unit} {self.number}"
        return PromptError(f"{what}: {problem}", hint=fix)

    def with_row(self, value: object) -> Entry:
        """This entry with a JSON value as its row."""
        if not isinstance(value, dict):
            raise self.refuse(f"this is {_kind(value)}, not a JSON object")
        return replace(self, row=value)

    def checked(self, text: object, name: str, max_bytes: int | None = None) -> str:
        """A string that is not blank and can be encoded.

        JSON can spell half a surrogate pair, which no tokenizer encodes.
        """
        if not isinstance(text, str):
            raise self.refuse(f"{name} must be a string, not {_kind(text)}")
        if not text.strip():
            raise self.refuse(f"{name} is blank")
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise self.refuse(f"{name} contains half a surrogate pair")
        num_bytes = len(text.encode())
        if max_bytes is not None and num_bytes > max_bytes:
            raise self.refuse(f"{name} has {num_bytes} bytes, more than {max_bytes}")
        return text

    def keys(self) -> str:
        """The keys that are there, for an error message."""
        name = "columns" if self.unit == "row" else "keys"
        return f"{name} {sorted(self.row)[:8]}"

    def text(self, key: str) -> str:
        """The text under a key."""
        if key not in self.row:
            raise self.refuse(f"no key {key!r} among {self.keys()}")
        return self.checked(self.row[key], repr(key))

    def texts(self, turns: object) -> tuple[str, ...]:
        """The turns of a prompt."""
        if not isinstance(turns, list):
            raise self.refuse(f"'turns' must be a list of strings, not {_kind(turns)}")
        if not turns:
            raise self.refuse("'turns' is empty")
        return tuple(self.checked(turn, "a turn") for turn in turns)

    def category(self) -> str:
        """The category, empty if unknown."""
        given = self.row.get("category")
        return "" if given is None else self.checked(given, "'category'", MAX_NAME_BYTES)

    def identifier(self, key: str, turns: tuple[str, ...] | None) -> str | None:
        """The entry's own id, or its place and eight digits of a digest of its turns or the file.

        With the place alone, `--resume` with another file would take its line 3 as done.
        """
        found = self.row.get(key)
        if found is None and turns is not None:
            mark = self.mark or hashlib.sha256("\0".join(turns).encode()).hexdigest()[:8]
            return f"{self.unit}-{self.number}-{mark}"
        if isinstance(found, int) and not isinstance(found, bool):
            return str(found)
        return None if found is None else self.checked(found, repr(key), MAX_NAME_BYTES)


def load_prompts(
    source: str | Path,
    *,
    format: str = "auto",
    limit: int | None = None,
    limit_seed: int = 0,
    hide_text: bool = False,
) -> list[Prompt]:
    """Reads prompts in file order, without turns that are only a `PLACEHOLDER`.

    Args:
        source: a file, or `embedded` for the set that ships with the package (`./embedded` for
            a file of that name).
        format: one of `FORMATS`. `auto`: `.txt` is text, otherwise the keys of the first record
            decide (see the table above).
        limit: largest number of prompts, see `spread`.
        limit_seed: chooses them.
        hide_text: name prompts without an id by the file, see `Entry`.

    Raises:
        UsageError: an unknown format, or a limit below 1.
        PromptError: a file that is missing, empty, of no known format, without any text, or with
            one id twice; `PromptLineError` if one line is at fault.
    """
    check_choice("--format", format, FORMATS)
    if limit is not None and limit < 1:
        raise UsageError(f"--limit must be at least 1, not {limit}")
    path = PROMPTS if source == EMBEDDED else Path(source)
    first: dict[str, Entry] = {}  # one id for two prompts would put both on one side of a split
    prompts, num_empty = [], 0
    with readable(path, f"name a prompt file, or {EMBEDDED!r}"):
        for entry, prompt in _parse(Entry.first(path, hide_text=hide_text), format):
            earlier = first.setdefault(prompt.prompt_id, entry)
            if earlier is not entry:
                before = f"{earlier.unit} {earlier.number}"
                raise entry.refuse(f"{before} has the id {prompt.prompt_id!r} too")
            if any(turn.startswith(PLACEHOLDER) for turn in prompt.turns):
                num_empty += 1
            else:
                prompts.append(prompt)
    if num_empty:
        fix = "fill them in with NVIDIA's prepare_data.py (Model-Optimizer, examples/specdec_bench)"
        if not prompts:
            text = f"all {num_empty} prompts are SPEED-Bench's placeholder"
            raise PromptError(f"{path}: {text}", hint=fix)
        log.warning(
            "%s: %d of %d prompts skipped, whose text is SPEED-Bench's placeholder; %s",
            path, num_empty, num_empty + len(prompts), fix,
        )  # fmt: skip
    if not prompts:
        raise PromptError(f"{path} has no prompt")
    return prompts if limit is None else spread(prompts, limit, limit_seed)


def spread(prompts: Sequence[Prompt], limit: int, seed: int = 0) -> list[Prompt]:
    """At most `limit` prompts in their order, spread evenly over the categories.

    A hash of (seed, id) chooses. It differs from the hash of splits, so both sides of a split get
    prompts. A larger limit keeps the choice of a smaller one.
    """

    def draw(prompt: Prompt) -> bytes:
        return hashlib.sha256(f"limit {seed}: {prompt.prompt_id}".encode()).digest()

    taken, turn = Counter[str](), []
    for prompt in sorted(prompts, key=draw):
        turn.append((taken[prompt.category], draw(prompt), prompt.prompt_id))
        taken[prompt.category] += 1
    chosen = {prompt_id for *_, prompt_id in sorted(turn)[:limit]}
    return [prompt for prompt in prompts if prompt.prompt_id in chosen]


def load_prompt_files(sources: Sequence[str | Path], *, format: str = "auto") -> list[Prompt]:
    """The prompts of several files, in order.

    Raises:
        PromptError: one id in two files. See also `load_prompts`.
    """
    found: dict[str, Prompt] = {}
    for source in sources:
        for prompt in load_prompts(source, format=format):
            if prompt.prompt_id in found:
                raise PromptError(
                    f"{source}: another file has the id {prompt.prompt_id!r} too",
                    hint="rename one of them",
                )
            found[prompt.prompt_id] = prompt
    return list(found.values())


@contextmanager
def readable(path: Path, fix: str) -> Iterator[None]:
    """Reports a path that is no file, and errors of reading inside the block, as `PromptError`."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "is no such file"
        raise PromptError(f"{path} {problem}", hint=fix)
    try:
        yield
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {reason_of(error)}") from error


# --------------------------------------------------------------------------- files


def _parse(start: Entry, format: str) -> Iterator[tuple[Entry, Prompt]]:
    is_text = format == "auto" and start.path.endswith(".txt") and not _is_parquet(start)
    if format == "text" or is_text:
        for entry, line in _lines(start):
            turns = (entry.checked(line.rstrip("\r\n"), "the line"),)
            yield entry, _prompt(entry, "id", turns)
        return
    for entry in entries(start):
        format = detect_format(entry) if format == "auto" else format
        yield entry, READERS[format](entry)


def _lines(start: Entry, *, blank: bool = False) -> Iterator[tuple[Entry, str]]:
    """Lines that are not blank, or all lines. Only line feeds end a line: JSON strings may contain
    U+2028."""
    with open(start.path, "rb") as stream:
        for number, raw in enumerate(stream, start=1):
            entry = replace(start, number=number)
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                where = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
                fix = "convert the file to UTF-8"
                raise entry.refuse(f"{where} is not UTF-8", fix) from error
            if blank or line.strip():
                yield entry, line


def entries(start: Entry) -> Iterator[Entry]:
    """Objects of a JSON-lines file, of one JSON array (such as ShareGPT), or of a Parquet file
    (such as SPEED-Bench); the first bytes decide."""
    if _is_parquet(start):
        yield from _parquet_rows(start)
        return
    _, first = next(_lines(start), (start, ""))
    if first.lstrip().startswith("["):
        text = "".join(line for _, line in _lines(start, blank=True))
        for number, item in enumerate(_json(text, start), start=1):
            yield replace(start, number=number, unit="item").with_row(item)
    else:
        for entry, line in _lines(start):
            yield entry.with_row(_json(line, entry))


def _is_parquet(start: Entry) -> bool:
    with open(start.path, "rb") as stream:
        return stream.read(4) == b"PAR1"


def _parquet_rows(start: Entry) -> Iterator[Entry]:
    """Rows of a Parquet file, with the columns that prompts and responses use."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def refuse(problem: str, fix: str) -> PromptError:
        return PromptError(f"{start.path}: {problem}", hint=fix)

    try:
        file = pq.ParquetFile(start.path, page_checksum_verification=True)
        names = file.schema_arrow.names
        if not TEXTS & set(names):
            wanted = "'turns', 'prompt', 'question' or 'conversations'"
            raise refuse(f"no column {wanted} among {names[:12]}", "name a file of prompts")
        # Threads of pyarrow, beside those of torch, would abort a process that ends.
        number, known = 0, sorted(TEXTS.union(OTHERS).intersection(names))
        for batch in file.iter_batches(batch_size=64, columns=known, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                row = {name: value for name, value in row.items() if value is not None}
                yield replace(start, number=number, unit="row", row=row)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise refuse(f"the Parquet file cannot be decoded: {error}", "fetch it again") from error


def _json(text: str, start: Entry) -> Any:
    """The value of a text that begins at `start`; a syntax error is reported at its own line."""
    try:
        return json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        at = replace(start, number=start.number + error.lineno - 1)
        line = (text.splitlines() or [""])[error.lineno - 1]
        text = f"{shown(line, max_chars=40)!r} is no JSON from column {error.colno} on"
        fix = "for plain text, one prompt a line, give --format text"
        raise at.refuse(text, fix) from error
    except (ValueError, RecursionError) as error:  # a huge number, or nested too deep
        raise start.refuse(f"this JSON cannot be read: {error}") from error


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}
    return "nothing" if value is None else (kinds | {bytes: "bytes"}).get(type(value), "a number")


# --------------------------------------------------------------------------- formats


def detect_format(entry: Entry) -> str:
    """The format of a record, by its keys.

    Raises:
        PromptError: keys of no format, or of several.
    """
    claims = {
        "turns": "spec-bench" if "question_id" in entry.row else "jsonl",
        "prompt": "humaneval" if "task_id" in entry.row else "jsonl",
        "question": "gsm8k",
        "conversations": "sharegpt",
    }
    matching = [name for key, name in claims.items() if key in entry.row]
    if len(matching) == 1:
        return matching[0]
    which = " and ".join(matching) or f"none of {', '.join(READERS)}"
    raise entry.refuse(f"{entry.keys()} belong to {which}", "state the format with --format")


def _prompt(
    entry: Entry, id_key: str, turns: tuple[str, ...], category: str = "", **fields: Any
) -> Prompt:
    return Prompt(str(entry.identifier(id_key, turns)), category, turns, **fields)


def read_spec_bench(entry: Entry) -> Prompt:
    """Spec-Bench and MT-Bench `question.jsonl`."""
    turns = entry.texts(entry.row.get("turns"))
    return _prompt(entry, "question_id", turns, entry.category())


def read_humaneval(entry: Entry) -> Prompt:
    """HumanEval: code to be continued, without a chat template."""
    return _prompt(entry, "task_id", (entry.text("prompt"),), "code", chat=False)


def read_gsm8k(entry: Entry) -> Prompt:
    """GSM8K; of the worked solution, the final number is kept."""
    answer = final_answer(entry.text("answer"))
    if not answer:
        raise entry.refuse("the answer does not end in '#### <number>'")
    return _prompt(entry, "id", (entry.text("question"),), "arithmetic", answer=answer)


def read_sharegpt(entry: Entry) -> Prompt:
    """ShareGPT: the human turns, without replies and system texts."""
    messages = entry.row.get("conversations")
    if not isinstance(messages, list):
        raise entry.refuse(f"'conversations' must be a list, not {_kind(messages)}")
    turns = []
    for message in messages:
        if not isinstance(message, dict):
            text = "messages must be objects with 'from' and 'value'"
            raise entry.refuse(f"{text}, not {_kind(message)}")
        if message.get("from") in ("human", "user"):
            turns.append(replace(entry, row=message).text("value"))
    if not turns:
        raise entry.refuse("the conversation has no human turn", "remove it")
    return _prompt(entry, "id", tuple(turns), "chat")


def read_jsonl(entry: Entry) -> Prompt:
    """The format of the embedded set: `prompt` or `turns`, the rest optional."""
    row = entry.row
    if ("prompt" in row) == ("turns" in row):
        which = "both" if "prompt" in row else "neither"
        raise entry.refuse(f"it has {which} of 'prompt' and 'turns'", "give one of them")
    raw = row.get("raw", False)
    if not isinstance(raw, bool):
        raise entry.refuse(f"'raw' must be true or false, not {_kind(raw)}")
    turns = entry.texts(row["turns"]) if "turns" in row else (entry.text("prompt"),)
    answer = None if row.get("answer") is None else entry.text("answer")
    return _prompt(entry, "id", turns, entry.category(), answer=answer, chat=not raw)


READERS: dict[str, Callable[[Entry], Prompt]] = {
    "spec-bench": read_spec_bench,
    "humaneval": read_humaneval,
    "gsm8k": read_gsm8k,
    "sharegpt": read_sharegpt,
    "jsonl": read_jsonl,
}
"""Formats whose records are JSON objects, or rows of Parquet."""
FORMATS = ("auto", "text", *READERS)
TEXTS = {"turns", "prompt", "question", "conversations", "response", "token_ids"}
"""Columns of Parquet files; one of them is required."""
OTHERS = {"id", "prompt_id", "question_id", "task_id", "category", "answer", "raw", "eos"}
