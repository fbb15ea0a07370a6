"""Live collection: graphed rounds leave the traces of plain ones."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from polars.testing import assert_frame_equal

from specctl.collect.live import header_of
from specctl.collect.prompts import load_prompts
from specctl.collect.rounds import TraceRecorder
from specctl.collect.trace_writer import TraceWriter
from specctl.logs.trace_set import TraceSet
from specctl.policy import Policy, StaticTree
from specctl.runtime.capture import GraphSettings
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Request
from tests.runtime.captured import TapeCapture

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
