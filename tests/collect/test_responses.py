"""Files of responses: paired by id, place or text; what cannot be used is counted by reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.collect.prompts import load_prompts
from specctl.collect.responses import load_responses
from specctl.errors import PromptError, PromptLineError


def write(folder: Path, name: str, *rows: dict[str, Any]) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def choice(text: Any, **more: Any) -> dict[str, Any]:
    """A choice of a chat, as a server sends it."""
    reason = more.pop("finish_reason", "stop")
    message = {"role": "assistant", "content": text, **more.pop("message", {})}
    return {"index": 0, "message": message, "finish_reason": reason, **more}


def answer(*choices: dict[str, Any], status: int = 200, **more: Any) -> dict[str, Any]:
    """A line of a batch file's output."""
    body = {"id": "chatcmpl-1", "object": "chat.completion", "choices": list(choices)}
    response = {"status_code": status, "request_id": "r", "body": body}
    return {"id": "vllm-1", "custom_id": "t", "response": response, "error": None, **more}


USABLE: list[tuple[dict[str, Any], tuple[Any, ...], bool]] = [
    # record, its turns, whether their end is known
    ({"id": "t", "response": "b"}, ("b",), False),
    ({"prompt_id": "t", "response": ["b", "c"], "eos": True}, ("b", "c"), True),
    ({"question_id": "t", "token_ids": [1, 2]}, ((1, 2),), False),
    ({"custom_id": "t", "response": "b"}, ("b",), False),
    ({"custom_id": "t", "token_ids": [[1], [2]]}, ((1,), (2,)), False),
    (answer(choice("b")), ("b",), False),
    (answer(choice("b", stop_reason=None)), ("b",), True),  # vLLM: the end of text ended it
    (answer(choice("b", stop_reason="###")), ("b",), False),
    (answer(choice("b", stop_reason=None, finish_reason="length")), ("b",), False),
    (answer({"index": 0, "text": "b", "finish_reason": "stop", "stop_reason": None}), ("b",), True),
    (answer(choice("b"), choice("c")), ("b",), False),
    (answer(choice("b", token_ids=[5, 6])), ((5, 6),), False),
    (answer(choice(None, token_ids=[5], message={"tool_calls": [{}]})), ((5,),), False),
    (answer(choice("b", message={"tool_calls": [], "reasoning_content": None})), ("b",), False),
]


@pytest.mark.parametrize(("row", "turns", "ends"), USABLE)
def test_record_of_a_response(
    tmp_path: Path, row: dict[str, Any], turns: tuple[Any, ...], *, ends: bool
) -> None:
    found = load_responses(write(tmp_path, "r.jsonl", row)).by_prompt["t"]
    assert (found.turns, found.ends) == (turns, ends)


UNUSABLE: dict[str, list[dict[str, Any]]] = {
    # reason: records
    "the request failed": [
        answer(response=None, error={"message": "no such model", "code": 400}),
        answer(status=500),
        answer(response={"status_code": 400, "body": {"error": {"message": "too long"}}}),
        answer(choice("b"), error={"code": "batch_expired", "message": "expired"}),
        answer(response="b", error="expired"),
        *(answer(response={"status_code": status, "body": "gone"}) for status in (200, 502)),
        answer(response={"status_code": 200, "body": {"error": {"message": "too long"}}}),
    ],
    "an answer without choices": [
        answer(response={"status_code": 200, "body": {"object": "list", "data": []}}),
        answer(),
    ],
    "it calls tools": [answer(choice(None, message={"tool_calls": [{"id": "c"}]}))],
    "its reasoning is kept apart from its text": [
        answer(choice("b", message={"reasoning": "hm"})),
        answer(choice("b", message={"reasoning_content": "hm"})),
    ],
    "the answer is blank": [answer(choice(" \n"))],
    "the answer must be a string, not nothing": [
        answer(choice(None)),
        answer({"index": 0, "message": "b"}),
    ],
    "'response' is blank": [{"id": "t", "response": ""}, {"id": "t", "response": ["b", "\u200b"]}],
    "'response' must be a string, not a number": [{"id": "t", "response": 3}],
    "it has neither 'response' nor 'token_ids'": [{"id": "t"}, {"id": "t", "response": None}],
    "it has both of 'response' and 'token_ids'": [{"id": "t", "response": "b", "token_ids": [1]}],
    "'token_ids' is no list of whole numbers": [
        {"id": "t", "token_ids": value} for value in ([], [-1], [1.5], ["a"], "1")
    ],
    "'eos' is neither true nor false": [{"id": "t", "response": "b", "eos": "yes"}],
    "neither an id nor a prompt": [{"response": "b"}],
    "it has no turn": [{"id": "t", "response": []}],
    "an earlier one has its prompt id": [{"id": "a", "response": "c"}],
    "no text of a user": [{"prompt": " ", "response": "b"}],
}


@pytest.mark.parametrize(
    ("reason", "row"), [(reason, row) for reason, rows in UNUSABLE.items() for row in rows]
)
def test_unusable_record_is_counted_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str, row: dict[str, Any]
) -> None:
    path = write(tmp_path, "r.jsonl", {"id": "a", "response": "b"}, row)
    assert list(load_responses(path).by_prompt) == ["a"]
    assert f"1 of 2 entries skipped: {reason} (line 2" in caplog.messages[0]
    with pytest.raises(PromptLineError) as caught:
        load_responses(path, strict=True)
    assert caught.value.reason == reason
    assert caught.value.hint


PROMPTS = [{"id": "a", "prompt": "x"}, {"id": "b", "turns": ["y", "z"]}]
UNPAIRED: list[tuple[list[dict[str, Any]], str]] = [
    # records, what is said of prompt b
    ([], "no response (b)"),
    ([{"id": "b", "prompt": "q", "response": "r"}], "the response is to another text (b: 'q')"),
    ([{"id": "b", "response": "r"}], "turns (b: 1 responses to 2 turns)"),
]


@pytest.mark.parametrize(("rows", "said"), UNPAIRED)
def test_prompts_without_a_response_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: list[dict[str, Any]], said: str
) -> None:
    prompts = load_prompts(write(tmp_path, "p.jsonl", *PROMPTS))
    good = {"id": "a", "prompt": "x", "response": "r"}
    responses = load_responses(write(tmp_path, "r.jsonl", good, *rows))
    assert responses.answered(prompts, strict=False) == prompts[:1]
    assert "1 of 2 prompts skipped" in caplog.messages[0]
    assert said in caplog.messages[0]
    with pytest.raises(PromptLineError, match=", b: "):
        responses.answered(prompts, strict=True)
    with pytest.raises(PromptLineError, match=", b: "):
        responses.answered(prompts[1:], strict=False)


def test_batch_files_are_paired_by_custom_id(tmp_path: Path) -> None:
    """In any order; the request that failed has no response."""
    asked = [
        {"custom_id": f"t{n}", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": f"say {n}"}]}}
        for n in range(3)
    ]  # fmt: skip
    failed = {"custom_id": "t1", "response": None, "error": {"message": "no"}}
    served = [answer(choice(f"{n}"), custom_id=f"t{n}") for n in (2, 0)]
    prompts = load_prompts(write(tmp_path, "in.jsonl", *asked))
    responses = load_responses(write(tmp_path, "out.jsonl", *served, failed))
    found = responses.answered(prompts, strict=False)
    pairs = [(one.turns, responses.by_prompt[one.prompt_id].turns) for one in found]
    assert pairs == [(("say 0",), ("0",)), (("say 2",), ("2",))]


def test_one_file_is_both(tmp_path: Path) -> None:
    """A log of instructions and responses, of which no entry has an id."""
    rows = [{"instruction": f"say {n}", "context": "loud", "response": f"{n}"} for n in range(3)]
    path = write(tmp_path, "log.jsonl", *rows, rows[0])
    prompts, responses = load_prompts(path), load_responses(path)
    assert responses.answered(prompts, strict=True) == prompts


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bad").write_text('{"prompt_id": 2,\n')
    says = {"no": "no such file", "": "a folder", "empty": "has no response", "bad": "line 1"}
    for name, found in says.items():
        with pytest.raises(PromptError, match=found):
            load_responses(tmp_path / name)
