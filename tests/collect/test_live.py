"""Live collection: drops are told and resumed; graphed rounds leave the traces of plain ones."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from specctl.collect import live, rounds
from specctl.collect.live import LiveSummary, collect_live, header_of
from specctl.collect.prompts import load_prompts
from specctl.collect.recorder import RecorderConfig
from specctl.collect.rounds import TraceRecorder
from specctl.collect.trace_writer import TraceWriter
from specctl.logs.trace_set import TraceSet
from specctl.policy import Chain, Policy, StaticTree
from specctl.runtime.capture import GraphSettings
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Request
from tests.collect.lanes import FakeLane
from tests.runtime.captured import TapeCapture


def test_dropped_prompts_are_told_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, prompts = load_pair("embedded", "embedded", device="cpu"), load_prompts("embedded")[::40]
    policy = Policy(shape=Chain(num_draft_tokens=2))

    def collect(*, resume: bool) -> LiveSummary:
        how = "block" if resume else "drop"
        settings, out = DecodeSettings(16), tmp_path / "traces"
        return collect_live(pair, prompts, policy, settings, out, resume=resume, when_full=how)

    with monkeypatch.context() as patch:
        tight = functools.partial(RecorderConfig, max_items=1, wake_items=1)
        patch.setattr(live, "RecorderConfig", tight)
        slow = FakeLane(on_copy=lambda: time.sleep(0.2))
        patch.setattr(rounds, "lane_for", lambda device: slow)
        first = collect(resume=False)
    assert first.num_dropped > 0
    assert first.num_dropped_rounds >= first.num_dropped
    assert first.num_committed + first.num_dropped == len(prompts)
    assert first.to_json()["num_dropped"] == first.num_dropped
    said = first.render()
    assert f"{first.num_dropped} prompts with {first.num_dropped_rounds} rounds were drop" in said
    second = collect(resume=True)
    assert (second.num_skipped, second.num_dropped) == (first.num_committed, 0)
    assert "were dropped" not in second.render()
    assert set(TraceSet.open(tmp_path / "traces").prompt_ids) == {p.prompt_id for p in prompts}


POLICY = Policy(shape=StaticTree(depth=4, top_k=4, num_tokens=16))
SETTINGS = DecodeSettings(12)
KEY = ["request_id", "round_idx", "node_idx"]


def nodes(pair: Pair, requests: list[Request], out: Path, *, graphed: bool) -> pl.DataFrame:
    with (
        TraceWriter.open(out, header_of(pair, POLICY, SETTINGS)) as writer,
        TraceRecorder(writer) as recorder,
    ):
        loop = DecodeLoop(
            pair.target.model,
            pair.drafter,
            POLICY,
            batch_size=2,
            max_text_tokens=max(len(r.prompt_ids) + r.max_new_tokens for r in requests),
            eos_ids=pair.target.eos_ids,
            observer=recorder,
            graphs=GraphSettings(capture=TapeCapture()) if graphed else None,
        )
        for done in loop.run(requests):
            recorder.finish_prompt(done.request.prompt_id)
        assert bool(loop.graph_counters.replays) == graphed
    text = pl.col("request_id").cast(pl.String)
    return TraceSet.open(out).scan("nodes").collect().with_columns(text).sort(KEY)


def test_traces_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    """Forwards over padded tiers round differently: 2e-4, as in test_dense_live.py.

    So of thousands of ranks in the tail of the law a few trade places.
    """
    pair = load_pair("embedded", "embedded", device="cpu")
    prompts = load_prompts("embedded")[5::80]
    requests = [next_request(pair.target.tokenizer, Conversation(p), SETTINGS) for p in prompts]
    plain, graphed = (nodes(pair, requests, tmp_path / str(on), graphed=on) for on in (False, True))
    assert len(plain) > 300
    ranks = plain["target_rank"], graphed["target_rank"]
    assert (ranks[0] != ranks[1]).sum() <= len(plain) // 500
    assert_frame_equal(
        plain.drop("target_rank"), graphed.drop("target_rank"), abs_tol=2e-4, rel_tol=0
    )
