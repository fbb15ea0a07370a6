"""Dense collection end to end on the embedded pair: texts given or generated, kept or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from specctl.collect.config import CollectConfig
from specctl.collect.dense import attention, collect_dense
from specctl.collect.dense.trees import DenseDrafting
from specctl.collect.prompts import Prompt
from specctl.collect.responses import load_responses
from specctl.errors import (
    PromptError,
    PromptLineError,
    PromptTooLongError,
    TraceMismatchError,
    UsageError,
)
from specctl.logs.trace_set import TraceSet
from specctl.policy import FullTree
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Request
from specctl.trace import TABLES
from tests.collect.attention import exact_attention

SHAPE = FullTree(depth=3, top_k=3)
PROMPTS = [
    Prompt("a", "code", ("def add(a, b):",), chat=False),
    Prompt("b", "chat", ("Hello there", "And then?")),
    Prompt("c", "chat", ("What is 2 + 3?",)),
]
ROWS = [
    {"prompt_id": "a", "response": "\n    return a + b\n", "eos": True},
    {"prompt_id": "b", "response": ["Good morning to you.", "Nothing at all."]},
    {"prompt_id": "c", "prompt": "What is 2 + 3?", "token_ids": [40, 41, 42, 43, 44]},
]
SETTINGS = DecodeSettings(32)
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("embedded", "embedded", device="cpu")


def responses_file(folder: Path, rows: Rows) -> Path:
    path = folder / "responses.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def collect(pair: Pair, folder: Path, rows: Rows = ROWS, **options: Any) -> Any:
    path = responses_file(folder, rows)
    prompts = options.pop("prompts", PROMPTS)
    settings = options.pop("settings", SETTINGS)
    return collect_dense(
        pair, prompts, settings, folder / "traces", SHAPE, responses=load_responses(path), **options
    )


def tables(folder: Path) -> list[pl.DataFrame]:
    traces = TraceSet.open(folder / "traces")
    return [traces.scan(table).collect() for table in ("rounds", "nodes")]


def test_given_responses_become_rows(pair: Pair, tmp_path: Path) -> None:
    summary = collect(pair, tmp_path)
    rounds, nodes = tables(tmp_path)
    texts = {name[0]: rows for name, rows in rounds.group_by("request_id", maintain_order=True)}
    assert list(texts) == ["a/0", "b/0", "b/1", "c/0"]
    assert texts["c/0"]["root_token_id"].to_list() == [40, 41, 42, 43]
    assert texts["c/0"]["position"].to_list() == [1, 2, 3, 4]
    # `eos`: the end is known and is the last token; it is a bonus, never a root.
    [end] = pair.target.eos_ids
    assert texts["a/0"].filter(pl.col("num_accepted") == 0)["bonus_token_id"].to_list()[-1] == end
    assert end not in rounds["root_token_id"]
    assert summary.num_trees == len(rounds)
    assert summary.num_nodes == len(nodes) == (rounds["num_drafted"] + 1).sum()
    assert summary.num_tokens == len(rounds) + 4  # one token of each text has no continuation


@pytest.mark.parametrize("drafter", ["embedded", "embedded:small"])
def test_neither_chunks_nor_the_form_of_attention_change_a_tree(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = load_pair("embedded", drafter, device="cpu")
    ids = tuple(pair.target.tokenizer("the list of numbers is sorted")["input_ids"])
    request = Request("p/0", ids[:3], 32, "p")

    def drafted(num_chunks: int, **options: int) -> list[pl.DataFrame]:
        parts = DenseDrafting(pair, SHAPE, **options).tables(request, ids[3:])
        assert len(parts) == num_chunks
        return [pl.concat([pl.from_arrow(part[name]) for part in parts]) for name in TABLES]

    whole, pieces = drafted(1), drafted(len(ids) - 4, chunk_bytes=1)
    monkeypatch.setattr(attention, "merged_attention", exact_attention)
    for other in (pieces, drafted(1)):
        for mine, theirs in zip(whole, other, strict=True):
            assert_frame_equal(mine, theirs, abs_tol=2e-4, rel_tol=0, categorical_as_str=True)


def test_texts_too_short_for_a_tree_leave_no_rows(pair: Pair, tmp_path: Path) -> None:
    rows = [{"prompt_id": "c", "token_ids": [40]}]
    assert collect(pair, tmp_path, rows, prompts=PROMPTS[2:]).num_trees == 0
    assert TraceSet.open(tmp_path / "traces").prompt_ids == ("c",)


def test_generated_and_given_texts_give_the_same_rows(pair: Pair, tmp_path: Path) -> None:
    prompts, settings = PROMPTS[2:], DecodeSettings(12)
    collect_dense(pair, prompts, settings, tmp_path / "generated" / "traces", SHAPE)
    generated = tables(tmp_path / "generated")
    last = generated[0].row(-1, named=True)
    ids = [*generated[0]["root_token_id"].to_list()]
    ids += [last["bonus_token_id"]] if last["num_accepted"] == 0 else [_accepted(generated[1])]
    (tmp_path / "given").mkdir()
    rows = [{"prompt_id": "c", "token_ids": ids}]
    collect(pair, tmp_path / "given", rows, prompts=prompts, settings=settings)
    for mine, theirs in zip(generated, tables(tmp_path / "given"), strict=True):
        assert_frame_equal(mine, theirs, categorical_as_str=True)


def _accepted(nodes: pl.DataFrame) -> int:
    """The token on the path of the last tree."""
    last = nodes.filter(pl.col("round_idx") == nodes["round_idx"].max())
    return last.filter(pl.col("verified"))["token_id"].to_list()[-1]


def test_another_file_of_responses_is_another_run(pair: Pair, tmp_path: Path) -> None:
    collect(pair, tmp_path, ROWS)
    with pytest.raises(TraceMismatchError, match="responses_digest"):
        collect(pair, tmp_path, ROWS[::-1], resume=True)


def test_long_responses_are_cut_and_counted(pair: Pair, tmp_path: Path) -> None:
    settings = DecodeSettings(3)
    summary = collect(pair, tmp_path, settings=settings)
    assert summary.num_shortened == 4
    assert tables(tmp_path)[0].group_by("request_id").len()["len"].to_list() == [2] * 4


def without(key: str, row: int) -> Callable[[Rows], Rows]:
    return lambda rows: [
        {k: v for k, v in r.items() if k != key or n != row} for n, r in enumerate(rows)
    ]


def changed(row: int, **values: Any) -> Callable[[Rows], Rows]:
    return lambda rows: [r | values if n == row else r for n, r in enumerate(rows)]


REFUSED = {
    "no response": (lambda rows: rows[:2], r"no response to 1 of 3 prompts, first 'c'"),
    "another prompt": (changed(2, prompt="What is 2 + 4?"), r"line 3: it answers"),
    "too few turns": (changed(1, response="one"), r"line 2: 1 responses to 2 turns"),
    "unknown token": (changed(2, token_ids=[40, 4096]), r"line 3: token id 4096 is not below"),
    "behind the end": (changed(2, token_ids=[40, 1, 41]), r"line 3: .*end-of-text"),
    "no texts": (without("response", 0), r"line 1: .* neither of 'response' and 'token_ids'"),
    "both": (changed(0, token_ids=[4]), r"line 1: it has both"),
    "a number for text": (changed(0, response=5), r"line 1: .* a number"),
    "truth values": (changed(2, token_ids=[True]), r"line 3: .* whole numbers"),
    "eos as text": (changed(0, eos="yes"), r"line 1: 'eos' is neither true nor false"),
    "no prompt id": (without("prompt_id", 0), r"line 1: it has no 'prompt_id' and no 'prompt'"),
    "id twice": (changed(1, prompt_id="a"), r"line 2: line 1 has the prompt id 'a' too"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_responses_name_the_line(pair: Pair, tmp_path: Path, case: str) -> None:
    change, match = REFUSED[case]
    with pytest.raises(PromptError, match=match):
        collect(pair, tmp_path, change([dict(row) for row in ROWS]))
    assert not list((tmp_path / "traces").rglob("*.parquet"))


def test_a_text_that_its_tokens_do_not_spell_is_refused(pair: Pair, tmp_path: Path) -> None:
    """As of a tokenizer that puts a space in front of every text."""

    class Spacing:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, text: str, **options: Any) -> Any:
            return self.inner(" " + text if options else text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    spaced = replace(pair, target=replace(pair.target, tokenizer=Spacing(pair.target.tokenizer)))
    with pytest.raises(PromptLineError, match=r"line 1: the tokens of .* spell"):
        collect(spaced, tmp_path)


def test_a_prompt_that_fills_the_context_is_refused(pair: Pair, tmp_path: Path) -> None:
    long = Prompt("a", "", ("word " * 2100,), chat=False)
    rows = [{"prompt_id": "a", "token_ids": [40, 41]}]
    with pytest.raises(PromptTooLongError, match="a/0"):
        collect(pair, tmp_path, rows, prompts=[long])


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bad").write_text('{"prompt_id": 1, "response": "x"}\n{"prompt_id": 2,\n')
    says = {"no": "no such file", "": "a folder", "empty": "has no response", "bad": "line 2"}
    for name, found in says.items():
        with pytest.raises(PromptError, match=found):
            load_responses(tmp_path / name)


def test_a_pair_without_a_drafter_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no drafter"):
        collect(replace(pair, drafter=None), tmp_path)


EXCLUDED: list[tuple[dict[str, Any], str]] = [
    ({"dense": True, "policy": "eagle2"}, "--policy does not go with --dense"),
    ({"gpus_per_worker": 1.0}, "--gpus-per-worker needs --workers or --ray"),
    ({"responses": "r.jsonl"}, "--responses needs --dense"),
    ({"depth": 3}, "--depth needs --dense"),
]


@pytest.mark.parametrize(("options", "words"), EXCLUDED)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CollectConfig(**options).check()
