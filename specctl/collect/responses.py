"""Reads responses: texts that a model, in production or here, answered to known prompts.

The kinds of files are those of prompts, see `prompt_files`:

| key         | value                                                                     |
|-------------|---------------------------------------------------------------------------|
| `prompt_id` | or another id, as of prompts. Without one, the place of the prompt itself |
| `prompt`    | or any key of prompts: the text of that prompt, which must be equal       |
| `response`  | text, or a list with the text of each turn                                |
| `token_ids` | instead of `response`: token ids, or a list of them for each turn         |
| `eos`       | true where each response ended by itself, so that its end is known        |

An answer of an OpenAI batch file has `custom_id`, and in `response` the status and the body of the
server's answer. A file of production logs can be given twice, as prompts and as responses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl.collect.prompt_files import (
    TALKS,
    TEXTS,
    Entry,
    is_blank,
    read_entries,
    usable,
)
from specctl.collect.prompts import Prompt, read_prompt
from specctl.durable import file_sha256
from specctl.errors import PromptLineError

TurnText = str | tuple[int, ...]


@dataclass(frozen=True)
class Response:
    """The responses to one prompt."""

    entry: Entry
    prompt_id: str
    prompt_turns: tuple[str, ...] | None  # as the record has them
    turns: tuple[TurnText, ...]
    ends: bool  # the text of each turn is complete; token ids show it by their last one


@dataclass(frozen=True)
class Responses:
    """A file of responses, by prompt id."""

    path: Path
    digest: str  # of its bytes
    by_prompt: Mapping[str, Response]

    def of(self, prompts: Iterable[Prompt]) -> Responses:
        """The responses to some of the prompts."""
        chosen = {prompt.prompt_id: self.by_prompt[prompt.prompt_id] for prompt in prompts}
        return replace(self, by_prompt=chosen)

    def answered(self, prompts: Iterable[Prompt], *, strict: bool) -> list[Prompt]:
        """The prompts with a response to their own text; a warning counts the others.

        Args:
            strict: refuse a prompt without one.

        Raises:
            PromptError: no prompt has one; `PromptLineError` with `strict`.
        """
        return usable(prompts, self._checked, self.path, strict=strict, unit="prompts")

    def _checked(self, prompt: Prompt) -> Prompt:
        name, response = prompt.prompt_id, self.by_prompt.get(prompt.prompt_id)

        def refuse(reason: str, detail: str = "", hint: str = "") -> PromptLineError:
            return PromptLineError(str(self.path), name, reason, detail, hint=hint)

        if response is None:
            raise refuse(
                "no response", hint="responses are paired by id, or by the prompts' places"
            )
        if response.prompt_turns is not None and response.prompt_turns != prompt.turns:
            begin, hint = response.prompt_turns[0][:40], "give each response its own prompt_id"
            raise refuse("the response is to another text", repr(begin), hint)
        if len(response.turns) != len(prompt.turns):
            counts = f"{len(response.turns)} responses to {len(prompt.turns)} turns"
            raise refuse("another number of responses than turns", counts)
        return prompt


def load_responses(path: Path, *, hide_text: bool = False, strict: bool = False) -> Responses:
    """Reads a file of responses. What cannot be used is skipped and counted by a warning.

    Args:
        hide_text, strict: as for their prompts, see `load_prompts`.

    Raises:
        PromptError: a file that cannot be read, or holds no response that can be used;
            `PromptLineError` for one record, if it is the only one, or with `strict`.
    """
    found: dict[str, Response] = {}

    def read(entry: Entry) -> None:
        response = _read(entry)
        earlier = found.setdefault(response.prompt_id, response).entry
        if earlier is not response.entry:
            before = f"{earlier.unit} {earlier.number}"
            raise entry.refuse("an earlier one has its prompt id", before)

    fix, absent = "name a file of responses", "has no response"
    read_entries(path, read, fix=fix, absent=absent, strict=strict, hide_text=hide_text)
    return Responses(path, f"sha256:{file_sha256(path)}", found)


def _read(entry: Entry) -> Response:
    row = entry.row
    prompt = read_prompt(entry, Counter()) if _HOLDS_PROMPT.intersection(row) else None
    prompt_turns = None if prompt is None else prompt.turns
    prompt_id = entry.identifier(prompt_turns)
    if prompt_id is None:
        hint = "give each the id of its prompt, 'prompt_id', or its text, 'prompt'"
        raise entry.refuse("neither an id nor a prompt", entry.keys(), hint=hint)
    if "custom_id" in row and ("error" in row or isinstance(row.get("response"), dict)):
        turn, ends = _served(entry)
        turns: tuple[TurnText, ...] = (turn,)
    else:
        turns, ends = _turns(entry), row.get("eos", False)
        if not isinstance(ends, bool):
            raise entry.refuse("'eos' is neither true nor false", repr(ends)[:40])
    return Response(replace(entry, row={}), prompt_id, prompt_turns, turns, ends)


_HOLDS_PROMPT = frozenset((*TALKS, *TEXTS))


def _turns(entry: Entry) -> tuple[TurnText, ...]:
    row = entry.row
    if "response" in row and "token_ids" in row:
        raise entry.refuse("it has both of 'response' and 'token_ids'", hint="keep one of them")
    if "response" not in row and "token_ids" not in row:
        hint = "rename the key of the responses to 'response'"
        raise entry.refuse("it has neither 'response' nor 'token_ids'", entry.keys(), hint=hint)
    if "response" in row:
        texts = row["response"] if isinstance(row["response"], list) else [row["response"]]
        turns: tuple[TurnText, ...] = tuple(_text(entry, text, "'response'") for text in texts)
    else:
        value = row["token_ids"]
        is_nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        turns = tuple(_token_ids(ids, entry) for ids in (value if is_nested else [value]))
    if not turns:
        raise entry.refuse("it has no turn")
    return turns


def _text(entry: Entry, value: object, name: str) -> str:
    text = entry.text(value, name)
    if is_blank(text):
        raise entry.refuse(f"{name} is blank")
    return text


def _token_ids(ids: object, entry: Entry) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        raise entry.refuse("'token_ids' is no list of whole numbers", repr(ids)[:40])
    return tuple(ids)


def _served(entry: Entry) -> tuple[TurnText, bool]:
    """The first choice of a server's answer in a batch file, and whether its end is known.

    A text without its reasoning or its calls of tools is not all that the model wrote; token ids,
    which vLLM adds on request (`return_token_ids`), are. `stop_reason` is vLLM's: null where the
    end of text ended the answer, and no word of `stop` (vllm/entrypoints/openai/chat_completion/
    protocol.py of 0.32 and 0.33).
    """
    answer = _object(entry.row.get("response"))
    body = _object(answer.get("body"))
    error = entry.row.get("error") or body.get("error")
    if error or not body or answer.get("status_code", 200) != 200:
        fault = error or answer.get("status_code")
        raise entry.refuse("the request failed", str(_object(fault).get("message", fault)))
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise entry.refuse("an answer without choices", f"keys: {', '.join(sorted(body))}")
    choice = choices[0]
    message = _object(choice.get("message")) or {"content": choice.get("text")}
    if isinstance(choice.get("token_ids"), list):
        return _token_ids(choice["token_ids"], entry), False
    if message.get("tool_calls") or message.get("function_call"):
        raise entry.refuse("it calls tools")
    if message.get("reasoning") or message.get("reasoning_content"):
        raise entry.refuse("its reasoning is kept apart from its text")
    is_end = "stop_reason" in choice and choice["stop_reason"] is None
    return _text(entry, message.get("content"), "the answer"), (
        is_end and choice.get("finish_reason") == "stop"
    )


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
