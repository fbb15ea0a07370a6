"""Every format is read, every malformed file is refused by line, no other exception escapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specctl.collect.prompts import READERS, Prompt, load_prompts
from specctl.errors import PromptError, PromptLineError, UsageError
from specctl.runtime.conversations import conversation_ids


def write(folder: Path, *rows: Any, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


FORMAT_EXAMPLES = {
    "spec-bench": {"question_id": 81, "category": "writing", "turns": ["Hi.", "Shorter."]},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f"},
    "gsm8k": {"question": "2 + 2?", "answer": "2 + 2 = 4.\n#### 4"},
    "sharegpt": {
        "id": "abc",
        "conversations": [
            {"from": "system", "value": "Be kind."},
            {"from": "human", "value": "Hello"},
            {"from": "gpt", "value": "Hi!"},
            {"from": "human", "value": "Bye"},
        ],
    },
    "jsonl": {"id": "x1", "category": "code", "prompt": "Why?", "answer": "because"},
}


@pytest.mark.parametrize("name", FORMAT_EXAMPLES)
@pytest.mark.parametrize("stated", [True, False])
def test_format_is_read_and_detected(tmp_path: Path, name: str, stated: bool) -> None:  # noqa: FBT001
    path = write(tmp_path, FORMAT_EXAMPLES[name])
    (prompt,) = load_prompts(path, format=name if stated else "auto")
    expected = {
        "spec-bench": ("81", "writing", ("Hi.", "Shorter."), None, True),
        "humaneval": ("HumanEval/0", "code", ("def f(x):\n",), None, False),
        "gsm8k": ("line-1-70b499c5", "arithmetic", ("2 + 2?",), "4", True),
        "sharegpt": ("abc", "chat", ("Hello", "Bye"), None, True),
        "jsonl": ("x1", "code", ("Why?",), "because", True),
    }
    found = (prompt.prompt_id, prompt.category, prompt.turns, prompt.answer, prompt.chat)
    assert found == expected[name]


def test_every_format_has_an_example() -> None:
    assert FORMAT_EXAMPLES.keys() == READERS.keys()


def test_text_has_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\r\n\n   \n{ two \u2028 still two\n".encode())
    prompts = load_prompts(path)
    assert [(p.prompt_id, p.turns[0]) for p in prompts] == [
        ("line-1-7692c3ad", "one"),
        ("line-4-9c46a8f3", "{ two \u2028 still two"),
    ]


def test_sharegpt_may_be_one_json_array(tmp_path: Path) -> None:
    item = {"conversations": [{"from": "human", "value": "Hello"}]}
    path = tmp_path / "share.json"
    path.write_text(json.dumps([item, item], indent=2))
    found = [prompt.prompt_id for prompt in load_prompts(path)]
    assert found == ["item-1-185f8db3", "item-2-185f8db3"]


def test_raw_and_turns_of_the_jsonl_format(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "x = ", "raw": True}, {"turns": ["a", "b"], "id": 7})
    first, second = load_prompts(path)
    assert (first.prompt_id[:7], first.chat) == ("line-1-", False)
    assert (second.prompt_id, second.turns, second.chat) == ("7", ("a", "b"), True)


def test_ids_of_another_file_differ(tmp_path: Path) -> None:
    """Or resuming with the wrong file would skip its lines as already collected."""
    first = load_prompts(write(tmp_path, GOOD, name="a.jsonl"))
    again = load_prompts(write(tmp_path, GOOD, name="b.jsonl"))
    other = load_prompts(write(tmp_path, {"prompt": "other"}, name="c.jsonl"))
    assert first == again
    assert first[0].prompt_id != other[0].prompt_id


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b"}, "{broken")
    assert len(load_prompts(path, limit=2)) == 2
    with pytest.raises(PromptLineError, match="line 3"):
        load_prompts(path)


GOOD = {"prompt": "fine"}
BAD_LINES = {
    "bad json": ("{", "JSON"),
    "not an object": ("3", "a JSON object, found a int"),
    "an array later on": ("[1]", "a JSON object"),
    "missing key": ({"text": "x"}, "one of 'prompt' and 'turns', found neither"),
    "two keys": ({"prompt": "x", "turns": ["y"]}, "found both"),
    "wrong type": ({"prompt": 3}, "'prompt' as a string, found a number"),
    "null": ({"prompt": None}, "found nothing"),
    "blank": ({"prompt": " \n"}, "found a blank string"),
    "empty turns": ({"turns": []}, "at least one turn, found an empty list"),
    "turns not a list": ({"turns": "x"}, "found a string"),
    "blank turn": ({"turns": ["x", ""]}, "each turn with text"),
    "bad id": ({"prompt": "x", "id": [1]}, "'id' as a string, found a list"),
    "boolean id": ({"prompt": "x", "id": True}, "found a truth value"),
    "long id": ({"prompt": "x", "id": "é" * 129}, "'id' of at most 256 bytes, found 258"),
    "long category": ({"prompt": "x", "category": "c" * 257}, "'category' of at most 256 bytes"),
    "bad raw": ({"prompt": "x", "raw": "yes"}, "'raw' as true or false"),
    "bad answer": ({"prompt": "x", "answer": 4}, "'answer' as a string"),
    "half a surrogate": ('{"prompt": "\\ud800"}', "half a surrogate pair"),
    "huge number": ('{"prompt": ' + "9" * 5000 + "}", "JSON of sane size"),
    "deep nesting": ("[" * 100_000, "line 2"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_malformed_line_is_named(tmp_path: Path, name: str) -> None:
    line, message = BAD_LINES[name]
    path = write(tmp_path, GOOD, line)
    with pytest.raises(PromptLineError) as caught:
        load_prompts(path)
    assert caught.value.line == 2
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


BAD_RECORDS = {
    "gsm8k": ({"question": "x", "answer": "4"}, "no final number"),
    "sharegpt": ({"conversations": [{"from": "gpt", "value": "x"}]}, "human turn"),
    "spec-bench": ({"question_id": 1}, "'turns' as a list of strings, found nothing"),
    "humaneval": ({"task_id": "a"}, "key 'prompt'"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_malformed_record_of_a_stated_format_is_refused(tmp_path: Path, name: str) -> None:
    row, message = BAD_RECORDS[name]
    with pytest.raises(PromptLineError, match=message):
        load_prompts(write(tmp_path, row), format=name)


@pytest.mark.parametrize(
    "messages", ["x", [3], [{"from": "human", "value": 3}], [{"from": "human"}]]
)
def test_malformed_conversations_are_refused(tmp_path: Path, messages: Any) -> None:
    with pytest.raises(PromptLineError, match="line 1"):
        load_prompts(write(tmp_path, {"conversations": messages}))


def test_invalid_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xff"}\n')
    with pytest.raises(
        PromptLineError, match=r"line 2: expected UTF-8, found byte 0xff at column 13"
    ):
        load_prompts(path)


def test_duplicate_ids_name_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, {"id": "a", "prompt": "x"}, GOOD, {"id": "a", "prompt": "y"})
    with pytest.raises(PromptLineError, match=r"line 3: .*'a', which line 1 has too"):
        load_prompts(path)


def test_error_in_an_array_names_the_item(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "x"}, {"prompt": ""}], name="a.json")
    with pytest.raises(PromptError, match="item 2"):
        load_prompts(path)


def test_syntax_error_in_an_array_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\n[\n{"prompt": "x"},\n{"prompt" "y"}]')
    with pytest.raises(PromptLineError, match="line 4"):
        load_prompts(path)


@pytest.mark.parametrize(
    "row", [{"prompt": "x", "turns": ["y"]}, {"prompt": "x", "conversations": []}, {"text": "x"}]
)
def test_ambiguous_or_unknown_keys_ask_for_a_format(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="--format"):
        load_prompts(write(tmp_path, row))


@pytest.mark.parametrize("content", [b"", b"\n \n", b"[]"])
def test_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(PromptError, match="at least one prompt, found none"):
        load_prompts(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no such file"):
        load_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(PromptError, match="found a folder"):
        load_prompts(tmp_path)


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(UsageError, match="'alpaca'"):
        load_prompts(path, format="alpaca")
    with pytest.raises(UsageError, match="at least 1, found 0"):
        load_prompts(path, limit=0)


LINES = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(
        st.sampled_from(["prompt", "turns", "id", "question", "answer", "conversations", "raw"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=4,
        ),
    ).map(lambda row: json.dumps(row).encode()),
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=st.lists(LINES, max_size=4), name=st.sampled_from(["auto", "text", *READERS]))
def test_any_bytes_give_prompts_or_a_prompt_error(
    tmp_path: Path, lines: list[bytes], name: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        prompts = load_prompts(path, format=name)
    except PromptError:
        return
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts) > 0
    assert all(turn.strip() for prompt in prompts for turn in prompt.turns)


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    words = ["<s>", "user", "assistant", "hi", "yes", "more", "?"]
    vocabulary = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="?")
    tokenizer.chat_template = template
    return tokenizer


def test_chat_template_is_used_where_there_is_one() -> None:
    prompt = Prompt("p", "", ("hi", "more"))
    tokenizer = make_tokenizer(TEMPLATE)
    assert conversation_ids(tokenizer, prompt, []) == [1, 3, 2]
    assert conversation_ids(tokenizer, prompt, ["yes"]) == [1, 3, 2, 4, 1, 5, 2]


def test_plain_text_gets_the_tokenizers_own_special_tokens() -> None:
    prompt = Prompt("p", "", ("hi", "more"))
    assert conversation_ids(make_tokenizer(None), prompt, ["yes"]) == [0, 3, 4, 5]
    raw = replace(prompt, chat=False)
    assert conversation_ids(make_tokenizer(TEMPLATE), raw, []) == [0, 3]
