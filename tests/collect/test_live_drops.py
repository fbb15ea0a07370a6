"""`collect_live` behind a device that is too slow: what was dropped is told, and resumed."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest

from specctl.collect import live, recorder
from specctl.collect.live import CollectSummary, collect_live
from specctl.collect.prompts import load_prompts
from specctl.logs.trace_set import TraceSet
from specctl.policy import Chain, Policy
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import load_pair
from tests.collect.lanes import FakeLane


def test_dropped_prompts_are_told_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, prompts = load_pair("embedded", "embedded", device="cpu"), load_prompts("embedded")[::40]
    policy = Policy(shape=Chain(num_draft_tokens=2))

    def collect(*, resume: bool) -> CollectSummary:
        how = "block" if resume else "drop"
        settings, out = DecodeSettings(16), tmp_path / "traces"
        return collect_live(pair, prompts, policy, settings, out, resume=resume, when_full=how)

    with monkeypatch.context() as patch:
        tight = functools.partial(recorder.RecorderConfig, max_rounds=1, wake_rounds=1)
        patch.setattr(live, "RecorderConfig", tight)
        slow = FakeLane(on_copy=lambda: time.sleep(0.2))
        patch.setattr(recorder, "lane_for", lambda device: slow)
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
