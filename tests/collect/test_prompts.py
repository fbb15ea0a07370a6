"""Every file of prompts as people have them is read; what cannot be used is counted by reason; no
other exception escapes. `SHAPES` has the shapes of one entry, `FILES` those of a file."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specctl.collect.prompts import PLACEHOLDER, Prompt, load_prompts, with_room
from specctl.collect.responses import load_responses
from specctl.errors import PromptError, PromptLineError
from specctl.runtime.config import DecodingConfig, PromptFormat
from specctl.runtime.conversations import conversation_ids
from specctl.stats import split_prompts

gzipped = partial(gzip.compress, mtime=0)  # tests are named by these bytes


def write(folder: Path, *rows: Any, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def sharegpt(*messages: tuple[str, Any], key: str = "conversations", **more: Any) -> dict[str, Any]:
    return {key: [{"from": who, "value": text} for who, text in messages], **more}


def chat(*messages: tuple[str, Any], key: str = "messages", **more: Any) -> dict[str, Any]:
    return {key: [{"role": who, "content": text} for who, text in messages], **more}


def part(text: str, sort: str = "text") -> dict[str, str]:
    return {"type": sort, "text": text}


def batch(body: Any, url: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    return {"custom_id": "t", "method": "POST", "url": url, "body": body, **more}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ASKED = {"role": "user", "content": "a"}
TOOL = {"role": "tool", "tool_call_id": "c", "content": "4 C"}
SYSTEM = (("system", "s"),)
GOOD = {"prompt": "fine"}
HELLO = {"conversations": [{"from": "human", "value": "Hello"}]}

SHAPES: list[tuple[str, dict[str, Any], Prompt]] = [
    # entry, its prompt without an id of its place
    ("embedded set", {"id": "x", "category": "c", "prompt": "Why?", "answer": "because"},
     Prompt("x", "c", ("Why?",), "because")),
    ("turns", {"turns": ["a", "b"], "id": 7}, Prompt("7", "", ("a", "b"))),
    ("Spec-Bench", {"question_id": 81, "category": "writing", "turns": ["Hi.", "Shorter."]},
     Prompt("81", "writing", ("Hi.", "Shorter."))),
    ("MT-Bench of the Hub", {"prompt": ["a", "b"], "prompt_id": 81700001, "category": "math",
     "reference": ["x", "y"]}, Prompt("81700001", "math", ("a", "b"))),
    ("Vicuna's questions", {"question_id": 1, "text": "How?", "category": "generic"},
     Prompt("1", "generic", ("How?",))),
    ("HumanEval", {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f",
     "canonical_solution": "  return x", "test": "assert"},
     Prompt("HumanEval/0", "code", ("def f(x):\n",), chat=False)),
    ("MBPP", {"task_id": 11, "text": "Write a function.", "code": "def f(): ..."},
     Prompt("11", "", ("Write a function.",))),
    ("a task that is no code", {"task_id": "t1", "prompt": "Hi"}, Prompt("t1", "", ("Hi",))),
    ("GSM8K", {"question": "2 + 2?", "answer": "2 + 2 = 4.\n#### 4"},
     Prompt("", "arithmetic", ("2 + 2?",), "4")),
    ("a question of no number", {"question": "Who?", "answer": "Euclid, as is known."},
     Prompt("", "", ("Who?",))),
    ("an answer as a number", {"prompt": "x", "answer": 42}, Prompt("", "", ("x",), "42")),
    ("an answer as a list", {"prompt": "x", "answer": ["4"]}, Prompt("", "", ("x",))),
    ("Alpaca without input", {"instruction": "Name three.", "input": "", "output": "A, B."},
     Prompt("", "", ("Name three.",))),
    ("Alpaca", {"instruction": "State the class.", "input": "Blue whale", "output": "Mammal",
     "text": "Below is an instruction ... ### Response: Mammal"},
     Prompt("", "", ("State the class.\n\nBlue whale",))),
    ("Dolly", {"instruction": "Who?", "context": "Text.", "response": "X", "category": "closed_qa"},
     Prompt("", "closed_qa", ("Who?\n\nText.",))),
    ("SQuAD", {"id": "56", "title": "T", "question": "Who?", "context": "Text.",
     "answers": {"text": ["X"]}}, Prompt("56", "", ("Who?\n\nText.",))),
    ("a prompt beside its body", {"body": "x", **GOOD}, Prompt("", "", ("fine",))),
    ("OpenOrca", {"id": "niv.1", "system_prompt": "s", "question": "Why?", "response": "So."},
     Prompt("niv.1", "", ("Why?",), before=SYSTEM)),
    ("an input alone", {"input": "Say it.", "output": "It."}, Prompt("", "", ("Say it.",))),
    ("an input of messages", chat(("user", "a"), key="input", ideal="b"),
     Prompt("", "", ("a",))),
    ("keys in capitals", {"Instruction": "a", "Input": "b"}, Prompt("", "", ("a\n\nb",))),
    ("OASST", {"message_id": "1", "parent_id": None, "text": "a", "role": "prompter"},
     Prompt("", "", ("a",))),
    ("Alpaca with earlier turns", {"instruction": "c", "input": "", "history": [["a", "b"]]},
     Prompt("", "", ("a", "c"))),
    ("vLLM's custom set", {"prompt": "a", "output_tokens": 10}, Prompt("", "", ("a",))),
    ("AIPerf, one turn", {"text": "a", "delay": 5}, Prompt("", "", ("a",))),
    ("AIPerf, turns", {"session_id": "s", "turns": [{"text": "a"}, {"text": "b", "delay": 3}]},
     Prompt("", "", ("a", "b"))),
    ("TRL and verl", chat(("system", "s"), ("user", "a"), key="prompt", ability="math"),
     Prompt("", "", ("a",), before=SYSTEM)),
    ("UltraChat of the Hub", chat(("user", "a"), ("assistant", "b"), ("user", "c"), prompt="a",
     prompt_id="f0e3"), Prompt("f0e3", "chat", ("a", "c"))),
    ("no_robots", chat(("user", "a"), ("assistant", "b"), prompt="a", prompt_id="k",
     category="Brainstorm"), Prompt("k", "Brainstorm", ("a",))),
    ("a rendered text beside", chat(("user", "a"), text="<|user|>a<|assistant|>b"),
     Prompt("", "chat", ("a",))),
    ("LMSYS", chat(("user", "a"), ("assistant", "b"), key="conversation", conversation_id="e4",
     model="m"), Prompt("e4", "chat", ("a",))),
    ("ShareGPT", sharegpt(("system", "s"), ("human", "a"), ("gpt", "b"), ("human", "c"), id="abc"),
     Prompt("abc", "chat", ("a", "c"), before=SYSTEM)),
    ("ShareGPT of others", sharegpt(("user", "a"), ("chatgpt", "b"), ("bing", "c")),
     Prompt("", "chat", ("a",))),
    ("LLaMA-Factory", sharegpt(("human", "a"), ("function_call", "f"), ("observation", "4 C"),
     ("gpt", "b"), system="s", tools="[]"), Prompt("", "chat", ("a",), before=SYSTEM)),
    ("it starts with a reply", sharegpt(("gpt", "b"), ("human", "a"), ("gpt", "c")),
     Prompt("", "chat", ("a",))),
    ("roles in capitals", chat(("System", "s"), ("User", "a"), ("Assistant", "b")),
     Prompt("", "chat", ("a",), before=SYSTEM)),
    ("a developer's text", chat(("developer", "s"), ("user", "a")),
     Prompt("", "chat", ("a",), before=SYSTEM)),
    ("SpecForge", chat(("user", "a"), ("assistant", "b"), key="conversations", status="success",
     id="chat_0"), Prompt("chat_0", "chat", ("a",))),
    ("parts of text", chat(("user", [part("And"), part("at dusk?", "input_text"), "So?"])),
     Prompt("", "chat", ("And\nat dusk?\nSo?",))),
    ("a call of a tool", {"messages": [ASKED, CALLING, TOOL, {"role": "assistant", "content": "b"},
     {"role": "user", "content": "c"}]}, Prompt("", "chat", ("a", "c"))),
    ("a blank turn", sharegpt(("human", "a"), ("gpt", ""), ("human", "\u200b"), ("gpt", "4")),
     Prompt("", "chat", ("a",))),
    ("a blank turn in front", sharegpt(("human", " \n"), ("gpt", "?"), ("human", "a")),
     Prompt("", "chat", ("a",))),
    ("blank and absent turns", {"turns": ["a", "", None, " "]}, Prompt("", "", ("a",))),
    ("an image in a reply", {"messages": [ASKED, {"role": "assistant", "content": [
     {"type": "image_url", "image_url": {"url": "u"}}]}]}, Prompt("", "chat", ("a",))),
    ("an image that is none", {"image": "", "images": [], **GOOD}, Prompt("", "", ("fine",))),
    ("raw", {"prompt": "x", "raw": True}, Prompt("", "", ("x",), chat=False)),
    ("raw of a cell", {"prompt": "x", "raw": "true"}, Prompt("", "", ("x",), chat=False)),
    ("white space stays", {"prompt": " x\n"}, Prompt("", "", (" x\n",))),
    ("an id as a float", {"prompt": "x", "id": 81.0}, Prompt("81", "", ("x",))),
    ("a blank id", {"prompt": "x", "id": " "}, Prompt("", "", ("x",))),
    ("MongoDB's id", {"prompt": "x", "_id": {"$oid": "65f0"}}, Prompt("65f0", "", ("x",))),
    ("a uuid", {"prompt": "x", "uuid": "1-2"}, Prompt("1-2", "", ("x",))),
    ("ids of several kinds", {"prompt": "x", "id": "r", "question_id": 3}, Prompt("3", "", ("x",))),
    ("a category as a list", {"prompt": "x", "category": ["c"]}, Prompt("", "", ("x",))),
    ("a category of a number", {"prompt": "x", "category": 3}, Prompt("", "3", ("x",))),
    ("a list in a cell", {"messages": json.dumps([ASKED])}, Prompt("", "chat", ("a",))),
    ("a list as pandas writes it", {"messages": "[{'role': 'user', 'content': 'a'}]"},
     Prompt("", "chat", ("a",))),
    ("batch, chat", batch(chat(("system", "s"), ("user", "a"), model="m", max_tokens=9)),
     Prompt("t", "", ("a",), before=SYSTEM)),
    ("batch, earlier turns", batch(chat(("user", "a"), ("assistant", "b"), ("user", "c"))),
     Prompt("t", "", ("c",), before=(("user", "a"), ("assistant", "b")))),
    ("batch, tools", batch({"messages": [ASKED, CALLING, TOOL, ASKED], "tools": [{}]}),
     Prompt("t", "", ("a",), before=(("user", "a"),))),
    ("batch, completion", batch({"model": "m", "prompt": "def f"}, "/v1/completions"),
     Prompt("t", "", ("def f",), chat=False)),
    ("batch, completion of a list", batch({"prompt": ["def f"]}, "/v1/completions"),
     Prompt("t", "", ("def f",), chat=False)),
    ("batch, responses", batch({"input": "a", "instructions": "s"}, "/v1/responses"),
     Prompt("t", "", ("a",), before=SYSTEM)),
    ("batch without its url", {"custom_id": "t", "body": {"messages": [ASKED]}},
     Prompt("t", "", ("a",))),
]  # fmt: skip


def anonymous(prompt: Prompt) -> Prompt:
    """The prompt without an id made of its place."""
    is_place = prompt.prompt_id.startswith(("line-", "item-", "row-"))
    return replace(prompt, prompt_id="") if is_place else prompt


@pytest.mark.parametrize(("row", "expected"), [shape[1:] for shape in SHAPES],
                         ids=[shape[0] for shape in SHAPES])  # fmt: skip
def test_shape_of_an_entry(tmp_path: Path, row: dict[str, Any], expected: Prompt) -> None:
    [prompt] = load_prompts(write(tmp_path, row))
    assert anonymous(prompt) == expected


NOTES: list[tuple[dict[str, Any], list[str]]] = [
    (sharegpt(("system", "s"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")),
     ["replies left out, as the target writes its own: 2",
      "system texts kept, before the first turn: 1"]),
    ({"messages": [ASKED, CALLING, TOOL]}, ["turns of tools left out: 2"]),
    (sharegpt(("human", "a"), ("system", "s")), ["system texts after the first turn left out: 1"]),
    (sharegpt(("human", "a"), ("critic", "s")), ["turns of other roles left out: 1"]),
    ({"turns": ["a", "", " "]}, ["blank turns left out: 2"]),
    (batch({"messages": [ASKED], "tools": [{}]}),
     ["requests whose definitions of tools are left out: 1"]),
    ({"prompt": "x", "category": "é" * 129}, ["categories left out that are no short text: 1"]),
    (GOOD, []),
]  # fmt: skip


@pytest.mark.parametrize(("row", "notes"), NOTES)
def test_what_becomes_of_the_rest_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: dict[str, Any], notes: list[str]
) -> None:
    load_prompts(write(tmp_path, row))
    said = caplog.messages[0].partition("jsonl: ")[2].split("; ") if caplog.messages else []
    assert said == notes


UNUSABLE: dict[str, list[Any]] = {
    # reason: entries
    "no JSON": [b"{", b'{"prompt": "x"', b"prompt"],
    "a number, not a JSON object": [b"3", 1.5],
    "a list, not a JSON object": [b"[1]", []],
    "nothing, not a JSON object": [None],
    "JSON that cannot be read": [b'{"prompt": ' + b"9" * 5000 + b"}", b"[" * 100_000],
    "not UTF-8": [b'{"prompt": "\xff"}'],
    "'context' contains half a surrogate pair": [b'{"prompt": "x", "context": "\\ud800"}'],
    "'system' contains half a surrogate pair": [b'{"prompt": "x", "system": "\\ud800"}'],
    "'context' must be a string, not an object": [{"question": "x", "context": {"title": ["t"]}}],
    "'system' must be a string, not a list": [GOOD | {"system": ["s"]}],
    "'answer' contains half a surrogate pair": [b'{"prompt": "x", "answer": "\\ud800"}'],
    "no key of a prompt": [
        batch("x"), {"title": "t", "body": "x"}, {"query": "x"}, {}, {"prompt": None},
        {"response": "x", "id": 1},
    ],
    "'prompt' must be a text or a list, not a number": [{"prompt": 3}],
    "'prompt' must be a text or a list, not an object": [{"prompt": {"a": "x"}}],
    "'history' is no list of pairs of texts": [GOOD | {"history": ["a", "b"]}],
    "'turns' must be a list, not a string": [{"turns": "x"}],
    "'conversations' must be a list, not a string": [{"conversations": "x"}],
    "'messages' must be a list, not an object": [{"messages": ASKED}],
    "no text of a user": [
        {"prompt": " \n"}, {"prompt": "\u200b\ufeff\u00ad"}, {"turns": []}, {"turns": ["", None]},
        {"conversations": []}, sharegpt(("gpt", "x")), sharegpt(("system", "s"), ("gpt", "x")),
        sharegpt(("human", "  ")), {"messages": [TOOL]}, {"messages": [{"role": "user"}]},
        chat(("user", [])), {"prompt": "x", "conversations": []},
        {"message_id": "2", "parent_id": "1", "text": "b", "role": "assistant"},
    ],
    "a turn must be a string, not a number": [{"turns": ["a", 3]}, chat(("user", 3)),
                                              sharegpt(("human", 3))],
    "a message without a role": [{"messages": ["x"]}, {"messages": [{"content": "a"}]}],
    "a turn that is not only text": [
        chat(("user", [part("a"), {"type": "image_url", "image_url": {"url": "u"}}])),
        chat(("user", [part("", "input_audio")])),
    ],
    "it comes with an image": [sharegpt(("human", "<image>\nWhat?"), image="a.jpg"),
                               {"images": ["a.jpg"], **GOOD}],
    "'turns' and 'prompt' begin with different texts": [{"prompt": "x", "turns": ["y"]}],
    "'prompt' contains half a surrogate pair": [b'{"prompt": "\\ud800"}'],
    "a turn contains half a surrogate pair": [b'{"turns": ["\\ud800"]}'],
    "'id' must be a string, not a list": [{"prompt": "x", "id": [1]}],
    "'id' must be a string, not a truth value": [{"prompt": "x", "id": True}],
    "'id' has more than 256 bytes": [{"prompt": "x", "id": "é" * 129}],
    "'raw' is neither true nor false": [{"prompt": "x", "raw": "yes"}],
    "a request that generates no text": [batch({"input": "x"}, "/v1/embeddings"),
                                         batch({"query": "x"}, "/v1/rerank")],
    "a request of several prompts or of token ids": [
        batch({"prompt": ["a", "b"]}, "/v1/completions"),
        batch({"prompt": [1, 2]}, "/v1/completions"),
    ],
    "a request whose last turn is no text of a user": [
        batch({"messages": [ASKED, CALLING, TOOL]}),
        batch(chat(("user", "a"), ("assistant", "b"))),
    ],
    "an earlier one is the same prompt": [{"prompt": "fine", "id": "a"}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "row"), [(reason, row) for reason, rows in UNUSABLE.items() for row in rows]
)
def test_unusable_entry_is_counted_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str, row: Any
) -> None:
    path = write(tmp_path, GOOD | {"id": "a"}, row, GOOD | {"id": "b"})
    assert [prompt.prompt_id for prompt in load_prompts(path)] == ["a", "b"]
    assert f"1 of 3 entries skipped: {reason} (line 2" in caplog.messages[0]
    with pytest.raises(PromptLineError) as caught:
        load_prompts(path, strict=True)
    assert (caught.value.place, caught.value.reason) == ("line 2", reason)
    assert str(caught.value).count("\n") == 0
    assert caught.value.hint


def test_reasons_are_counted_apart_with_places(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [{"prompt": ""}] * 6 + [b"{", {"query": "x"}]
    assert len(load_prompts(write(tmp_path, GOOD, *bad))) == 1
    assert caplog.messages[0].endswith(
        "prompts.jsonl: 8 of 9 entries skipped: "
        "no text of a user (line 2, line 3, line 4, line 5 and 2 more); "
        "no JSON (line 8: '{' from column 2 on); "
        "no key of a prompt (line 9: keys with a value: 'query')"
    )


def test_ids_that_come_twice_name_no_prompt_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A response of such an id could answer either."""
    rows = [{"id": "a", "prompt": text} for text in ("x", "y", "x", "z")]
    found = load_prompts(write(tmp_path, *rows, {"id": "b", "prompt": "x"}))
    places = [prompt.prompt_id.rpartition("-")[0] for prompt in found]
    assert places == ["a-line-1", "a-line-2", "a-line-4", ""]
    assert (
        "1 of 5 entries skipped: an earlier one is the same prompt (line 3: line 1)"
        in (caplog.messages[0])
    )
    assert "ids that an earlier prompt has, told apart by their places: 2" in caplog.messages[1]
    with pytest.raises(PromptLineError, match="line 2: line 1 has the id 'a' too"):
        load_prompts(write(tmp_path, *rows), strict=True)


# --------------------------------------------------------------------------- files

CSV = b"""instruction,input,output
Name three.,,"A, B."
Say it.,"She says: ""I go, and
you stay.\"\"",x
"""
TABLE = [("Name three.",), ('Say it.\n\nShe says: "I go, and\nyou stay."',)]
TWO = b'{"prompt": "a"}\n{"prompt": "b"}\n'
AB, ITEMS = [("a",), ("b",)], [{"prompt": "a"}, {"prompt": "b"}]
FILES: list[tuple[str, bytes, list[tuple[str, ...]]]] = [
    # name, content, turns of each prompt
    ("a.txt", "\ufeffone\r\n\n   \n{ two \u2028 too\n".encode(), [("one",), ("{ two \u2028 too",)]),
    ("a.txt", b"[1] first\nno, comma\n", [("[1] first",), ("no, comma",)]),
    ("lines in text.txt", TWO, AB),
    ("a.jsonl", TWO, AB),
    ("a.jsonl", b"\xef\xbb\xbf" + TWO.replace(b"\n", b"\r\n"), AB),
    ("a.jsonl", TWO.rstrip(), AB),
    ("a.jsonl", b"\n\n" + TWO + b"\n", AB),
    ("a.jsonl", TWO.decode().encode("utf-32"), AB),
    ("a.jsonl", b'"a"\n"b"\n', AB),
    ("a.jsonl", b'[{"role": "user", "content": "a"}]\n[{"role": "user", "content": "b"}]\n', AB),
    ("a.jsonl.gz", gzipped(TWO), AB),
    ("a.jsonl.bz2", bz2.compress(TWO), AB),
    ("a.csv.xz", lzma.compress(CSV), TABLE),
    ("parts.jsonl.gz", gzipped(TWO[:16]) + gzipped(TWO[16:]), AB),
    ("old Mac.jsonl", TWO.replace(b"\n", b"\r"), AB),
    ("cut.jsonl", TWO + b"\0" * 99, AB),
    ("no name", TWO, AB),
    ("a.json", json.dumps(ITEMS).encode(), AB),
    ("a.json", json.dumps(ITEMS, indent=2).encode(), AB),
    ("a.json", json.dumps(["a", "b"]).encode(), AB),
    ("a.json", json.dumps({"prompt": "a"}).encode(), AB[:1]),
    ("a.json", json.dumps({"prompt": "a"}, indent=2).encode(), AB[:1]),
    ("jq.json", b'{\n "prompt": "a"\n}\n{\n "prompt": "b"\n}\n', AB),
    ("in data.json", json.dumps({"version": 1, "data": ITEMS}).encode(), AB),
    ("of texts.json", json.dumps({"prompts": ["a", "b"]}, indent=1).encode(), AB),
    ("the Hub's viewer.json", json.dumps({"partial": False, "rows": [
        {"row_idx": number, "row": row} for number, row in enumerate(ITEMS)]}).encode(), AB),
    ("one talk.json", json.dumps([ASKED, TOOL, ASKED]).encode(), [("a", "a")]),
    ("a.csv", CSV, TABLE),
    ("a.csv", b"\xef\xbb\xbf" + CSV.replace(b"\n", b"\r\n"),
     [TABLE[0], (TABLE[1][0].replace("and\n", "and\r\n"),)]),
    ("a.csv.gz", gzipped(CSV), TABLE),
    ("a.csv", CSV.decode().encode("utf-16"), TABLE),
    ("excel.csv", b"Prompt;Category\na;x\nb;y\n", AB),
    ("a.tsv", b"prompt\tid\na\t1\nb\t2\n", AB),
    ("one column.csv", b"prompt\na\n\nb\n", AB),
    ("commas.csv", b'Prompt\nIf a, then?\n"b, ""c"""\n', [("If a, then?",), ('b, "c"',)]),
    ("bars.csv", b"id|prompt\n1|a\n2|b\n", AB),
    ("quoted.csv", b'"prompt","id"\n"a","1"\n"b","2"\n', AB),
    ("extra commas.csv", b"id,prompt\n1,a,,\n2,b,\n", AB),
    ("export", b"id,prompt\n1,a\n2,b\n", AB),
    ("long.csv", b"id,prompt\n1," + b"x" * 200_000 + b"\n", [("x" * 200_000,)]),
    ("talks.csv", b'id,messages\n1,"[{""role"": ""user"", ""content"": ""a""}]"\n', AB[:1]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "turns"), FILES)
def test_kinds_of_files(
    tmp_path: Path, name: str, content: bytes, turns: list[tuple[str, ...]]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert [prompt.turns for prompt in load_prompts(tmp_path / name)] == turns


def test_ids_of_places(tmp_path: Path) -> None:
    for name, content, ids in (
        ("a.txt", b"one\n\ntwo\n", ["line-1-7692c3ad", "line-3-3fc4ccfe"]),
        ("a.json", json.dumps([HELLO, HELLO | {"id": 7}]).encode(), ["item-1-185f8db3", "7"]),
        ("a.csv", b"prompt,id\none,\ntwo,x\n", ["row-1-7692c3ad", "x"]),
    ):
        (tmp_path / name).write_bytes(content)
        assert [prompt.prompt_id for prompt in load_prompts(tmp_path / name)] == ids


def test_text_by_force_is_text_and_says_what_it_looks_like(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.csv").write_bytes(CSV)
    assert len(load_prompts(tmp_path / "a.csv", format="text")) == 4
    assert "a line is a prompt, though the first one is a table's header: instruc" in caplog.text
    (tmp_path / "notes.md").write_text("Say it.\nSay more.\n")
    with pytest.raises(PromptError, match=r"neither JSON nor a table's header; .* --format text"):
        load_prompts(tmp_path / "notes.md")
    assert len(load_prompts(tmp_path / "notes.md", format="text")) == 2


REFUSED: list[tuple[str, bytes, str]] = [
    # name, content, message
    *(("a.jsonl", empty, "has no prompt") for empty in (b"", b"\n \n", b"[]", b'{"data": []}')),
    ("a.txt", b"", "has no prompt"),
    ("a.csv", b"prompt,id\n", "has no prompt"),
    ("a.json", b'\n[\n{"prompt": "x"},\n{"prompt" "y"}]', "line 4: no JSON: "),
    ("cut.json", b'[{"prompt": "x"}, {"prom', "line 1: no JSON: "),
    ("a.json", b"[note] say it\n", "from column 2 on; .*--format text"),
    ("a.jsonl", b'{"query": "x"}\n{"query": "y"}\n', "none of 2 entries .*no key of a prompt "
     r"\(line 1, line 2: keys with a value: 'query'\); rename the key of the prompts to 'prompt'"),
    ("a.jsonl", b'{"query": "x"}\n{"a": "y"}\n', r"line 2: keys with a value: 'query', ...\); re"),
    ("a.jsonl", b'{"query": "x", "b": 1}\n', "line 1: no key of a prompt: .*: 'b', 'query'; ren"),
    ("Gemini.jsonl", b'{"contents": [{"role": "user", "parts": [{"text": "a"}]}]}', ": 'contents'"),
    ("a.csv", b"query,reply\nx,y\n", "no column of prompts, but 'query', 'reply'; name it in the"),
    ("headless.csv", b"What is it?\nHow, then?\n", "no column of prompts, but 'what is it.'; nam"),
    ("blank.csv", b"id,prompt\n1,\n", "row 1: no key of a prompt: columns with a value: 'id'"),
    ("a.csv", b"prompt,id\nx,1,2\n", "row 1: another number of cells than columns: 3 for 2"),
    ("cut.csv", b'prompt,id\n"x,1\n', "row 1: no row of CSV: unexpected end of data"),
    ("latin.csv", b"prompt,id\ncaf\xe9,1\n", "line 2: not UTF-8: byte 0xe9.*; convert the file"),
    ("answers.jsonl", b'{"custom_id": "t", "response": {}}\n', "; give a file .*--responses"),
    ("mooncake.jsonl", b'{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n', "lengths and"),
    ("page.jsonl", b"<!DOCTYPE html>\n<html>\n", "is a web page; download the file that it shows"),
    ("core.jsonl", b"\x7fELF\2\1\0\0\0\n", "is no text: it has bytes 0 in its first line; give a"),
    ("cut.jsonl.gz", gzipped(TWO)[:-9], "is compressed, and damaged or cut off"),
    ("cut.jsonl.xz", lzma.compress(TWO)[:-9], "is compressed, and damaged or cut off"),
    ("bad.jsonl.gz", gzipped(TWO)[:10] + b"\xff" * 30, "is compressed, and damaged"),
    ("a.jsonl", b"\xff\xfe\x00", "begins as UTF-16 and goes on otherwise"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_files_without_a_usable_prompt_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError, match=message):
        load_prompts(tmp_path / name)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_damaged_row_of_csv_leaves_the_others(tmp_path: Path, separator: str) -> None:
    rows = [("id", "prompt"), ("1", "a"), ("2", "b", "c"), ("3",), ("4", '"x"y'), ("5", "b")]
    (tmp_path / "a.csv").write_text("".join(separator.join(row) + "\n" for row in rows))
    assert [prompt.prompt_id for prompt in load_prompts(tmp_path / "a.csv")] == ["1", "5"]


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


def test_places_that_hold_no_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place, found in (
        (tmp_path / "absent.jsonl", "no such file"),
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is a pipe or a device; write its text into a file"),
        ("a" * 5000, "cannot be read: "),
        ("hf://datasets/a/b.jsonl", "is an address, and .*; download it"),
    ):
        with pytest.raises(PromptError, match=found):
            load_prompts(place)


LINES = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(
        st.sampled_from(["prompt", "turns", "id", "question", "answer", "messages", "raw", "body"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=4,
        ),
    ).map(lambda row: json.dumps(row).encode()),
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, max_size=4), name=st.sampled_from(get_args(PromptFormat)))
def test_any_bytes_give_prompts_or_a_prompt_error(
    tmp_path: Path, lines: list[bytes], name: PromptFormat
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
    assert load_prompts(path) == expected


def test_placeholders_of_speed_bench_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever stands behind them, in any turn; a file of nothing else is refused."""
    empty = [[PLACEHOLDER], [f"{PLACEHOLDER}\n\nSum up: {{article}}"], ["Well?", PLACEHOLDER]]
    path = speed_bench(tmp_path, *empty, ["Sort it."])
    assert [prompt.prompt_id for prompt in load_prompts(path)] == ["q4"]
    [warning] = caplog.messages
    assert "3 of 4 entries skipped" in warning
    assert "prepare_data.py" in warning
    with pytest.raises(PromptError, match=r"none of 3 entries .*placeholder.*prepare_data"):
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
    assert responses.answered(prompts, strict=True) == prompts
    assert [responses.by_prompt[one.prompt_id].turns for one in prompts] == [("x",), ((1, 2),)]


BAD_TABLES: list[tuple[dict[str, Any], str]] = [
    (
        {"query": ["x"], "label": [1]},
        "no column of prompts, but 'query', 'label'; rename",
    ),
    ({"turns": pa.array([], pa.list_(pa.string()))}, "has no prompt"),
    ({"turns": ["x"], "question_id": ["a"]}, "row 1: 'turns' must be a list, not a string"),
    (
        {"turns": pa.array([None], pa.list_(pa.string()))},
        "row 1: no key of a prompt: columns with a value: none",
    ),
    ({"prompt": [b"x"]}, "row 1: 'prompt' must be a text or a list, not bytes"),
    ({"prompt": ["x"], "id": [datetime(2026, 1, 1)]}, "row 1: 'id' must be a string, not datetime"),
    ({"conversations": [["y"]]}, "row 1: a message without a role"),
    ({"response": ["x"], "id": [1]}, "row 1: .*columns .*: 'id', 'response'; .*--responses"),
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
    given = replace(prompt, before=(("user", "yes"), ("assistant", "more")))
    assert conversation_ids(tokenizer, given, []) == [1, 4, 2, 5, 1, 3, 2]
    assert conversation_ids(make_tokenizer(None), given, []) == [0, 4, 5, 3]


NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no role') }}{% endif %}hi"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (
            Prompt("p", "", ("hi more hi",), chat=False),
            "longer than the model's context (4 tokens)",
        ),
        (
            Prompt("p", "", ("hi",), before=SYSTEM),
            "the chat template refuses the messages: no role",
        ),
    ],
)
def test_prompts_that_the_model_cannot_be_given_are_counted_or_refused(
    prompt: Prompt, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = SimpleNamespace(context_tokens=4)
    target = SimpleNamespace(name="T", tokenizer=make_tokenizer(NO_SYSTEM), model=model)
    pair: Any = SimpleNamespace(target=target)
    good, config = Prompt("a", "", ("hi",)), DecodingConfig()
    assert with_room([good, prompt], pair, config) == [good]
    assert caplog.messages == [f"T: 1 of 2 prompts skipped: {said} (p)"]
    strict = config.model_copy(update={"strict": True})
    for prompts, options in (([prompt], config), ([good, prompt], strict)):
        with pytest.raises(PromptLineError, match=f"T, p: {re.escape(said)}"):
            with_room(prompts, pair, options)
    assert with_room([], pair, config) == []
