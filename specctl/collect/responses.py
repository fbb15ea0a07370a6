"""A file of responses: what some model, in production or here, answered to known prompts.

JSON lines, or one JSON array, of objects:

| key         | value                                                                     |
|-------------|---------------------------------------------------------------------------|
| `prompt_id` | the prompt's id; `id` is the same. Without either, the prompt's own place |
| `prompt`    | or `turns`: must be the text of the prompt of that id                     |
| `response`  | text, or a list with the text of each turn                                |
| `token_ids` | instead of `response`: token ids, or a list of them for each turn         |
| `eos`       | true where each response ended by itself, so that its end is known        |

A file of production logs can thus be given twice, as prompts and as responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from specctl.collect.prompts import (
    BY_TEXT,
    Naming,
    Prompt,
    Row,
    Spot,
    check_text,
    json_rows,
    readable,
    spot_id,
)
from specctl.durable import file_sha256
from specctl.errors import PromptError

TurnText = str | tuple[int, ...]


@dataclass(frozen=True)
class Response:
    """One record.

    Attributes:
        prompt_turns: the prompt's turns as the record has them, or None.
        turns: text or token ids of each turn.
        ends: each turn's text ended by itself (of token ids, the last one says so).
    """

    spot: Spot
    prompt_id: str
    prompt_turns: tuple[str, ...] | None
    turns: tuple[TurnText, ...]
    ends: bool


@dataclass(frozen=True)
class Responses:
    """A file of responses, by prompt id. `digest` is of its bytes."""

    path: Path
    digest: str
    by_prompt: Mapping[str, Response]

    def check_cover(self, prompts: Iterable[Prompt]) -> None:
        """Refuses prompts without a response, or with another's.

        Raises:
            PromptError: how many have none; `PromptLineError` where a record was made for
                another text, or has another number of turns.
        """
        prompts = list(prompts)
        missing = [p.prompt_id for p in prompts if p.prompt_id not in self.by_prompt]
        if missing:
            raise PromptError(
                str(self.path),
                expected=f"a response to each of {len(prompts)} prompts",
                found=f"none to {len(missing)} of them, first {missing[0]!r}",
                fix="add them, or leave those prompts out",
            )
        for prompt in prompts:
            _check_match(self.by_prompt[prompt.prompt_id], prompt)


def load_responses(path: Path, naming: Naming = BY_TEXT) -> Responses:
    """Reads a file of responses.

    Args:
        naming: of records without an id, as of their prompts.

    Raises:
        PromptError: not a file that can be read, or empty; `PromptLineError` where one record
            is malformed, or has the prompt id of an earlier one.
    """
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise PromptError(
            str(path), expected="a file of responses", found=found, fix="name a JSON-lines file"
        )
    found_by: dict[str, Response] = {}
    with readable(path):
        for spot, row in json_rows(path, naming):
            response = _read(row, spot)
            earlier = found_by.setdefault(response.prompt_id, response)
            if earlier is not response:
                found = f"{response.prompt_id!r}, as {earlier.spot.unit} {earlier.spot.number}"
                raise spot.refuse("a prompt id that is not used yet", found)
        digest = f"sha256:{file_sha256(path)}"
    if not found_by:
        raise PromptError(
            str(path), expected="at least one response", found="none", fix="fill the file"
        )
    return Responses(path, digest, found_by)


def _read(row: Row, spot: Spot) -> Response:
    ends = row.get("eos", False)
    if not isinstance(ends, bool):
        raise spot.refuse("'eos' as true or false", repr(ends)[:40])
    prompt_turns = _prompt_turns(row, spot)
    return Response(
        spot, _prompt_id(row, prompt_turns, spot), prompt_turns, _turns(row, spot), ends
    )


def _prompt_turns(row: Row, spot: Spot) -> tuple[str, ...] | None:
    turns = row.get("turns", [row["prompt"]] if "prompt" in row else None)
    if turns is None:
        return None
    if not isinstance(turns, list) or not turns:
        raise spot.refuse("'turns' as a list of strings", repr(turns)[:40])
    return tuple(check_text(turn, "each turn", spot) for turn in turns)


def _prompt_id(row: Row, prompt_turns: tuple[str, ...] | None, spot: Spot) -> str:
    found = row.get("prompt_id", row.get("id"))
    if found is None and prompt_turns is not None:
        return spot_id(spot, prompt_turns)
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    if found is None:
        raise spot.refuse("'prompt_id', or the 'prompt' itself", f"keys {sorted(row)[:8]}")
    return check_text(found, "'prompt_id'", spot)


def _turns(row: Row, spot: Spot) -> tuple[TurnText, ...]:
    if ("response" in row) == ("token_ids" in row):
        found = "both" if "response" in row else "neither"
        raise spot.refuse("one of 'response' and 'token_ids'", found)
    if "response" in row:
        texts = row["response"] if isinstance(row["response"], list) else [row["response"]]
        turns: tuple[TurnText, ...] = tuple(check_text(t, "'response'", spot) for t in texts)
    else:
        value = row["token_ids"]
        is_nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        turns = tuple(_token_ids(ids, spot) for ids in (value if is_nested else [value]))
    if not turns:
        raise spot.refuse("at least one turn", "an empty list")
    return turns


def _token_ids(ids: object, spot: Spot) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        raise spot.refuse("'token_ids' as whole numbers, at least one", repr(ids)[:40])
    return tuple(ids)


def _check_match(response: Response, prompt: Prompt) -> None:
    if response.prompt_turns is not None and response.prompt_turns != prompt.turns:
        raise response.spot.refuse(
            f"the text of prompt {prompt.prompt_id!r}",
            repr(response.prompt_turns[0][:40]),
            "give each response its own prompt_id",
        )
    if len(response.turns) != len(prompt.turns):
        raise response.spot.refuse(
            f"a response to each of {len(prompt.turns)} turns", str(len(response.turns))
        )
