"""Profiling on a CUDA device; on its own, as a GPU machine has not what the command line needs."""

from __future__ import annotations

import pytest
import torch

from specctl.replay.cost.probe import Bench
from specctl.replay.cost.profile import profile
from specctl.runtime.load import load_pair
from tests.replay.costs import SMALL


@pytest.mark.cuda
def test_captured_rounds_are_timed_by_default() -> None:
    """On the embedded pair, whose heads the kernels know; replays take less than eager rounds."""
    pair = load_pair("embedded", "embedded", device="cuda", dtype="float32")
    bench = Bench.of(pair, "auto")
    assert bench.graphs is not None
    captured, ordinary = (profile(of, SMALL) for of in (bench, Bench(pair)))
    assert captured.rounds == "graphs"
    assert captured.token_tiers[0] == bench.graphs.flat_tokens
    assert captured.draft.level.us[0][0][0] < ordinary.draft.level.us[0][0][0]
    assert captured.draft.loop.us[0][0][0] > 0
    assert ordinary.machine.device == torch.cuda.get_device_name(0)
    assert ordinary.machine.cuda is not None
