"""The loop closed: log in vLLM, tune on the log, export, serve, and see what was predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make engines` runs this")

from specctl.collect.dense import collect_dense
from specctl.collect.prompts import Prompt
from specctl.engines.settings import FILE_NAME, PluginSettings, TraceSettings, read_settings
from specctl.logs.trace_set import TraceSet
from specctl.policy import FullTree
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.words import resolve_policy
from specctl.watch.signals import read_prompts
from tests.engines.vllm_engine import (
    MAX_NEW_TOKENS,
    engine,
    ids_of,
    packaged,
    printed,
    rows_of,
)

COUNT, K, BATCH = 44, 5, 8


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("embedded", "embedded", device="cpu")


def given() -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    every = packaged(COUNT)
    return every[::2], every[1::2]


def held_out(pair: Pair, folder: Path) -> Path:
    """A dense log of the prompts that nothing is fitted to, by specctl's own loop."""
    shape = FullTree(depth=K, top_k=1)
    collect_dense(pair, given()[1], DecodeSettings(MAX_NEW_TOKENS), folder, shape)
    return folder


def predicted(log: Path, policy: object) -> dict[str, Any]:
    """What replay says of one run of the log through vLLM."""
    as_served = ("--engine", "vllm", "--batch-size", BATCH, "--in-order", "--json")
    words = ("replay", log, "-p", policy, "--cost-model", "line", *as_served)
    [found] = json.loads(printed(*words))["policies"]
    return dict(found)


def test_what_was_predicted_is_what_vllm_does(tmp_path: Path, pair: Pair) -> None:
    """On prompts that nothing was fitted or tuned on: calls and drafts exactly.

    The choice is made on a stated clock: on a busy machine's own one drafting may not pay.
    """
    training, others = given()
    trace = TraceSettings(out=str(tmp_path / "log"), dense=True)
    with engine("eagle3", K, PluginSettings(trace=trace)) as running:
        running.generate(ids_of(training))
        running.session.close()

    best, serve = tmp_path / "best", tmp_path / "serve"
    load = ("--for", "vllm", "--batch-size", BATCH, "--cost-model", "line", "--held-out", 0.4)
    printed("tune", tmp_path / "log", *load, "-o", best)
    words = ("--to", "vllm", "--drafter", "embedded", "--trace", tmp_path / "served", "-o", serve)
    printed("export", best / "tune.json", *words)

    exported = json.loads((serve / "speculative-config.json").read_text())
    settings = read_settings(str(serve / FILE_NAME))
    with engine(settings=settings, exported=exported, batch_size=BATCH) as running:
        before = running.counters()
        texts = running.generate(ids_of(others))
        counted = {name: count - before[name] for name, count in running.counters().items()}
        running.session.close()

    found = predicted(held_out(pair, tmp_path / "held-out"), best / "policy")
    rounds = rows_of(tmp_path / "served", "rounds")
    assert found["num_tokens"] == sum(map(len, texts))
    assert found["calls"] == len(rounds)
    assert found["num_drafts"] == counted["drafts"]
    assert found["num_drafted"] == counted["draft_tokens"]
    assert found["num_accepted"] == rounds["num_accepted"].sum()


def test_a_policy_serves_while_one_request_in_four_is_logged_densely(tmp_path: Path) -> None:
    """The rounds of the others are those of replay, and the dense rows those of our collector.

    With a draft model, which vLLM runs by another class than a head.
    """
    others, words, every = given()[1], "confidence:window=5:threshold=0.4", 4
    log = held_out(load_pair("embedded", "embedded:small", device="cpu"), tmp_path / "held-out")
    settings = PluginSettings(
        policy=words, trace=TraceSettings(out=str(tmp_path / "live"), dense_every=every)
    )
    with engine("small", K, settings, batch_size=BATCH) as running:
        texts = running.generate(ids_of(others))
        running.session.close()
        assert not any(tracer.recorder.lost for tracer in running.session.tracers)
    plain = rows_of(log, "rounds").group_by("request_id", maintain_order=True).len()
    assert [len(text) - 1 for text in texts] == plain["len"].to_list()
    live, dense, mine = (
        rows_of(path, "rounds") for path in (tmp_path / "live", tmp_path / "live-dense", log)
    )
    numbers = [int(name[-6:]) for name in live["request_id"].unique()]
    assert sorted(numbers) == [n for n in range(len(others)) if n % every]
    kept = {others[n].prompt_id for n in range(0, len(others), every)}
    known = mine.filter(pl.col("prompt_id").cast(pl.String).is_in(kept))
    assert dense["root_token_id"].to_list() == known["root_token_id"].to_list()
    replayed = read_prompts(TraceSet.open(str(log)), resolve_policy(words).policy)
    served = read_prompts(TraceSet.open(str(tmp_path / "live")), resolve_policy(words).policy)
    place = {name: row for row, name in enumerate(replayed.ids)}
    rows = [place[others[int(name[-6:])].prompt_id] for name in served.ids]
    for name in ("calls", "tokens", "verified", "surprise"):
        assert served.column(name) == pytest.approx(replayed.column(name)[rows], abs=1e-3), name
