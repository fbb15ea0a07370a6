"""A policy that keeps up with its traffic: vLLM serves an alias and samples densely, the traffic
changes, the alarm rings, and a recalibrated policy takes over while requests run."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import polars as pl
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make engines` runs this")

from specctl.artifacts import Origin, save_artifact
from specctl.cli.watching import ALARM
from specctl.collect.prompts import Prompt, load_prompts
from specctl.engines import recording
from specctl.engines.settings import PluginSettings, TraceSettings
from specctl.logs.trace_set import TraceSet
from specctl.policy import policy_digest
from specctl.runtime.load import load_pair
from specctl.runtime.words import resolve_policy
from tests.cli.command import NAME, passes, specctl
from tests.engines.vllm_engine import Engine, engine, ids_of, plain_texts, rows_of
from tests.hidden import python

K, EVERY, PART, LENGTH = 8, 2, 16, 16
REFERENCE = 12
DEPLOYED = "chain:num_draft_tokens=2"
MAIN = "from specctl.cli import main; main()"


def traffic(*categories: str) -> list[Prompt]:
    """First turns of three parts of the packaged prompts, in any order."""
    found = [one for one in load_prompts("embedded") if one.category in categories]
    random.Random(0).shuffle(found)
    return [replace(one, turns=one.turns[:1]) for one in found[: 3 * PART]]


class Service:
    """An engine that serves an alias, logs rounds, and one request in `EVERY` densely.

    Attributes:
        num_served: requests, one after the other.
    """

    def __init__(self, running: Engine, live: Path, plain: dict[str, list[int]]) -> None:
        self._running, self._live, self._plain = running, live, plain
        self.num_served = 0

    def serve(self, prompts: Sequence[Prompt]) -> None:
        """Every request gets its text, that of plain decoding."""
        texts = self._running.generate(ids_of(prompts), max_tokens=LENGTH)
        assert texts == [self._plain[one.prompt_id] for one in prompts]
        self.num_served += len(prompts)

    def look(self, *words: Any) -> tuple[int, dict[str, Any]]:
        """What cron would find once the rows are written; the last one comes with the next step."""
        num_live = self.num_served * (EVERY - 1) // EVERY
        while not (self._live / "rounds").is_dir() or self.num_logged() < num_live - 1:
            assert not self._running.session.tracers[0].recorder.lost
            threading.Event().wait(0.05)
        said = specctl("drift", self._live, *words, "--false-alarm-prob", 0.01, "--json")
        return said.code, json.loads(said.out)

    def num_logged(self) -> int:
        return len(TraceSet.open(str(self._live)).prompt_ids)


def test_an_alarm_and_a_better_policy_while_requests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts of all requests are those of plain decoding, and none fails."""
    monkeypatch.setattr(recording, "LIMITS", replace(recording.LIMITS, flush_s=0.7))
    pair, old = load_pair("embedded", "embedded", device="cpu"), resolve_policy(DEPLOYED).policy
    save_artifact(tmp_path / "first", old, Origin(pair.fingerprint), card="")
    registry = ("--registry", tmp_path / "registry")
    passes("registry", "init", *registry)
    passes("registry", "push", tmp_path / "first", NAME, "--alias", "prod", *registry)
    prod, live = f"{tmp_path}/registry/{NAME}@prod", tmp_path / "live"
    usual, changed = traffic("code", "prose"), traffic("arithmetic", "strings")
    every = [*usual, *changed]
    texts = plain_texts(pair, every, LENGTH)
    plain = {one.prompt_id: text for one, text in zip(every, texts, strict=True)}
    trace = TraceSettings(out=str(live), dense_every=EVERY)
    with (
        engine("eagle3", K, PluginSettings(policy=prod, trace=trace)) as running,
        ThreadPoolExecutor(1) as beside,
    ):
        session, service = running.session, Service(running, live, plain)
        watched = ("--policy", prod, "--reference-prompts", REFERENCE)
        for part in (usual[: 2 * PART], usual[2 * PART :]):
            service.serve(part)
            assert service.look(*watched)[0] == 0, "nothing has changed"

        service.serve(changed)
        code, drift = service.look(*watched, "--dense", f"{live}-dense")
        assert code == ALARM
        assert drift["price"]["tokens_per_call_kept"]["value"] > 1, "the change is for the better"
        since = drift["signals"][0]["since"]
        assert abs(since["index"] - (len(usual) // EVERY - REFERENCE)) < 8, (
            "where the traffic changed"
        )

        session.follower.interval_s = 0.1
        recent = f"{live}-dense@{since['finished']}"
        promote = ("--promote", f"{NAME}@prod", *registry, "-o", tmp_path / "again")
        search = ("--for", "vllm", "--cost-model", "line", "--batch-size", 8, "--held-out", 0.5)
        done = beside.submit(
            python, MAIN, "recalibrate", recent, "-p", prod, *map(str, search + promote)
        )
        for part in cycle(changed[start : start + PART] for start in range(0, 3 * PART, PART)):
            if done.done() and session.policy != old:
                break
            service.serve(part)  # all of them in turn: the new reference has the traffic's mix
            assert session.follower.last_error is None
            assert not done.done() or "a candidate" in done.result()
        service.serve(changed)
        code, _ = service.look("--policy", prod, "--reference", recent)
        assert code == 0, "no request of two policies counts for the new one"
        session.close()
        assert session.faults.total == 0
        assert not any(tracer.recorder.lost for tracer in session.tracers)

    number = pl.col("request_id").str.slice(-6).cast(pl.Int64)
    rounds = rows_of(live, "rounds").filter(number >= len(usual))
    num_live = (service.num_served - len(usual)) * (EVERY - 1) // EVERY
    assert rounds["request_id"].n_unique() == num_live, "none is lost"
    by_policy = rounds.group_by("policy_digest").agg(
        pl.col("num_emitted").cast(pl.Int64).sum() / pl.len()
    )
    tokens_per_call = dict(by_policy.iter_rows())
    new = policy_digest(session.policy)
    assert tokens_per_call.keys() == {policy_digest(old), new}, "nothing fell back"
    assert tokens_per_call[new] > tokens_per_call[policy_digest(old)]
