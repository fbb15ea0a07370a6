"""Dense collection on a CUDA device: the CPU's trees and labels; skipped, and counted, without."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from specctl.collect.dense import collect_dense
from specctl.collect.prompts import load_prompts
from specctl.logs.trace_set import TraceSet
from specctl.policy import FullTree
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import load_pair

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
    for column in ("joint_logp", "parent_entropy", "target_logp", "js_distance"):
        assert (here[column] - there[column]).abs().max() < MAX_DIFFERENCE
