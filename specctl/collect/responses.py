"""Reads responses: texts that a model, in production or here, answered to known prompts.

JSON lines or one JSON array of objects, or Parquet with these columns:

| key         | value                                                                     |
|-------------|---------------------------------------------------------------------------|
| `prompt_id` | or `id`: the prompt's id. Without either, the place of the prompt itself  |
| `prompt`    | or `turns`: the text of that prompt, which must be equal                  |
| `response`  | text, or a list with the text of each turn                                |
| `token_ids` | instead of `response`: token ids, or a list of them for each turn         |
| `eos`       | true where each response ended by itself, so that its end is known        |

A file of production logs can thus be given twice, as prompts and as responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from specctl.collect.prompts import Entry, Prompt, entries, readable
from specctl.durable import file_sha256
from specctl.errors import PromptError

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

    def check_cover(self, prompts: Iterable[Prompt]) -> None:
        """Checks that every prompt has a response to its own text.

        Raises:
            PromptError: prompts without a response; `PromptLineError` for a record of another
                text or of another number of turns.
        """
        prompts = list(prompts)
        missing = [p.prompt_id for p in prompts if p.prompt_id not in self.by_prompt]
        if missing:
            raise PromptError(
                f"{self.path} has no response to {len(missing)} of {len(prompts)} prompts, first "
                f"{missing[0]!r}",
                hint="add them, or leave those prompts out",
            )
        for prompt in prompts:
            response = self.by_prompt[prompt.prompt_id]
            if response.prompt_turns is not None and response.prompt_turns != prompt.turns:
                raise response.entry.refuse(
                    f"it answers {response.prompt_turns[0][:40]!r}, which is not the text of "
                    f"prompt {prompt.prompt_id!r}",
                    "give each response its own prompt_id",
                )
            if len(response.turns) != len(prompt.turns):
                counts = f"{len(response.turns)} responses to {len(prompt.turns)} turns"
                raise response.entry.refuse(counts)


def load_responses(path: Path, *, hide_text: bool = False) -> Responses:
    """Reads a file of responses.

    Args:
        hide_text: as for their prompts, see `load_prompts`.

    Raises:
        PromptError: a file that cannot be read or is empty; `PromptLineError` for a record that is
            malformed or repeats a prompt id.
    """
    found_by: dict[str, Response] = {}
    with readable(path, "name a JSON-lines or Parquet file of responses"):
        for entry in entries(Entry.first(path, hide_text=hide_text)):
            response = _read(entry)
            earlier = found_by.setdefault(response.prompt_id, response)
            if earlier is not response:
                before = f"{earlier.entry.unit} {earlier.entry.number}"
                raise entry.refuse(f"{before} has the prompt id {response.prompt_id!r} too")
        digest = f"sha256:{file_sha256(path)}"
    if not found_by:
        raise PromptError(f"{path} has no response")
    return Responses(path, digest, found_by)


def _read(entry: Entry) -> Response:
    row = entry.row
    ends = row.get("eos", False)
    if not isinstance(ends, bool):
        raise entry.refuse(f"'eos' is neither true nor false: {repr(ends)[:40]}")
    given = row.get("turns", [row["prompt"]] if "prompt" in row else None)
    prompt_turns = None if given is None else entry.texts(given)
    prompt_id = entry.identifier("prompt_id" if "prompt_id" in row else "id", prompt_turns)
    if prompt_id is None:
        raise entry.refuse(f"it has no 'prompt_id' and no 'prompt', only {entry.keys()}")
    return Response(entry, prompt_id, prompt_turns, _turns(entry), ends)


def _turns(entry: Entry) -> tuple[TurnText, ...]:
    row = entry.row
    if ("response" in row) == ("token_ids" in row):
        found = "both" if "response" in row else "neither"
        raise entry.refuse(f"it has {found} of 'response' and 'token_ids'", "give one of them")
    if "response" in row:
        texts = row["response"] if isinstance(row["response"], list) else [row["response"]]
        turns: tuple[TurnText, ...] = tuple(entry.checked(text, "'response'") for text in texts)
    else:
        value = row["token_ids"]
        is_nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        turns = tuple(_token_ids(ids, entry) for ids in (value if is_nested else [value]))
    if not turns:
        raise entry.refuse("it has no turn")
    return turns


def _token_ids(ids: object, entry: Entry) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        raise entry.refuse(f"'token_ids' is no list of whole numbers: {repr(ids)[:40]}")
    return tuple(ids)
