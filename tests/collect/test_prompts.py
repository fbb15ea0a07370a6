"""Every format is read, every malformed file is refused by line, no other exception escapes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specctl.collect.prompts import PLACEHOLDER, READERS, Prompt, load_prompts
from specctl.collect.responses import load_responses
from specctl.errors import PromptError, PromptLineError, UsageError
from specctl.runtime.conversations import conversation_ids
from specctl.stats import split_prompts


def write(folder: Path, *rows: Any, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


GOOD = {"prompt": "fine"}
HELLO = {"conversations": [{"from": "human", "value": "Hello"}]}
TALK = [("system", "Be kind."), ("human", "Hello"), ("gpt", "Hi!"), ("human", "Bye")]
FORMATS: dict[str, tuple[dict[str, Any], Prompt]] = {
    "spec-bench": (
        {"question_id": 81, "category": "writing", "turns": ["Hi.", "Shorter."]},
        Prompt("81", "writing", ("Hi.", "Shorter.")),
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f"},
        Prompt("HumanEval/0", "code", ("def f(x):\n",), chat=False),
    ),
    "gsm8k": (
        {"question": "2 + 2?", "answer": "2 + 2 = 4.\n#### 4"},
        Prompt("line-1-70b499c5", "arithmetic", ("2 + 2?",), "4"),
    ),
    "sharegpt": (
        {"id": "abc", "conversations": [{"from": who, "value": text} for who, text in TALK]},
        Prompt("abc", "chat", ("Hello", "Bye")),
    ),
    "jsonl": (
        {"id": "x1", "category": "code", "prompt": "Why?", "answer": "because"},
        Prompt("x1", "code", ("Why?",), "because"),
    ),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("stated", [True, False])
def test_format_is_read_and_detected(tmp_path: Path, name: str, *, stated: bool) -> None:
    row, expected = FORMATS[name]
    assert load_prompts(write(tmp_path, row), format=name if stated else "auto") == [expected]


FILES: dict[str, tuple[bytes, list[Prompt]]] = {
    "a.txt": (
        "\ufeffone\r\n\n   \n{ two \u2028 still two\n".encode(),
        [
            Prompt("line-1-7692c3ad", "", ("one",)),
            Prompt("line-4-9c46a8f3", "", ("{ two \u2028 still two",)),
        ],
    ),
    "an array.json": (
        json.dumps([HELLO, HELLO], indent=2).encode(),
        [Prompt(f"item-{n}-185f8db3", "chat", ("Hello",)) for n in (1, 2)],
    ),
    "raw and turns.jsonl": (
        b'{"prompt": "x", "raw": true, "id": "r"}\n{"turns": ["a", "b"], "id": 7}\n',
        [Prompt("r", "", ("x",), chat=False), Prompt("7", "", ("a", "b"))],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_become_prompts(tmp_path: Path, name: str) -> None:
    content, expected = FILES[name]
    (tmp_path / name).write_bytes(content)
    assert load_prompts(tmp_path / name) == expected


def test_a_limit_is_spread_over_categories_and_grows_by_adding() -> None:
    """The packaged set is sorted by category: its first prompts would be arithmetic alone."""
    every = load_prompts("embedded")
    categories = {prompt.category for prompt in every}
    chosen = [load_prompts("embedded", limit=limit) for limit in (1, len(categories), 25)]
    assert [len(found) for found in chosen] == [1, len(categories), 25]
    assert {prompt.category for prompt in chosen[1]} == categories
    for small, large in pairwise(chosen):
        assert set(small) < set(large)
        assert large == [prompt for prompt in every if prompt in large]
    assert load_prompts("embedded", limit=25, limit_seed=1) != chosen[2]
    split = split_prompts((prompt.prompt_id for prompt in chosen[2]), held_out_frac=0.5, seed=0)
    assert min(len(split.train), len(split.held_out)) >= 5, "chosen as splits are: no side left"
    assert load_prompts("embedded", limit=len(every) + 1) == every


BAD_LINES: dict[str, tuple[Any, str]] = {
    "bad json": (b"{", "JSON"),
    "not an object": (b"3", "this is a number, not a JSON object"),
    "missing key": ({"text": "x"}, "it has neither of 'prompt' and 'turns'"),
    "wrong type": ({"prompt": 3}, "'prompt' must be a string, not a number"),
    "blank": ({"prompt": " \n"}, "'prompt' is blank"),
    "empty turns": ({"turns": []}, "'turns' is empty"),
    "turns not a list": ({"turns": "x"}, "not a string"),
    "blank turn": ({"turns": ["x", ""]}, "a turn is blank"),
    "bad id": ({"prompt": "x", "id": [1]}, "'id' must be a string, not a list"),
    "long id": ({"prompt": "x", "id": "é" * 129}, "'id' has 258 bytes, more than 256"),
    "bad raw": ({"prompt": "x", "raw": "yes"}, "'raw' must be true or false, not a string"),
    "half a surrogate": (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
    "deep nesting": (b"[" * 100_000, "line 2"),
    "not UTF-8": (b'{"prompt": "\xff"}', "byte 0xff at column 13 is not UTF-8"),
    "an id twice": ({"prompt": "y", "id": "a"}, "line 1 has the id 'a' too"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_malformed_line_is_named(tmp_path: Path, name: str) -> None:
    line, message = BAD_LINES[name]
    with pytest.raises(PromptLineError) as caught:
        load_prompts(write(tmp_path, GOOD | {"id": "a"}, line))
    assert caught.value.line == 2
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def talk(*messages: Any) -> dict[str, Any]:
    return {"conversations": list(messages)}


BAD_FILES: list[tuple[str, list[Any], str]] = [
    # format, rows, what the refusal says
    ("gsm8k", [{"question": "x", "answer": "4"}], "line 1: the answer does not end in"),
    ("sharegpt", [talk({"from": "gpt", "value": "x"})], "line 1: .*human turn"),
    ("spec-bench", [{"question_id": 1}], "line 1: 'turns' must be a list of strings, not nothing"),
    ("humaneval", [{"task_id": "a"}], "line 1: .*key 'prompt'"),
    ("auto", [talk(3)], "line 1: messages must be objects"),
    ("auto", [talk({"from": "human"})], "line 1: .*key 'value'"),
    ("auto", [[{"prompt": "x"}, {"prompt": ""}]], "item 2: .*blank"),
    ("auto", [b'\n[\n{"prompt": "x"},\n{"prompt" "y"}]'], "line 4"),
    ("auto", [{"prompt": "x", "turns": ["y"]}], "--format"),
    ("auto", [{"text": "x"}], "--format"),
    *(("auto", [empty], "has no prompt") for empty in (b"", b"\n \n", b"[]")),
]


@pytest.mark.parametrize(("format", "rows", "message"), BAD_FILES)
def test_malformed_files_are_refused(
    tmp_path: Path, format: str, rows: list[Any], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        load_prompts(write(tmp_path, *rows), format=format)


def test_places_and_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    for place, options, error, found in (
        (tmp_path / "absent.jsonl", {}, PromptError, "no such file"),
        (tmp_path, {}, PromptError, "is a folder"),
        (path, {"format": "alpaca"}, UsageError, "'alpaca'"),
        (path, {"limit": 0}, UsageError, "at least 1, not 0"),
    ):
        with pytest.raises(error, match=found):
            load_prompts(place, **options)


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


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# --------------------------------------------------------------------------- Parquet


SPEED_BENCH = pa.schema(
    [(name, pa.string()) for name in ("question_id", "category", "sub_category")]
    + [("turns", pa.list_(pa.string()))]
    + [(name, pa.string()) for name in ("source", "src_id", "difficulty")]
    + [("multiturn", pa.bool_())]
)
"""The columns of nvidia/SPEED-Bench, as its dataset card states them."""


def speed_bench(folder: Path, *turns: list[str]) -> Path:
    rows = [
        {
            "question_id": f"q{number + 1}",
            "category": "roleplay" if number % 2 else "coding",
            "turns": given,
            "source": "any",
            "multiturn": len(given) > 1,
        }
        for number, given in enumerate(turns)
    ]
    pq.write_table(pa.Table.from_pylist(rows, SPEED_BENCH), folder / "test.parquet")
    return folder / "test.parquet"


def table(folder: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), folder / "table.parquet")
    return folder / "table.parquet"


def test_speed_bench_is_read_as_it_is(tmp_path: Path) -> None:
    """By its content, whatever the name; several turns as in Spec-Bench, categories kept."""
    path = speed_bench(tmp_path, ["Sort it."], ["Be a pirate.", "Now a king."]).rename(
        tmp_path / "test.txt"
    )
    expected = [
        Prompt("q1", "coding", ("Sort it.",)),
        Prompt("q2", "roleplay", ("Be a pirate.", "Now a king.")),
    ]
    assert load_prompts(path) == load_prompts(path, format="spec-bench") == expected


def test_placeholders_of_speed_bench_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever stands behind them, in any turn; a file of nothing else is refused."""
    empty = [[PLACEHOLDER], [f"{PLACEHOLDER}\n\nSum up: {{article}}"], ["Well?", PLACEHOLDER]]
    path = speed_bench(tmp_path, *empty, ["Sort it."])
    assert [prompt.prompt_id for prompt in load_prompts(path)] == ["q4"]
    [warning] = caplog.messages
    assert "3 of 4 prompts skipped" in warning
    assert "prepare_data.py" in warning
    with pytest.raises(PromptError, match=r"all 3 prompts are .*placeholder; .*prepare_data"):
        load_prompts(speed_bench(tmp_path, *empty))


def test_other_formats_are_read_from_parquet_too(tmp_path: Path) -> None:
    """As the Hugging Face Hub has GSM8K and HumanEval. A null is a key that is not there."""
    path = table(tmp_path, question=["2 + 2?"], answer=["2 + 2 = 4.\n#### 4"])
    [prompt] = load_prompts(path)
    assert prompt.prompt_id.startswith("row-1-")
    assert replace(prompt, prompt_id="") == Prompt("", "arithmetic", ("2 + 2?",), "4")
    path = table(tmp_path, prompt=["a", None], turns=[None, ["b", "c"]], id=[None, 7], x=[b"", b""])
    assert [prompt.turns for prompt in load_prompts(path)] == [("a",), ("b", "c")]
    assert load_prompts(path)[1].prompt_id == "7"


def test_responses_are_read_from_parquet_too(tmp_path: Path) -> None:
    path = table(tmp_path, prompt=["a", "b"], response=["x", None], token_ids=[None, [1, 2]])
    prompts, responses = load_prompts(path), load_responses(path)
    responses.check_cover(prompts)
    assert [responses.by_prompt[one.prompt_id].turns for one in prompts] == [("x",), ((1, 2),)]


BAD_TABLES: list[tuple[dict[str, Any], str]] = [
    ({"text": ["x"], "label": [1]}, r"no column 'turns'.* among \['text', 'label'\]"),
    ({"turns": pa.array([], pa.list_(pa.string()))}, "has no prompt"),
    ({"turns": ["x"], "question_id": ["a"]}, "row 1: .*list of strings, not a string"),
    ({"turns": [["x"], ["y"]], "question_id": ["a", "a"]}, "row 2: row 1 has the id 'a' too"),
    ({"prompt": [b"x"]}, "row 1: .*not bytes"),
    ({"prompt": ["x"], "conversations": [["y"]]}, "row 1: .*columns .*--format"),
    ({"response": ["x"], "id": [1]}, r"row 1: .*columns \['id', 'response'\] belong to none"),
]


@pytest.mark.parametrize(("columns", "message"), BAD_TABLES)
def test_tables_without_prompts_are_refused(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        load_prompts(table(tmp_path, **columns))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_parquet_gives_prompts_or_a_prompt_error(tmp_path: Path, data: Any) -> None:
    """One byte changed, or the end cut off."""
    content = bytearray(speed_bench(tmp_path, ["Sort it."], ["Be a pirate.", "So?"]).read_bytes())
    place = data.draw(st.integers(4, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    (tmp_path / "test.parquet").write_bytes(content)
    try:
        prompts = load_prompts(tmp_path / "test.parquet")
    except PromptError:
        return
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


def test_chat_template_is_used_where_there_is_one_and_else_special_tokens() -> None:
    prompt, tokenizer = Prompt("p", "", ("hi", "more")), make_tokenizer(TEMPLATE)
    assert conversation_ids(tokenizer, prompt, []) == [1, 3, 2]
    assert conversation_ids(tokenizer, prompt, ["yes"]) == [1, 3, 2, 4, 1, 5, 2]
    assert conversation_ids(make_tokenizer(None), prompt, ["yes"]) == [0, 3, 4, 5]
    assert conversation_ids(tokenizer, replace(prompt, chat=False), []) == [0, 3]
