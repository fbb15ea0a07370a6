"""Dense trees are the trees that live rounds draft: tokens, scores, labels, what the target said.

Live rounds run the log's own policy, `full`, which submits everything it drafts. Forwards over 4
nodes and over hundreds round differently: scores and logits agree to 2e-4 (float32; 2e-5 measured
over 14 000 nodes). A near-tie could swap two nodes; the prompts of this test have none.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from specctl.collect.dense import collect_dense
from specctl.collect.live import collect_live
from specctl.collect.prompts import Prompt, load_prompts
from specctl.logs.trace_set import TraceSet
from specctl.policy import FullTree, Policy, StaticTree
from specctl.runtime.api import Decoder
from specctl.runtime.capture import GraphSettings
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import load_pair
from specctl.runtime.requests import Sampling
from tests.runtime.captured import TapeCapture

SHAPE = FullTree(depth=4, top_k=4)
TREE = StaticTree(depth=4, top_k=4, num_tokens=16)
NOISE = {"abs_tol": 2e-4, "rel_tol": 0.0}
ROUND_KEY, NODE_KEY = ["request_id", "position"], ["request_id", "position", "node_idx"]
SCORES = ["draft_logp", "joint_logp", "parent_entropy", "parent_topk_entropy"]
TARGET = ["target_logp", "target_top1_logit", "target_top2_logit", "target_margin", "target_ratio"]
PLACES = ["parent_idx", "depth", "token_id", "sibling_rank", "expanded"]


def prompts() -> list[Prompt]:
    return load_prompts("embedded")[5::80]


def tables(folder: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rounds and nodes, the nodes with the position of their round."""
    opened = TraceSet.open(folder)
    text = pl.col("request_id").cast(pl.String)
    rounds = opened.scan("rounds").with_columns(text).collect()
    nodes = opened.scan("nodes").with_columns(text).collect()
    at = rounds.select("request_id", "round_idx", "position")
    return rounds, nodes.join(at, on=["request_id", "round_idx"], maintain_order="left")


def renumbered(nodes: pl.DataFrame) -> pl.DataFrame:
    """A live tree without the gaps that padding left in its node indices."""
    place = pl.int_range(pl.len()).over(ROUND_KEY).cast(pl.Int32)
    nodes = nodes.with_columns(gapless=place)
    above = nodes.select(*ROUND_KEY, parent_idx="node_idx", above="gapless")
    nodes = nodes.join(above, on=[*ROUND_KEY, "parent_idx"], how="left", maintain_order="left")
    return nodes.with_columns(node_idx="gapless", parent_idx=pl.col("above").fill_null(-1))


def at_live_rounds(live: pl.DataFrame, dense: pl.DataFrame, key: list[str]) -> list[pl.DataFrame]:
    """Both, in one order, where both have a tree: the text's last token has none in the log."""
    both = [live.join(dense, on=key, how="semi"), dense.join(live, on=key, how="semi")]
    return [rows.sort(key) for rows in both]


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [("embedded", Sampling(0.8, top_p=0.95, seed=1)), ("embedded:small", Sampling())],
    ids=["head, sampled", "model, greedy"],
)
def test_trees_labels_and_target_at_live_rounds(
    drafter: str, sampling: Sampling, tmp_path: Path
) -> None:
    pair, settings = load_pair("embedded", drafter, device="cpu"), DecodeSettings(20, sampling)
    collect_dense(pair, prompts(), settings, tmp_path / "dense", SHAPE, batch_size=2)
    collect_live(pair, prompts(), Policy(shape=SHAPE), settings, tmp_path / "live")
    live_rounds, live_nodes = tables(tmp_path / "live")
    dense_rounds, dense_nodes = tables(tmp_path / "dense")
    assert live_rounds.join(dense_rounds, on=ROUND_KEY, how="anti").is_empty()
    counts = ["context_tokens", "root_token_id", "num_drafted", "num_accepted", "num_emitted"]
    assert_frame_equal(
        *(
            rows.select(ROUND_KEY + counts)
            for rows in at_live_rounds(live_rounds, dense_rounds, ROUND_KEY)
        )
    )
    here = dense_nodes.join(live_rounds, on=ROUND_KEY, how="semi")
    assert len(here) == len(live_nodes) > 500
    live, log = at_live_rounds(renumbered(live_nodes), here, NODE_KEY)
    assert_frame_equal(live.select(NODE_KEY + PLACES), log.select(NODE_KEY + PLACES))
    assert_frame_equal(live.select(SCORES), log.select(SCORES), **NOISE)
    known = log["target_logp"].is_not_null()
    assert_frame_equal(live.filter(known).select(TARGET), log.filter(known).select(TARGET), **NOISE)
    for label in ("node_match", "path_accepted", "target_rank"):
        known = log[label].is_not_null()
        assert live.filter(known)[label].equals(log.filter(known)[label]), label
        assert known.sum() > 50


def test_graphed_rounds_leave_the_traces_of_plain_ones(tmp_path: Path) -> None:
    """Forwards over padded tiers round differently, so of thousands of ranks in the tail of the law
    a few trade places."""
    pair, policy = load_pair("embedded", "embedded", device="cpu"), Policy(shape=TREE)
    found = []
    for graphs in (None, GraphSettings(capture=TapeCapture())):
        out, options = tmp_path / str(len(found)), DecodeSettings(12)
        decoder = Decoder(pair, policy, batch_size=2, graphs=graphs)
        collect_live(pair, prompts(), policy, options, out, decoder=decoder)
        assert bool(decoder.graph_counters.replays) == bool(graphs)
        found.append(tables(out)[1].sort(NODE_KEY))
    plain, graphed = found
    assert len(plain) > 300
    assert (plain["target_rank"] != graphed["target_rank"]).sum() <= len(plain) // 500
    assert_frame_equal(plain.drop("target_rank"), graphed.drop("target_rank"), **NOISE)


LABELS = ("node_idx", "parent_idx", "token_id", "path_accepted", "node_match")
MAX_DIFFERENCE = 1e-3
"""Nats; float32 sums of another order on another device."""


def nodes(device: str, drafter: str, folder: Path) -> pl.DataFrame:
    pair = load_pair("embedded", drafter, device=device, dtype="float32")
    prompts = load_prompts("embedded")[::40]
    collect_dense(pair, prompts, DecodeSettings(16), folder, FullTree(depth=4, top_k=4))
    return TraceSet.open(folder).scan("nodes").collect().sort("request_id", "round_idx", "node_idx")


@pytest.mark.cuda
@pytest.mark.parametrize("drafter", ["embedded", "embedded:small"])
def test_cuda_trees_are_the_cpu_trees(drafter: str, tmp_path: Path) -> None:
    here, there = (nodes(device, drafter, tmp_path / device) for device in ("cpu", "cuda"))
    assert here.select(LABELS).equals(there.select(LABELS))
    for column in ("joint_logp", "parent_entropy", "target_logp"):
        assert (here[column] - there[column]).abs().max() < MAX_DIFFERENCE
