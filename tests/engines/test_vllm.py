"""vLLM with the plugin: texts are those of plain decoding, calls and drafts those of replay, rows
those of `collect`.

`make engines` runs `CORE` on 24 prompts; with SPECCTL_TEST_ENGINES=all, as in `make nightly`,
every policy of both drafters runs at both batch sizes, on 60.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make engines` runs this")

from specctl.artifacts import Origin, load_artifact, save_artifact
from specctl.artifacts.manifest import PairFingerprint
from specctl.collect.dense import collect_dense
from specctl.collect.live import collect_live
from specctl.engines.settings import PluginSettings, TraceSettings
from specctl.errors import ClockError
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import FullTree, PerRequest, Policy, StepCost, as_chain, policy_digest
from specctl.registry.opening import init_registry
from specctl.registry.publishing import Writer, promote, push, read_package
from specctl.registry.trust import Trust
from specctl.replay.rounds import Rounds, replay
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import load_pair
from specctl.runtime.words import resolve_policy
from tests.cli.command import specctl
from tests.engines.vllm_engine import (
    MAX_NEW_TOKENS,
    engine,
    ids_of,
    packaged,
    plain_texts,
    printed,
    rows_of,
)

IS_ALL = os.environ.get("SPECCTL_TEST_ENGINES") == "all"
COUNT, K = 60 if IS_ALL else 24, 5
BASE = "eagle2:3x1/4"
COSTS = StepCost(token_counts=(8, 16, 32, 48), step_us=(3000.0, 3600.0, 5400.0, 7200.0))
SHARED = {
    "schedule of 5 and 2": "schedule:from_batch=1/5:num_draft_tokens=5/2",
    "schedule of 5 to 0": "schedule:from_batch=1/3/7:num_draft_tokens=5/1/0",
    "survival budget": "chain:5+survival:max_tokens=20",
    "marginal budget": "confidence:window=5:threshold=0.2+marginal:tokens_per_s=3000",
}
"""What depends on who shares the batch."""
WORDS = {
    "chain of 1": "chain:1",
    "chain of 3": "chain:3",
    "chain of 5": "chain:5",
    "confidence": "confidence:window=5:threshold=0.4",
    "survival": "stop:signal=survival:threshold=0.5:window=5",
    "entropy": "stop:signal=entropy:threshold=1.0:window=5",
    "SVIP": "svip:window=5:threshold=0.9",  # it leaves the uncertain token out
    "AdaSD": "adasd_stop:window=5:min_samples=2",
    "threshold": "threshold:depth=5:min_prob=0.2",  # of a tree, on a chain
    **SHARED,
}
FITS = {
    "HeteroSpec": ("cart", "--base", BASE, "--filter", "all", "--label", "accepted"),
    "C2T": ("c2t", "--epochs", "4", "--hidden", "8"),
}
POLICIES = (*WORDS, *FITS)
CORE = {"eagle3": {"8": ("chain of 3", "SVIP", "AdaSD", *SHARED, *FITS), "1": ("AdaSD",)}}
EVERY = {drafter: dict.fromkeys(("8", "1"), POLICIES) for drafter in ("eagle3", "small")}
CHOSEN = EVERY if IS_ALL else CORE
PASSES = {
    drafter: [(policy, batch) for batch, policies in by.items() for policy in policies]
    for drafter, by in CHOSEN.items()
}
"""By drafter: policies, and requests that may run together."""


@dataclass
class Counts:
    """Of each request, in the order of the prompts."""

    calls: list[int]
    drafted: list[int]
    accepted: list[int]

    @classmethod
    def replayed(cls, found: Rounds) -> Counts:
        """From a dense log, without the models."""
        positions = found.positions
        size = positions.num_requests
        order = np.argsort(np.array(positions.prompt_ids)[positions.prompt])

        def by_request(values: Any) -> list[int]:
            sums = np.bincount(found.request, values, minlength=size)
            return [int(one) for one in sums[order]]

        outcomes = found.outcomes
        ones = np.ones(len(found.request))
        return cls(
            by_request(ones), by_request(outcomes.verified - 1), by_request(outcomes.accepted)
        )

    @classmethod
    def traced(cls, rounds: pl.DataFrame) -> Counts:
        """From the rounds that the engine logged."""
        by_request = rounds.group_by("request_id", maintain_order=True).agg(
            pl.len().alias("calls"),
            (pl.col("num_verified").cast(pl.Int64) - 1).sum().alias("drafted"),
            pl.col("num_accepted").cast(pl.Int64).sum().alias("accepted"),
        )
        rows = by_request.sort("request_id")
        return cls(*(rows[name].to_list() for name in ("calls", "drafted", "accepted")))


def replayed(path: Path, policies: Mapping[str, Policy]) -> dict[str, Counts]:
    """What each policy would do, request by request, as vLLM runs it: on chains."""
    log = DenseLog.open(TraceSet.open(str(path)))
    alone = [name for name, policy in policies.items() if isinstance(policy.budget, PerRequest)]
    runs = replay(log, [as_chain(policies[name]) for name in alone])
    return {name: Counts.replayed(run) for name, run in zip(alone, runs, strict=True)}


# --------------------------------------------------------------------------- by ourselves


@dataclass
class Ours:
    """The same prompts by specctl's own loop: plain texts, a dense log, and rounds of a chain."""

    texts: list[list[int]]
    dense: Path
    live: Path


@pytest.fixture(scope="module", params=PASSES)
def drafter(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ours(drafter: str, tmp_path_factory: pytest.TempPathFactory) -> Ours:
    root = tmp_path_factory.mktemp(f"ours-{drafter}")
    pair = load_pair("embedded", f"embedded:{drafter}", device="cpu")
    settings, given = DecodeSettings(MAX_NEW_TOKENS), packaged(COUNT)
    shape = FullTree(depth=K, top_k=1)
    collect_dense(pair, given, settings, root / "dense", shape)
    policy = resolve_policy("chain:3").policy
    collect_live(pair, given, policy, settings, root / "live", batch_size=8)
    return Ours(plain_texts(pair, given), root / "dense", root / "live")


# --------------------------------------------------------------------------- by vLLM


@dataclass
class Theirs:
    """Passes of the prompts through vLLM: a dense log, and the rounds of each policy."""

    dense: Path
    dense_texts: list[list[int]]
    live: Path
    folders: dict[str, Path] = field(default_factory=dict)
    policies: dict[str, Policy] = field(default_factory=dict)
    texts: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict)
    counters: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)

    @cached_property
    def replayed(self) -> dict[str, Counts]:
        """What the policies would do, by the engine's own dense log."""
        return replayed(self.dense, self.policies)

    def rounds(self, policy: str, batch: str) -> pl.DataFrame:
        """The rounds of a pass; requests are numbered through all of them."""
        number = pl.col("request_id").str.slice(-6).cast(pl.Int64)
        place = list(self.texts).index((policy, batch))
        return rows_of(self.live, "rounds").filter(number // COUNT == place)


@pytest.fixture(scope="module")
def theirs(drafter: str, tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    """One engine logs densely; another plays every policy, as an alias moves, and logs rounds."""
    root, given = tmp_path_factory.mktemp(f"vllm-{drafter}"), ids_of(packaged(COUNT))
    dense = TraceSettings(out=str(root / "dense"), dense=True)
    with engine(drafter, K, PluginSettings(trace=dense)) as running:
        texts = running.generate(given)
        running.session.close()
    found = Theirs(root / "dense", texts, root / "live")

    pair = TraceSet.open(str(found.dense)).fingerprint
    folders = artifacts(root, pair, found.dense, {policy for policy, _ in PASSES[drafter]})
    registry = init_registry(root / "registry")
    writer = Writer(registry, Trust(), "tests")
    name = f"embedded--{drafter}"
    digests = {}
    for policy, folder in folders.items():
        package = read_package(folder)
        push(writer, package, name)
        digests[policy] = package.digest
    promote(writer, name, "prod", digests[PASSES[drafter][0][0]])
    settings = PluginSettings(
        policy=f"{root}/registry/{name}@prod", trace=TraceSettings(out=str(root / "live"))
    )
    with engine(drafter, K, settings) as running:
        for policy, batch in PASSES[drafter]:
            promote(writer, name, "prod", digests[policy])
            running.session.follower.look()  # its thread would within seconds
            before = running.counters()
            found.texts[policy, batch] = running.generate(given, at_once=int(batch))
            after = running.counters()
            found.counters[policy, batch] = {k: after[k] - before[k] for k in after}
        running.session.close()
        assert running.session.faults.total == 0
        assert not running.session.tracers[0].recorder.lost
    found.folders = folders
    found.policies = {policy: load_artifact(folder).policy for policy, folder in folders.items()}
    return found


def artifacts(root: Path, pair: PairFingerprint, dense: Path, wanted: set[str]) -> dict[str, Path]:
    """A folder for each wanted policy; the learned ones are fitted from the engine's dense log."""
    found = {}
    for policy in WORDS.keys() & wanted:
        words = WORDS[policy]
        found[policy] = root / policy.replace(" ", "-")
        resolved = resolve_policy(words, step_cost=COSTS).policy
        save_artifact(found[policy], resolved, Origin(pair), card=policy)
    for policy in FITS.keys() & wanted:
        words, found[policy] = FITS[policy], root / policy
        printed("fit", words[0], dense, "-o", found[policy], *words[1:])
    return found


# --------------------------------------------------------------------------- what it must show


def test_calls_and_drafts_are_those_of_replay(theirs: Theirs) -> None:
    """Of every request, to the last one; accepted tokens with the last round cut at the text."""
    for (policy, batch), counted in theirs.counters.items():
        rounds, record = theirs.rounds(policy, batch), as_chain(theirs.policies[policy])
        assert rounds["policy_digest"].unique().to_list() == [policy_digest(record)], policy
        if policy in SHARED and (batch != "1" or policy not in theirs.replayed):
            continue  # it depends on who shares the batch: the test below
        expected = theirs.replayed[policy]
        assert Counts.traced(rounds) == expected, (policy, batch)
        assert counted["draft_tokens"] == sum(expected.drafted), (policy, batch)
        assert counted["drafts"] == int((rounds["num_verified"] > 1).sum())
        assert counted["accepted_tokens"] >= sum(expected.accepted)


def test_a_shared_batch_is_simulated_to_the_last_draft(
    drafter: str, ours: Ours, theirs: Theirs
) -> None:
    """Lengths and budgets by who is there, as requests come and go in vLLM: totals of a run."""
    ran = [name for name, batch in PASSES[drafter] if name in SHARED and batch == "8"]
    for name in ran:
        words = ("--engine", "vllm", "--batch-size", 8, "--in-order", "--json")
        found = json.loads(printed("replay", ours.dense, "-p", theirs.folders[name], *words))
        [totals] = found["policies"]
        counted, rounds = theirs.counters[name, "8"], theirs.rounds(name, "8")
        assert totals["calls"] == len(rounds), name
        assert totals["num_drafts"] == counted["drafts"], name
        assert totals["num_drafted"] == counted["draft_tokens"], name
        assert totals["num_accepted"] == rounds["num_accepted"].sum(), name


def test_texts_are_those_of_plain_decoding(ours: Ours, theirs: Theirs) -> None:
    """While rounds are logged, and while every position is."""
    for policy, batch in theirs.texts:
        assert theirs.texts[policy, batch] == ours.texts, (policy, batch)
    assert theirs.dense_texts == ours.texts


def compare(one: pl.DataFrame, other: pl.DataFrame, *, without: set[str]) -> None:
    """Rows are equal, floats within 1e-4; requests are matched by their order."""
    assert len(one) == len(other) > 0
    names = [one["request_id"].unique().sort(), other["request_id"].unique().sort()]
    other = other.with_columns(pl.col("request_id").replace_strict(names[1], names[0]))
    for column in set(one.columns) - without:
        mine, theirs = one[column], other[column]
        assert mine.is_null().equals(theirs.is_null()), column
        if mine.dtype == pl.Float32:
            assert float((mine - theirs).abs().max() or 0.0) < 1e-4, column
        else:
            assert mine.cast(pl.String).equals(theirs.cast(pl.String), null_equal=True), column


OF_A_RUN = {"prompt_id", "category", "batch_size", "policy_digest"}
TIMES = {"draft_us", "verify_us", "policy_us", "other_us"}
STEPS = {"step_idx", "step_tokens", "step_prompt_tokens", "step_context_tokens", "step_levels"}


def test_live_rows_are_those_of_collect(ours: Ours, theirs: Theirs) -> None:
    rounds = theirs.rounds("chain of 3", "8")
    compare(rows_of(ours.live, "rounds"), rounds, without=OF_A_RUN | TIMES | STEPS)
    nodes = rows_of(theirs.live, "nodes").join(
        rounds.select("request_id").unique(), on="request_id"
    )
    keys = ["request_id", "round_idx", "node_idx"]
    compare(rows_of(ours.live, "nodes"), nodes.sort(keys), without=set())


def test_steps_are_told(theirs: Theirs, tmp_path: Path) -> None:
    """Sizes and times of a step are the same in all of its rows, and they add up; a clock is fitted
    to them, which on a busy machine may say that it is none."""
    rounds = theirs.rounds("chain of 3", "8")
    told = [*sorted(TIMES), *sorted(STEPS), "batch_size"]
    by_step = rounds.group_by("step_idx").agg(
        *(pl.col(name).n_unique().alias(f"{name}_kinds") for name in told if name != "step_idx"),
        pl.len().alias("rows"),
        pl.col("num_verified").cast(pl.Int64).sum().alias("verified"),
        *(pl.col(name).first() for name in told if name != "step_idx"),
    )
    kinds = [name for name in by_step.columns if name.endswith("_kinds")]
    assert by_step.select((pl.concat_list(kinds).list.max() == 1).all()).item()
    decoding = by_step.filter(pl.col("step_prompt_tokens") == 0)
    assert decoding["verified"].equals(decoding["step_tokens"].cast(pl.Int64), check_names=False)
    sizes = decoding["batch_size"].cast(pl.Int64)
    assert decoding["rows"].cast(pl.Int64).equals(sizes, check_names=False)
    assert (decoding["step_levels"] == 3).all()
    assert (rounds["verify_us"] > 0).all()
    done = specctl("profile", "--from", theirs.live, "-o", tmp_path / "clock.json")
    assert done.code in (0, ClockError.exit_code), done
    assert json.loads((tmp_path / "clock.json").read_text())["kind"] == "engine"


def test_dense_rows_are_those_of_collect(ours: Ours, theirs: Theirs) -> None:
    """But for what an engine does not compute: the target behind the last token of a text."""
    mine, dense = rows_of(ours.dense, "rounds"), rows_of(theirs.dense, "rounds")
    compare(mine, dense, without=OF_A_RUN | STEPS)
    mine, dense = rows_of(ours.dense, "nodes"), rows_of(theirs.dense, "nodes")
    target = {name for name in mine.columns if name.startswith("target_")}
    compare(mine, dense, without=target)
    unseen = dense["target_logp"].is_null()
    assert (unseen | mine["target_logp"].is_not_null()).all()
    last = mine.filter(unseen & mine["target_logp"].is_not_null())
    assert last["node_match"].is_null().all(), "only behind the end of a text"
    compare(mine.filter(~unseen), dense.filter(~unseen), without=set())
    assert replayed(ours.dense, theirs.policies) == theirs.replayed
