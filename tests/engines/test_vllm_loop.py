"""The loop closed: log in vLLM, tune on the log, export, serve, and see what was predicted."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make engines` runs this")

from specctl.artifacts import Origin, save_artifact
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
    Engine,
    engine,
    ids_of,
    packaged,
    printed,
    rows_of,
)

COUNT, K, BATCH = 44, 5, 8
TIMES = ("draft_us", "verify_us", "policy_us", "other_us")
CLOCKED = (
    ("chain:num_draft_tokens=1", BATCH),
    ("chain:num_draft_tokens=5", BATCH),
    ("confidence:window=5:threshold=0.4", BATCH),
    ("stop:signal=survival:threshold=0.3:window=5", 3),
    ("chain:num_draft_tokens=2", 1),
)
"""Policies and loads whose steps the clock is fitted to."""
SETTINGS = (
    "chain:num_draft_tokens=1",
    "chain:num_draft_tokens=3",
    "chain:num_draft_tokens=5",
    "confidence:window=5:threshold=0.4",
    "stop:signal=survival:threshold=0.5:window=5",
    "schedule:from_batch=1/5:num_draft_tokens=5/2",
)
"""Policies whose step times are foretold."""


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("embedded", "embedded", device="cpu")


def given() -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    every = packaged(COUNT)
    return every[::2], every[1::2]


@contextmanager
def followed(folder: Path, out: Path, words: str, pair: Pair) -> Iterator[Engine]:
    """An engine that logs rounds and plays the artifact of a folder."""
    publish(folder, words, pair)
    with engine(
        "eagle3", K, PluginSettings(policy=str(folder), trace=TraceSettings(out=str(out)))
    ) as running:
        yield running
        running.session.close()


def publish(folder: Path, words: str, pair: Pair) -> None:
    save_artifact(folder, resolve_policy(words).policy, Origin(pair.fingerprint), card="")


def play(running: Engine, folder: Path, words: str, pair: Pair) -> None:
    """Has an engine that follows the folder play another policy from its next step on."""
    publish(folder, words, pair)
    running.session.follower.look()


@pytest.fixture(scope="module")
def clock(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cost model that was fitted to vLLM's own steps."""
    root, training = tmp_path_factory.mktemp("clock"), given()[0]
    with followed(root / "policy", root / "steps", CLOCKED[0][0], pair) as running:
        for words, at_once in CLOCKED:
            play(running, root / "policy", words, pair)
            running.generate(ids_of(training)[: 8 * at_once], at_once=at_once)
    printed("profile", "--from", root / "steps", "-o", root / "clock.json")
    return root / "clock.json"


@pytest.fixture(scope="module")
def held_out(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense log of the prompts that nothing is fitted to, by specctl's own loop."""
    folder, shape = tmp_path_factory.mktemp("held-out") / "log", FullTree(depth=K, top_k=1)
    collect_dense(pair, given()[1], DecodeSettings(MAX_NEW_TOKENS), folder, shape)
    return folder


def predicted(log: Path, policy: object, clock: Path) -> dict[str, Any]:
    """What replay says of one run of the log through vLLM."""
    as_served = ("--engine", "vllm", "--batch-size", BATCH, "--in-order", "--json")
    words = ("replay", log, "-p", policy, "--cost-model", clock, *as_served)
    [found] = json.loads(printed(*words))["policies"]
    return dict(found)


def test_what_was_predicted_is_what_vllm_does(
    tmp_path: Path, clock: Path, held_out: Path, record_property: Callable[[str, object], None]
) -> None:
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

    found, rounds = (
        predicted(held_out, best / "policy", clock),
        rows_of(tmp_path / "served", "rounds"),
    )
    assert found["num_tokens"] == sum(map(len, texts))
    assert found["calls"] == len(rounds)
    assert found["num_drafts"] == counted["drafts"]
    assert found["num_drafted"] == counted["draft_tokens"]
    assert found["num_accepted"] == rounds["num_accepted"].sum()
    record_property("predicted over measured step time", time_ratio(found, rounds))


def test_a_policy_serves_while_one_request_in_four_is_logged_densely(
    tmp_path: Path, pair: Pair, held_out: Path
) -> None:
    """The rounds of the others are those of replay, and the dense rows those of our collector."""
    others, words, every = given()[1], "confidence:window=5:threshold=0.4", 4
    settings = PluginSettings(
        policy=words, trace=TraceSettings(out=str(tmp_path / "live"), dense_every=every)
    )
    with engine("eagle3", K, settings, batch_size=BATCH) as running:
        texts = running.generate(ids_of(others))
        running.session.close()
        assert not any(tracer.recorder.lost for tracer in running.session.tracers)
    plain = rows_of(held_out, "rounds").group_by("request_id", maintain_order=True).len()
    assert [len(text) - 1 for text in texts] == plain["len"].to_list()
    live, dense, mine = (
        rows_of(path, "rounds") for path in (tmp_path / "live", tmp_path / "live-dense", held_out)
    )
    numbers = [int(name[-6:]) for name in live["request_id"].unique()]
    assert sorted(numbers) == [n for n in range(len(others)) if n % every]
    kept = {others[n].prompt_id for n in range(0, len(others), every)}
    known = mine.filter(pl.col("prompt_id").cast(pl.String).is_in(kept))
    assert dense["root_token_id"].to_list() == known["root_token_id"].to_list()
    replayed = read_prompts(TraceSet.open(str(held_out)), resolve_policy(words).policy)
    served = read_prompts(TraceSet.open(str(tmp_path / "live")), resolve_policy(words).policy)
    place = {name: row for row, name in enumerate(replayed.ids)}
    rows = [place[others[int(name[-6:])].prompt_id] for name in served.ids]
    for name in ("calls", "tokens", "verified", "surprise"):
        assert served.column(name) == pytest.approx(replayed.column(name)[rows], abs=1e-3), name


@pytest.mark.nightly
def test_step_times_are_foretold(
    tmp_path: Path, pair: Pair, held_out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts are exact again; the ratios of times are for people, as the machine may be busy.

    Steps to fit to and steps to foretell are served in turns: a machine that grows slower does so
    for both.
    """
    training, others, turns, ratios = *given(), 3, {}
    followers = (tmp_path / "policy-a", tmp_path / "steps"), (tmp_path / "policy-b", tmp_path / "s")
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(followed(*one, SETTINGS[0], pair)) for one in followers
        )
        for _ in range(turns):
            for words, at_once in CLOCKED:
                play(first, followers[0][0], words, pair)
                first.generate(ids_of(training), at_once=at_once)
            for words in SETTINGS:
                play(second, followers[1][0], words, pair)
                second.generate(ids_of(others))
    printed("profile", "--from", followers[0][1], "-o", tmp_path / "clock.json")
    rounds = rows_of(followers[1][1], "rounds")
    number, size = pl.col("request_id").str.slice(-6).cast(pl.Int64), len(others)
    for place, words in enumerate(SETTINGS):
        mine = rounds.filter(number // size % len(SETTINGS) == place)
        found = predicted(held_out, words, tmp_path / "clock.json")
        drafted = int((mine["num_verified"].cast(pl.Int64) - 1).sum())
        assert (turns * found["calls"], turns * found["num_drafted"]) == (len(mine), drafted)
        ratios[words] = time_ratio(found, mine)
    errors = [abs(ratio - 1) for ratio in ratios.values()]
    with capsys.disabled():
        sys.stdout.write(f"\npredicted over measured step time: {json.dumps(ratios, indent=1)}\n")
        sys.stdout.write(f"median error {100 * statistics.median(errors):.1f} %\n")


def time_ratio(found: dict[str, Any], rounds: pl.DataFrame) -> float:
    """Predicted over measured mean time of a step."""
    steps = rounds.unique("step_idx")
    measured = steps.select(pl.sum_horizontal(TIMES).mean()).item()
    return float(found["time_us"] / found["num_steps"] / measured)
