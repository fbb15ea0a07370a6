"""Prompt files to prompts. Malformed input is refused by line or row.

| format       | keys read                                             | decoded as       |
|--------------|-------------------------------------------------------|------------------|
| `spec-bench` | turns, question_id, category                          | chat             |
| `humaneval`  | prompt, task_id                                       | raw continuation |
| `gsm8k`      | question, answer (the number after ####), id          | chat             |
| `sharegpt`   | conversations (the human turns only), id              | chat             |
| `jsonl`      | prompt or turns, id, category, answer, raw            | chat unless raw  |
| `text`       | one line is one prompt                                | chat             |

All but `text` are JSON lines, one JSON array, or Parquet, whose columns are the keys: SPEED-Bench
is `spec-bench` as Parquet. `specctl.runtime.conversations.conversation_ids` makes token ids of a
prompt.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from specctl.answers import final_answer
from specctl.durable import file_sha256
from specctl.embedded import PROMPTS
from specctl.errors import PromptError, PromptLineError, UsageError, did_you_mean, shown

log = logging.getLogger(__name__)
EMBEDDED = "embedded"
MAX_NAME_BYTES = 256
"""Of ids and categories, which stand in every row."""
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""Begins turns of SPEED-Bench whose text NVIDIA may not hand on."""


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


@cache
def _file_digest(path: str, modified_ns: int) -> str:
    del modified_ns  # another time, another file
    return file_sha256(Path(path))


@dataclass(frozen=True)
class Entry:
    """One line of a file, one item of a JSON array, or one row of a Parquet file.

    Attributes:
        number: 1-based, of the unit. row: the JSON object that stands there, or a row's columns
            that are not null.
        hides_text: what has no id is named by its file's digest, not by that of its text, with
            which a guessed text could be confirmed.
    """

    path: str
    number: int
    unit: str = "line"
    hides_text: bool = False
    row: Mapping[str, Any] = field(default_factory=dict)

    def refuse(self, problem: str, fix: str = "correct it") -> PromptError:
        """The error for this entry."""
        if self.unit == "line":
            return PromptLineError(self.path, self.number, problem, hint=fix)
        what = f"{self.path}, {self.unit} {self.number}"
        return PromptError(f"{what}: {problem}", hint=fix)

    def with_row(self, value: object) -> Entry:
        """The same with a JSON value, which must be an object."""
        if not isinstance(value, dict):
            raise self.refuse(f"expected a JSON object, found a {type(value).__name__}")
        return replace(self, row=value)

    def checked(self, text: object, name: str, max_bytes: int | None = None) -> str:
        """A string with something in it that UTF-8 can hold.

        JSON can spell half a surrogate pair, which no tokenizer can encode.
        """
        if not isinstance(text, str):
            raise self.refuse(f"expected {name} as a string, found {_kind(text)}")
        if not text.strip():
            raise self.refuse(f"expected {name} with text in it, found a blank string")
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise self.refuse(f"expected {name} as Unicode text, found half a surrogate pair")
        num_bytes = len(text.encode())
        if max_bytes is not None and num_bytes > max_bytes:
            raise self.refuse(
                f"expected {name} of at most {max_bytes} bytes, found {num_bytes}", "shorten it"
            )
        return text

    def keys(self) -> str:
        """The keys that are there, for a refusal."""
        name = "columns" if self.unit == "row" else "keys"
        return f"{name} {sorted(self.row)[:8]}"

    def text(self, key: str) -> str:
        """The text under a key."""
        if key not in self.row:
            raise self.refuse(f"expected key {key!r}, found {self.keys()}")
        return self.checked(self.row[key], repr(key))

    def texts(self, turns: object, found: Callable[[object], str]) -> tuple[str, ...]:
        """Turns of a prompt; `found` says what is there instead of a list."""
        if not isinstance(turns, list):
            raise self.refuse(f"expected 'turns' as a list of strings, found {found(turns)}")
        if not turns:
            raise self.refuse("expected at least one turn, found an empty list")
        return tuple(self.checked(turn, "each turn") for turn in turns)

    def category(self) -> str:
        """Empty where there is none."""
        given = self.row.get("category")
        return "" if given is None else self.checked(given, "'category'", MAX_NAME_BYTES)

    def identifier(self, key: str, turns: tuple[str, ...] | None) -> str | None:
        """The entry's own id, or its place and eight digits that tell its turns from others.

        The place alone would let `--resume` with another file take its line 3 for one already done.
        """
        found = self.row.get(key)
        if found is None and turns is not None:
            if self.hides_text:
                mark = _file_digest(self.path, os.stat(self.path).st_mtime_ns)
            else:
                mark = hashlib.sha256("\0".join(turns).encode()).hexdigest()
            return f"{self.unit}-{self.number}-{mark[:8]}"
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
    """Reads prompts in file order; those without their text (`PLACEHOLDER`) are left out.

    Args:
        source: a file, or `embedded` for the set that ships with the package (`./embedded` for
            a file of that name).
        format: one of `FORMATS`. `auto`: `.txt` is text, otherwise the keys of the first record
            decide (see the table above).
        limit: prompts at most, see `spread`. limit_seed: which of them.
        hide_text: name prompts without an id by the file, see `Entry`.

    Raises:
        UsageError: an unknown format, or a limit below 1.
        PromptError: no such file, not a file, nothing in it, no format that fits, no prompt with
            its text, or one id twice; `PromptLineError` where one line is to blame.
    """
    if format not in FORMATS:
        expected = f"one of {', '.join(FORMATS)}"
        fix = did_you_mean(format, FORMATS, "name one of them")
        raise UsageError(f"--format: expected {expected}, found {format!r}", hint=fix)
    if limit is not None and limit < 1:
        raise UsageError(
            f"--limit: expected at least 1, found {limit}", hint="leave it out to read all"
        )
    path = PROMPTS if source == EMBEDDED else Path(source)
    first: dict[str, Entry] = {}  # an id used twice would merge two units of splitting into one
    prompts, num_empty = [], 0
    with readable(path, "a prompt file", f"name a file, or {EMBEDDED!r}"):
        for entry, prompt in _parse(path, format, hide_text=hide_text):
            earlier = first.setdefault(prompt.prompt_id, entry)
            if earlier is not entry:
                found = f"{prompt.prompt_id!r}, which {earlier.unit} {earlier.number} has too"
                raise entry.refuse(f"expected an id that is not used yet, found {found}")
            if any(turn.startswith(PLACEHOLDER) for turn in prompt.turns):
                num_empty += 1
            else:
                prompts.append(prompt)
    if num_empty:
        fix = "fill them in with NVIDIA's prepare_data.py (Model-Optimizer, examples/specdec_bench)"
        if not prompts:
            found = f"SPEED-Bench's placeholder in all {num_empty}"
            raise PromptError(f"{path}: expected prompts with their text, found {found}", hint=fix)
        log.warning(
            "%s: %d of %d prompts skipped: they hold SPEED-Bench's placeholder instead of a text; "
            "%s", path, num_empty, num_empty + len(prompts), fix
        )  # fmt: skip
    if not prompts:
        raise PromptError(f"{path}: expected at least one prompt, found none", hint="fill the file")
    return prompts if limit is None else spread(prompts, limit, limit_seed)


def spread(prompts: Sequence[Prompt], limit: int, seed: int = 0) -> list[Prompt]:
    """At most `limit` prompts, as many of each category as can be, in their order.

    A hash of (seed, id) chooses, another than that of splits, or those chosen would all be held
    out. A larger limit keeps what a smaller one chose.
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
    """The prompts of several files, in order; see `load_prompts`.

    Raises:
        PromptError: one id in two files, beside what `load_prompts` refuses.
    """
    found: dict[str, Prompt] = {}
    for source in sources:
        for prompt in load_prompts(source, format=format):
            if prompt.prompt_id in found:
                raise PromptError(
                    f"{source}: expected ids that no other file has, found {prompt.prompt_id!r}",
                    hint="rename one of them",
                )
            found[prompt.prompt_id] = prompt
    return list(found.values())


@contextmanager
def readable(path: Path, expected: str, fix: str) -> Iterator[None]:
    """Refuses what is no file, or cannot be read inside, as a `PromptError` naming `path`."""
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise PromptError(f"{path}: expected {expected}, found {found}", hint=fix)
    try:
        yield
    except OSError as error:
        raise PromptError(
            f"{path}: expected a file that can be read, found "
            f"{error.strerror or type(error).__name__}",
            hint="correct its permissions",
        ) from error


# --------------------------------------------------------------------------- files


def _parse(path: Path, format: str, *, hide_text: bool) -> Iterator[tuple[Entry, Prompt]]:
    is_text = format == "auto" and path.suffix == ".txt" and not _is_parquet(path)
    if format == "text" or is_text:
        for entry, line in _lines(path, hide_text=hide_text):
            turns = (entry.checked(line.rstrip("\r\n"), "the line"),)
            yield entry, _prompt(entry, "id", turns)
        return
    for entry in entries(path, hide_text=hide_text):
        format = detect_format(entry) if format == "auto" else format
        yield entry, READERS[format](entry)


def _lines(path: Path, *, hide_text: bool, blank: bool = False) -> Iterator[tuple[Entry, str]]:
    """Lines with something in them, or all. Split at line feeds alone: JSON strings may hold
    U+2028."""
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            entry = Entry(str(path), number, hides_text=hide_text)
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                found = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
                raise entry.refuse(
                    f"expected UTF-8, found {found}", "convert the file to UTF-8"
                ) from error
            if blank or line.strip():
                yield entry, line


def entries(path: Path, *, hide_text: bool = False) -> Iterator[Entry]:
    """Objects of a JSON-lines file, of one JSON array (as ShareGPT is published), or of a Parquet
    file (as SPEED-Bench is), which its first bytes tell."""
    if _is_parquet(path):
        yield from _parquet_rows(path, hide_text=hide_text)
        return
    start, first = next(_lines(path, hide_text=hide_text), (Entry(str(path), 1), ""))
    if first.lstrip().startswith("["):
        text = "".join(line for _, line in _lines(path, hide_text=hide_text, blank=True))
        for number, item in enumerate(_json(text, replace(start, number=1)), start=1):
            yield replace(start, number=number, unit="item").with_row(item)
    else:
        for entry, line in _lines(path, hide_text=hide_text):
            yield entry.with_row(_json(line, entry))


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4) == b"PAR1"


def _parquet_rows(path: Path, *, hide_text: bool) -> Iterator[Entry]:
    """Rows of a Parquet file; of its columns, those that a reader of this room knows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def refuse(problem: str, fix: str) -> PromptError:
        return PromptError(f"{path}: {problem}", hint=fix)

    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        names = file.schema_arrow.names
        if not TEXTS & set(names):
            expected = "prompts: a column 'turns', 'prompt', 'question' or 'conversations'"
            raise refuse(
                f"expected {expected}, found columns {names[:12]}", "name a file of prompts"
            )
        # Without threads: pyarrow's, beside torch's, abort a process that ends.
        number, known = 0, sorted(TEXTS.union(OTHERS).intersection(names))
        for batch in file.iter_batches(batch_size=64, columns=known, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                row = {name: value for name, value in row.items() if value is not None}
                yield Entry(str(path), number, "row", hide_text, row)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise refuse(
            f"expected a Parquet file that can be decoded, found {error}", "fetch it again"
        ) from error


def _json(text: str, start: Entry) -> Any:
    """The value of a text that begins at `start`; a syntax error is refused where it stands."""
    try:
        return json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        at = replace(start, number=start.number + error.lineno - 1)
        line = (text.splitlines() or [""])[error.lineno - 1]
        raise at.refuse(
            f"expected a JSON object, found {shown(line, max_chars=40)!r}, which is no JSON from "
            f"column {error.colno} on",
            "correct it; of plain text, a prompt a line, --format text",
        ) from error
    except (ValueError, RecursionError) as error:  # a huge number, or nested too deep
        raise start.refuse(f"expected JSON of sane size, found {error}", "remove it") from error


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}
    return "nothing" if value is None else (kinds | {bytes: "bytes"}).get(type(value), "a number")


# --------------------------------------------------------------------------- formats


def detect_format(entry: Entry) -> str:
    """The format that the keys of the first record belong to.

    Raises:
        PromptError: none, or several that would read different texts from it.
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
    raise entry.refuse(
        f"expected the keys of one format among {', '.join(READERS)}, found {entry.keys()} of "
        f"{' and '.join(matching) or 'none'}",
        "state the format with --format",
    )


def _prompt(
    entry: Entry, id_key: str, turns: tuple[str, ...], category: str = "", **fields: Any
) -> Prompt:
    return Prompt(str(entry.identifier(id_key, turns)), category, turns, **fields)


def read_spec_bench(entry: Entry) -> Prompt:
    """Spec-Bench and MT-Bench `question.jsonl`."""
    turns = entry.texts(entry.row.get("turns"), _kind)
    return _prompt(entry, "question_id", turns, entry.category())


def read_humaneval(entry: Entry) -> Prompt:
    """HumanEval: code to be continued, so no chat template."""
    return _prompt(entry, "task_id", (entry.text("prompt"),), "code", chat=False)


def read_gsm8k(entry: Entry) -> Prompt:
    """GSM8K; the worked solution is kept as its final number."""
    answer = final_answer(entry.text("answer"))
    if not answer:
        raise entry.refuse("expected an answer that ends in '#### <number>', found no final number")
    return _prompt(entry, "id", (entry.text("question"),), "arithmetic", answer=answer)


def read_sharegpt(entry: Entry) -> Prompt:
    """ShareGPT: the human turns; the replies and system texts are not ours to repeat."""
    messages = entry.row.get("conversations")
    if not isinstance(messages, list):
        raise entry.refuse(f"expected 'conversations' as a list, found {_kind(messages)}")
    turns = []
    for message in messages:
        if not isinstance(message, dict):
            raise entry.refuse(
                f"expected messages as objects with 'from' and 'value', found {_kind(message)}"
            )
        if message.get("from") in ("human", "user"):
            turns.append(replace(entry, row=message).text("value"))
    if not turns:
        raise entry.refuse("expected a conversation with a human turn, found none", "remove it")
    return _prompt(entry, "id", tuple(turns), "chat")


def read_jsonl(entry: Entry) -> Prompt:
    """The format of the embedded set: `prompt` or `turns`, the rest optional."""
    row = entry.row
    if ("prompt" in row) == ("turns" in row):
        raise entry.refuse(
            "expected one of 'prompt' and 'turns', found "
            f"{'both' if 'prompt' in row else 'neither'}"
        )
    raw = row.get("raw", False)
    if not isinstance(raw, bool):
        raise entry.refuse(f"expected 'raw' as true or false, found {_kind(raw)}")
    turns = entry.texts(row["turns"], _kind) if "turns" in row else (entry.text("prompt"),)
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
"""Columns of Parquet files one of which must be there."""
OTHERS = {"id", "prompt_id", "question_id", "task_id", "category", "answer", "raw", "eos"}
