"""The loop closed: log in vLLM, tune on the log, export, serve, and see what was predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make engines` runs this")

from specctl.artifacts import Origin, save_artifact
from specctl.collect.dense import collect_dense
from specctl.engines.settings import FILE_NAME, PluginSettings, TraceSettings, read_settings
from specctl.policy import FullTree
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import load_pair
from specctl.runtime.policy_spec import resolve_policy
from tests.engines.vllm_engine import MAX_NEW_TOKENS, engine, ids_of, packaged, rows_of, specctl

COUNT, K, BATCH = 60, 5, 8
CLOCKED = (
    ("chain:num_draft_tokens=1", BATCH),
    ("chain:num_draft_tokens=5", BATCH),
    ("confidence:window=5:threshold=0.4", BATCH),
    ("stop:signal=survival:threshold=0.3:window=5", 3),
    ("chain:num_draft_tokens=2", 1),
)
"""Policies and loads whose steps the clock is fitted to."""


def test_what_was_predicted_is_what_vllm_does(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """On prompts that nothing was fitted or tuned on: calls and drafts exactly, step time near."""
    given = packaged(COUNT)
    training, held_out = given[::2], given[1::2]
    pair = load_pair("embedded", "embedded", device="cpu")
    with engine("eagle3", K, PluginSettings(trace=dense(tmp_path / "log"))) as running:
        running.generate(ids_of(training))
        running.session.close()
    folder = tmp_path / "policy"
    clocked = PluginSettings(policy=str(folder), trace=TraceSettings(out=str(tmp_path / "steps")))
    save_artifact(folder, resolve_policy(CLOCKED[0][0]).policy, Origin(pair.fingerprint), card="")
    with engine("eagle3", K, clocked) as running:
        for words, together in CLOCKED:
            save_artifact(folder, resolve_policy(words).policy, Origin(pair.fingerprint), card="")
            running.session.watch.look()
            for start in range(0, len(training), together):
                running.generate(ids_of(training[start : start + together]))
        running.session.close()

    clock, best, serve = tmp_path / "clock.json", tmp_path / "best", tmp_path / "serve"
    specctl("profile", "--from", tmp_path / "steps", "-o", clock)
    load = ("--for", "vllm", "--batch-size", BATCH, "--cost-model", clock, "--held-out", 0.4)
    specctl("tune", tmp_path / "log", *load, "-o", best)
    words = ("--to", "vllm", "--drafter", "embedded", "--trace", tmp_path / "served", "-o", serve)
    specctl("export", best / "tune.json", *words)

    exported = json.loads((serve / "speculative-config.json").read_text())
    settings = read_settings(str(serve / FILE_NAME))
    with engine(settings=settings, exported=exported, batch_size=BATCH) as running:
        texts = running.generate(ids_of(held_out))
        counted = running.counters()
        running.session.close()

    shape = FullTree(depth=K, top_k=1)
    collect_dense(pair, held_out, DecodeSettings(MAX_NEW_TOKENS), tmp_path / "held-out", shape)
    replay = ("replay", tmp_path / "held-out", "-p", best / "policy", "--cost-model", clock)
    as_served = ("--engine", "vllm", "--batch-size", BATCH, "--in-order", "--json")
    [predicted] = json.loads(specctl(*replay, *as_served))["policies"]
    rounds = rows_of(tmp_path / "served", "rounds")
    assert predicted["num_tokens"] == sum(map(len, texts))
    assert predicted["calls"] == len(rounds)
    assert predicted["num_drafts"] == counted["drafts"]
    assert predicted["num_drafted"] == counted["draft_tokens"]
    assert predicted["num_accepted"] == rounds["num_accepted"].sum()
    times = step_times(rounds)
    record_property(
        "predicted over measured step time", predicted["time_us"] / predicted["num_steps"] / times
    )


def dense(path: Path) -> TraceSettings:
    return TraceSettings(out=str(path), dense=True)


def step_times(rounds: pl.DataFrame) -> float:
    """Mean time of a step, us."""
    parts = ("draft_us", "verify_us", "policy_us", "other_us")
    steps = rounds.unique("step_idx").select(pl.sum_horizontal(parts).mean())
    return float(steps.item())
