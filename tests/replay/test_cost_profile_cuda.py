"""Profiling on a CUDA device; on its own, as a GPU machine has not what the command line needs."""

from __future__ import annotations

import pytest
import torch

from specctl.replay.cost.profile import profile, timed_rounds
from specctl.runtime.load import load_pair
from tests.replay.costs import SMALL


@pytest.mark.cuda
def test_captured_rounds_are_timed_by_default() -> None:
    """On the embedded pair, whose heads the kernels know; replays take less than eager rounds."""
    pair = load_pair("embedded", "embedded", device="cuda", dtype="float32")
    graphs = timed_rounds("auto", pair)
    assert graphs is not None
    captured, ordinary = (profile(pair, SMALL, graphs=of) for of in (graphs, None))
    assert captured.rounds == "graphs"
    assert captured.token_tiers[0] == graphs.flat_tokens
    assert captured.draft.level.us[0][0][0] < ordinary.draft.level.us[0][0][0]
    assert captured.draft.loop.us[0][0][0] > 0
    assert ordinary.machine.device == torch.cuda.get_device_name(0)
    assert ordinary.machine.cuda is not None
