"""Prompts of files, as people have them.

| key                                        | prompt                                             |
|--------------------------------------------|----------------------------------------------------|
| `messages`, `conversations`, `conversation`| the user's turns; system texts in front stand      |
|                                            | before them; replies and turns of tools are left   |
|                                            | out, as the target writes its own                  |
| `turns`                                    | a list of turns of a user                          |
| `prompt`, `question`, `text`, `input`      | one turn, or a list as above                       |
| `instruction`                              | one turn                                           |
| `input`, `context` beside one of these     | stands below it                                    |
| `system`, `system_prompt`                  | stands before the first turn                       |
| `history` of pairs (LLaMA-Factory)         | earlier turns, each with its reply                 |
| `role` beside a text (OASST)               | a line is one message: only a user's is a prompt   |
| `body` (a request of an OpenAI batch file) | what is asked last; all before it is given         |

A message is `role`/`content` (a text, or text parts, joined by line feeds as vLLM 0.33 joins them,
vllm/renderers/chat_utils) or `from`/`value`. The shapes are those of SpecForge, ShareGPT, the
chat datasets of the Hugging Face Hub, MT-Bench, Alpaca, Dolly, OpenOrca, TRL, and of
`vllm run-batch` (vllm/entrypoints/launchers/run_batch.py). `prompt_files` has the kinds of files.

Nothing is guessed: an entry without a text of a user, with images, or of two different texts is
skipped and counted.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specctl.answers import MARKER, final_answer
from specctl.collect.prompt_files import (
    ANSWERS,
    TALKS,
    TEXTS,
    Entry,
    is_blank,
    kind,
    read_entries,
    usable,
)
from specctl.embedded import PROMPTS
from specctl.errors import PromptError, PromptLineError, PromptTooLongError
from specctl.runtime.config import DecodingConfig, PromptFormat

if TYPE_CHECKING:
    from specctl.runtime.load import Pair

log = logging.getLogger(__name__)
EMBEDDED = "embedded"
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""Start of SPEED-Bench turns whose text NVIDIA may not redistribute."""
UNFILLED = (
    "SPEED-Bench's placeholder, which NVIDIA's prepare_data.py fills in (Model-Optimizer, "
    "examples/specdec_bench)"
)
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_call", "ipython"), "tool"),
    **dict.fromkeys(("tool_call", "tool_response", "function_response"), "tool"),
}
"""Roles by their words in datasets and requests."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: the unit of collection and of splits.

    Attributes:
        prompt_id: unique within the source, stable between runs.
        category: empty if unknown.
        turns: the user's messages, at least one, none blank.
        answer: the checkable answer, if there is one.
        chat: apply the tokenizer's chat template; False continues the text as it is.
        before: given messages before the first turn: role (system, user or assistant) and text.
    """

    prompt_id: str
    category: str
    turns: tuple[str, ...]
    answer: str | None = None
    chat: bool = True
    before: tuple[tuple[str, str], ...] = ()


def load_prompts(
    source: str | Path,
    *,
    format: PromptFormat = "auto",
    limit: int | None = None,
    limit_seed: int = 0,
    hide_text: bool = False,
    strict: bool = False,
) -> list[Prompt]:
    """Reads prompts in file order. What cannot be used is skipped and counted by a warning.

    Two prompts of one id are named by their places; an equal one is skipped.

    Args:
        source: a file, or `embedded` for the set that ships with the package (`./embedded` for
            a file of that name).
        format: `text` takes each line of any file as a prompt; `auto` only those of `.txt`.
        limit: largest number of prompts, see `spread`.
        limit_seed: chooses them.
        hide_text: name prompts without an id by the file, see `Entry.mark`.
        strict: refuse an entry that cannot be used.

    Raises:
        PromptError: a file that is missing, unreadable, or holds no prompt that can be used;
            `PromptLineError` for one entry, if it is the only one, or with `strict`.
    """
    if "://" in str(source):
        fix = "download it, and name the file"
        raise PromptError(f"{source} is an address, and prompts are read from files", hint=fix)
    path = PROMPTS if source == EMBEDDED else Path(source)
    prompts, notes = list[Prompt](), Counter[str]()
    # One id for two prompts would put both on one side of a split.
    holders: dict[str, tuple[int, Entry]] = {}

    def read(entry: Entry) -> None:
        own = Counter[str]()
        prompt = read_prompt(entry, own)
        mine = (len(prompts), replace(entry, row={}))
        at, other = holder = holders.setdefault(prompt.prompt_id, mine)
        if holder is not mine:
            earlier = f"{other.unit} {other.number}"
            if replace(prompts[at], prompt_id=prompt.prompt_id) == prompt:
                raise entry.refuse("an earlier one is the same prompt", earlier)
            if strict:
                raise entry.refuse(f"{earlier} has the id {prompt.prompt_id!r} too")
            own["ids that an earlier prompt has, told apart by their places"] += 1
            prompts[at] = renamed(prompts[at], other)
            prompt = renamed(prompt, entry)
        prompts.append(prompt)
        notes.update(own)

    read_entries(
        path,
        read,
        fix=f"name a prompt file, or {EMBEDDED!r}",
        absent="has no prompt",
        strict=strict,
        hide_text=hide_text,
        format=format,
    )
    if notes := +notes:
        words = "; ".join(f"{name}: {number}" for name, number in notes.items())
        log.warning("%s: %s", path, words)
    return prompts if limit is None else spread(prompts, limit, limit_seed)


def renamed(prompt: Prompt, entry: Entry) -> Prompt:
    """The prompt with its id and its place as its id."""
    place = entry.place_name(prompt.turns)
    if prompt.prompt_id.endswith(place):
        return prompt
    return replace(prompt, prompt_id=f"{prompt.prompt_id}-{place}")


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


def load_prompt_files(
    sources: Sequence[str | Path], *, format: PromptFormat = "auto", strict: bool = False
) -> list[Prompt]:
    """The prompts of several files, in order.

    Raises:
        PromptError: one id in two files. See also `load_prompts`.
    """
    found: dict[str, Prompt] = {}
    for source in sources:
        for prompt in load_prompts(source, format=format, strict=strict):
            if prompt.prompt_id in found:
                raise PromptError(
                    f"{source}: another file has the id {prompt.prompt_id!r} too",
                    hint="rename one of them",
                )
            found[prompt.prompt_id] = prompt
    return list(found.values())


def with_room(prompts: Sequence[Prompt], pair: Pair, config: DecodingConfig) -> list[Prompt]:
    """The prompts that the model can be given; a warning counts the others.

    Raises:
        PromptError: all are longer than the context, or refused by the chat template;
            `PromptLineError` for the only one, or with `strict`.
    """
    from specctl.runtime.conversations import Conversation, next_request

    target, size = pair.target, pair.target.model.context_tokens

    def use(prompt: Prompt) -> Prompt:
        try:
            request = next_request(target.tokenizer, Conversation(prompt), config.settings)
            request.check_room(size)
        except PromptError as error:
            reason = error.message
            if isinstance(error, PromptTooLongError):
                reason = f"longer than the model's context ({size} tokens)"
            parts = (target.name, prompt.prompt_id, reason)
            raise PromptLineError(*parts, hint=error.hint) from error
        return prompt

    source = Path(target.name)
    return usable(prompts, use, source, strict=config.strict, unit="prompts") if prompts else []


# --------------------------------------------------------------------------- one entry


class Message(NamedTuple):
    """One message of a conversation."""

    role: str  # user, assistant, system, tool; another word is `other`
    text: str  # empty: there is none


def read_prompt(entry: Entry, notes: Counter[str]) -> Prompt:
    """The prompt of an entry.

    Args:
        notes: counts what of the entry becomes what, in words.

    Raises:
        PromptLineError: it cannot be used.
    """
    row, is_request = entry.row, isinstance(entry.row.get("body"), dict)
    if row.get("image") or row.get("images"):
        raise entry.refuse("it comes with an image")
    asked, is_raw = _request(entry, notes) if is_request else (entry, _is_raw(entry))
    messages = _messages(asked)
    spoken = [one for one in messages if one.text and one.role in ("user", "system", "assistant")]
    users = [at for at, one in enumerate(spoken) if one.role == "user"]
    if not users:
        raise entry.refuse("no text of a user")
    if is_request:
        if messages[-1] != spoken[users[-1]]:
            raise entry.refuse("a request whose last turn is no text of a user")
        before, users = spoken[: users[-1]], users[-1:]
    else:
        before = [one for one in spoken[: users[0]] if one.role == "system"]
    turns = tuple(spoken[at].text for at in users)
    if any(turn.startswith(PLACEHOLDER) for turn in turns):
        raise entry.refuse(UNFILLED)
    name = str(entry.identifier(turns))
    taken = {id(one) for one in (*before, *(spoken[at] for at in users))}
    notes.update(
        LEFT_OUT[one.role]
        for one in messages
        if id(one) not in taken and (one.text or one.role not in ("system", "assistant"))
    )
    notes["system texts kept, before the first turn"] += sum(one.role == "system" for one in before)
    given = tuple((one.role, one.text) for one in before)
    return Prompt(name, _category(entry, notes), turns, _answer(entry), not is_raw, given)


LEFT_OUT = {
    "assistant": "replies left out, as the target writes its own",
    "system": "system texts after the first turn left out",
    "tool": "turns of tools left out",
    "other": "turns of other roles left out",
    "user": "blank turns left out",
}
"""Notes on messages that do not become part of a prompt, by role."""


def _messages(entry: Entry) -> list[Message]:
    """The messages of an entry; a prompt is one of a user."""
    row = entry.row
    key = next((key for key in (*TALKS, *TEXTS) if key in row), None)
    if key is None:
        raise entry.refuse("no key of a prompt", entry.keys(), hint=_way_on(row))
    found = [Message("system", text) for text in _strings(entry, "system", "system_prompt")]
    if key in TEXTS and isinstance(row[key], str):
        below = [name for name in ("input", "context") if name != key and key != "text"]
        role = ROLES.get(str(row.get("role")).lower(), "user")
        asked = "\n\n".join(_strings(entry, key, *below))
        return [*found, *_history(entry), Message(role, asked)]
    found += _talk(entry, key, row[key])
    first = next((one.text for one in found if one.role == "user" and one.text), None)
    for other in ("prompt", "question"):
        text = row.get(other)
        if first is not None and isinstance(text, str) and text.strip() != first.strip():
            raise entry.refuse(f"{key!r} and {other!r} begin with different texts")
    return found


def _history(entry: Entry) -> list[Message]:
    """Earlier turns: a list of pairs of a turn and its reply."""
    pairs = entry.row.get("history") or []
    if not isinstance(pairs, list) or any(not isinstance(p, list) or len(p) != 2 for p in pairs):
        raise entry.refuse("'history' is no list of pairs of texts")
    said = zip(cycle(("user", "assistant")), chain.from_iterable(pairs), strict=False)
    return [Message(role, entry.text(text, "'history'")) for role, text in said]


def _strings(entry: Entry, *keys: str) -> list[str]:
    """The texts under some keys, without blank ones."""
    texts = [entry.text(value, repr(key)) for key in keys if (value := entry.row.get(key))]
    return [text for text in texts if not is_blank(text)]


def _talk(entry: Entry, key: str, value: object) -> list[Message]:
    """The messages of a list; a text in it, or a message without a role, is a turn of a user where
    the key says so."""
    for read in (json.loads, ast.literal_eval):  # a cell of CSV, by pandas as in Python
        if isinstance(value, str):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                value = read(value)
    if not isinstance(value, list):
        wanted = "a list" if key in TALKS else "a text or a list"
        raise entry.refuse(f"{key!r} must be {wanted}, not {kind(value)}")
    found = []
    for one in value:
        message = one if isinstance(one, dict) else {"content": one}
        word = message.get("role") or message.get("from")
        if word is None and key in TALKS and key != "turns":
            raise entry.refuse("a message without a role")
        role = "user" if word is None else ROLES.get(str(word).lower(), "other")
        try:
            text = _content(entry, message)
        except PromptLineError:
            if role in ("user", "system"):
                raise
            text = ""
        is_call = role == "assistant" and not text and message.get("tool_calls")
        found.append(Message("tool" if is_call else role, text))
    return found


def _content(entry: Entry, message: Mapping[str, Any]) -> str:
    """The text of a message; empty if it is blank or absent."""
    value = next((message[key] for key in ("content", "value", "text") if key in message), None)
    parts = value if isinstance(value, list) else [] if value is None else [value]
    texts = []
    for part in parts:
        if isinstance(part, dict):
            sort = part.get("type", "text")
            if sort not in ("text", "input_text", "output_text"):
                raise entry.refuse("a turn that is not only text", str(sort))
            part = part.get("text")
        texts.append(entry.text(part, "a turn"))
    text = "\n".join(texts)
    return "" if is_blank(text) else text


def _request(entry: Entry, notes: Counter[str]) -> tuple[Entry, bool]:
    """The body of a request of a batch file, and whether its text is continued as it is."""
    body, url = entry.row["body"], str(entry.row.get("url") or "")
    is_raw = "messages" not in body and "prompt" in body
    if url and not url.endswith(("/completions", "/responses")):
        raise entry.refuse("a request that generates no text", url)
    row = {key: value for key, value in body.items() if value is not None}
    if is_raw and isinstance(row.get("prompt"), list):
        if len(row["prompt"]) != 1 or not isinstance(row["prompt"][0], str):
            raise entry.refuse("a request of several prompts or of token ids")
        row["prompt"] = row["prompt"][0]
    if "instructions" in row:
        row["system"] = row["instructions"]
    notes["requests whose definitions of tools are left out"] += bool(row.get("tools"))
    return replace(entry, row=row), is_raw


def _is_raw(entry: Entry) -> bool:
    """Whether the text is continued as it is: `raw`, or code to complete as in HumanEval."""
    row = entry.row
    raw = {"true": True, "false": False}.get(str(row.get("raw", False)).lower())
    if raw is None:
        raise entry.refuse("'raw' is neither true nor false")
    return raw or ("entry_point" in row and isinstance(row.get("prompt"), str))


def _category(entry: Entry, notes: Counter[str]) -> str:
    row = entry.row
    try:
        given = entry.name("category")
    except PromptLineError:
        given = ""
        notes["categories left out that are no short text"] += 1
    if "entry_point" in row:
        return given or "code"
    if _answer(entry) is not None and "question" in row:
        return given or "arithmetic"
    return given or ("chat" if any(key in row for key in TALKS[:3]) else "")


def _answer(entry: Entry) -> str | None:
    """The checkable answer: of a question, the number after ####, as in GSM8K."""
    answer = entry.row.get("answer")
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        return None
    text = entry.text(str(answer), "'answer'")
    if "question" in entry.row or MARKER in text:
        return final_answer(text)
    return None if is_blank(text) else text


def _way_on(row: Mapping[str, Any]) -> str:
    """The next step for an entry of another kind of file."""
    if any(key in row for key in ANSWERS):
        return "give a file of responses to --responses, and the file of its prompts here"
    if "hash_ids" in row:
        return "a trace of Mooncake holds lengths and no texts"
    return "rename the key of the prompts to 'prompt'"
