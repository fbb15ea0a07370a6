"""Dense collection end to end on the embedded pair: texts given or generated, kept or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from specctl.collect.config import CollectConfig
from specctl.collect.dense import attention, collect_dense
from specctl.collect.dense.trees import DenseDrafting
from specctl.collect.live import SetOptions
from specctl.collect.prompts import Prompt
from specctl.collect.responses import load_responses
from specctl.errors import (
    PromptError,
    PromptLineError,
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


def test_a_set_of_responses_is_begun_without_prompts(pair: Pair, tmp_path: Path) -> None:
    """As a worker on Ray does that plans."""
    assert collect(pair, tmp_path, prompts=[]).num_planned == 0
    assert collect(pair, tmp_path, options=SetOptions(resume=True)).num_committed == 3


def test_another_file_of_responses_is_another_run(pair: Pair, tmp_path: Path) -> None:
    collect(pair, tmp_path, ROWS)
    with pytest.raises(TraceMismatchError, match="responses_digest"):
        collect(pair, tmp_path, ROWS[::-1], options=SetOptions(resume=True))


def test_long_responses_are_cut_and_counted(pair: Pair, tmp_path: Path) -> None:
    settings = DecodeSettings(3)
    summary = collect(pair, tmp_path, settings=settings)
    assert summary.num_shortened == 4
    assert tables(tmp_path)[0].group_by("request_id").len()["len"].to_list() == [2] * 4


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    # of prompt c's response, what is said
    ({"token_ids": [40, 4096]}, "a token id is not below the target's 4096 (line 3: 4096)"),
    ({"token_ids": [40, 1, 41]}, "tokens follow the end-of-text token (line 3)"),
]


@pytest.mark.parametrize(("change", "said"), IMPOSSIBLE)
def test_responses_that_the_target_cannot_have_given_are_counted(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, said: str
) -> None:
    rows = [*ROWS[:2], ROWS[2] | change]
    with pytest.raises(PromptLineError, match="line 3: "):
        collect(pair, tmp_path, rows, strict=True)
    assert not list((tmp_path / "traces").rglob("*.parquet"))
    summary = collect(pair, tmp_path, rows)
    assert (summary.num_planned, summary.num_committed) == (2, 2)
    assert f"1 of 3 prompts skipped: {said}" in caplog.messages[-1]


def test_chains_along_a_response_of_two_tokens(pair: Pair, tmp_path: Path) -> None:
    """Its chunk has tensors of one element, which any stride fits."""
    path = responses_file(tmp_path, [{"prompt_id": "c", "token_ids": [40, 41]}])
    given = {"responses": load_responses(path)}
    shape = FullTree(depth=8, top_k=1)
    found = collect_dense(pair, PROMPTS[2:], SETTINGS, tmp_path / "traces", shape, **given)
    assert found.num_trees == 1


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
    with pytest.raises(PromptError, match=r"its tokens spell another text .*; give 'token_ids'"):
        collect(spaced, tmp_path, strict=True)


def test_a_prompt_that_fills_the_context_is_refused(pair: Pair, tmp_path: Path) -> None:
    long = Prompt("a", "", ("word " * 2100,), chat=False)
    rows = [{"prompt_id": "a", "token_ids": [40, 41]}]
    with pytest.raises(PromptError, match=r"a: .*a/0"):
        collect(pair, tmp_path, rows, prompts=[long])


def test_a_pair_without_a_drafter_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no drafter"):
        collect(replace(pair, drafter=None), tmp_path)


EXCLUDED: list[tuple[dict[str, Any], str]] = [
    ({"dense": True, "policy": "eagle2"}, "policy does not go with --dense"),
    ({"gpus_per_worker": 1.0}, "--gpus-per-worker needs --workers or --ray"),
    ({"responses": "r.jsonl"}, "--responses needs --dense"),
    ({"depth": 3}, "--depth needs --dense"),
]


@pytest.mark.parametrize(("options", "words"), EXCLUDED)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CollectConfig(**options).check()
