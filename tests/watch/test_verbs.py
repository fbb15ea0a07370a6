"""`specctl drift` and `recalibrate` as typed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from specctl.artifacts import load_artifact
from specctl.cli.watching import ALARM
from specctl.collect import trace_writer
from specctl.collect.trace_writer import TraceWriter
from specctl.errors import TraceMismatchError, UsageError
from specctl.logs.parquet import drop_prompts, join_tables
from specctl.logs.trace_set import TraceSet
from specctl.policy import StaticTree
from specctl.replay.cost.files import save_cost_model
from specctl.replay.cost.model import DeciderCost
from specctl.replay.tune.candidates import parse_families
from specctl.runtime.words import resolve_policy
from specctl.stats import Interval, split_prompts
from specctl.watch.price import check_pair
from specctl.watch.recalibrate import (
    COMPARED,
    Recalibration,
    families_to_search,
    recalibration_parts,
)
from specctl.watch.signals import read_prompts
from tests.cli.command import passes, refuses, specctl, write_lines
from tests.replay.costs import table_model
from tests.replay.tune_cases import linear_file

SERVED = "threshold:depth=6:top_k=4"
NOBODY = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_ALLOW_HTTP": "true",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
}
LENGTH = ("--max-new-tokens", 10, "--threads", 1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged prompts stand sorted by category, which is a change that must be noticed."""
    folder = tmp_path_factory.mktemp("served") / "traces"
    size = ("--batch-size", 16, "--limit", 160)
    passes("collect", "embedded", "-o", folder, "--policy", SERVED, *size, *LENGTH)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    size = ("--depth", 6, "--children", 4, "--limit", 40)
    passes("collect", "embedded", "-o", folder, "--dense", "--batch-size", 8, *size, *LENGTH)
    return folder


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linear_file(tmp_path_factory.mktemp("costs") / "cost_model.json")


def test_traffic_in_any_order_is_no_alarm(served: Path, dense: Path, tmp_path: Path) -> None:
    """Forty prompts of every category, against the same policy replayed on prompts like them."""
    chosen = tmp_path / "mixed"
    mixed = ("--limit", 40, "--limit-seed", 5, "--policy", SERVED)
    passes("collect", "embedded", "-o", chosen, "--batch-size", 8, *mixed, *LENGTH)
    watched = ("drift", chosen, "-p", SERVED, "--reference", dense, "--false-alarm-prob", 0.001)
    found = json.loads(passes(*watched, "--json").out)
    assert (found["alarm"], found["num_reference"]) == (False, 40)
    assert {"tokens per call", "calibration"} <= {one["signal"] for one in found["signals"]}


def test_a_change_rings_and_is_told(served: Path, tmp_path: Path) -> None:
    metrics, out = tmp_path / "drift.prom", tmp_path / "out"
    place = ("--metrics", metrics, "-o", out, "--reference-prompts", 60)
    said = specctl("drift", served, "-p", SERVED, *place)
    assert said.code == ALARM, said
    assert "ALARM at prompt" in said.out
    found = json.loads((out / "drift.json").read_text("utf-8"))
    moved = [one for one in found["signals"] if one["moved"]]
    assert any(one["group"] == "categories" for one in moved)
    assert all(one["most_wealth"] >= 20 for one in moved)
    assert all(one["before"] != one["after"] for one in moved)
    page = json.loads(
        passes("report", "--drift", out / "drift.json", "-o", tmp_path / "r.html", "--json").out
    )
    assert "no longer fits" in page["sections"]["drift"]["reading"]
    text = metrics.read_text("utf-8")
    assert f'specctl_drift_alarm{{policy="{SERVED}"}} 1\n' in text
    assert all(line.startswith(("#", "specctl_drift_")) for line in text.splitlines())


def test_an_alarm_says_what_the_change_costs(
    served: Path, dense: Path, costs: Path, tmp_path: Path
) -> None:
    """On dense prompts of the traffic since the foremost signal's change, and on none before."""
    words = ("drift", served, "-p", SERVED, "--reference-prompts", 60, "--dense", dense, "--json")
    counted, timed = (specctl(*words, *more) for more in ((), ("--cost-model", costs)))
    assert (counted.code, timed.code) == (ALARM, ALARM)
    found = json.loads(counted.out)
    foremost = found["signals"][0]["since"]["index"]
    policy = resolve_policy(SERVED).policy
    order = read_prompts(TraceSet.open(str(served)), policy).ids.tolist()
    since = [
        name for name in TraceSet.open(str(dense)).prompt_ids if order.index(name) >= 60 + foremost
    ]
    cost = found["price"]
    assert cost["num_prompts"] == len(since) > 16
    assert cost["tokens_per_call_kept"]["low"] < cost["tokens_per_call_kept"]["high"]
    assert cost["static"] is None
    assert "--cost-model" in cost["why_not"]
    cost = json.loads(timed.out)["price"]
    assert cost["static_over_deployed"]["low"] <= cost["static_over_deployed"]["value"]
    assert cost["why_not"] is None
    assert cost["proviso"] == ", if decisions of threshold take no time", "on a stated clock"
    held = DeciderCost(policy="svip", batch_sizes=(1,), level_us=(1.0,))
    save_cost_model(table_model(deciders={"stop": held}), tmp_path / "bare.json")
    cost = json.loads(specctl(*words, "--cost-model", tmp_path / "bare.json").out)["price"]
    assert cost["static_over_deployed"] is None
    assert "decisions of threshold" in cost["why_not"]
    assert f"specctl profile --policy {SERVED} --policy svip -o" in cost["why_not"]
    few = tmp_path / "few"
    short = ("--dense", "--depth", 6, "--children", 4, "--limit", 4, *LENGTH)
    passes("collect", "embedded", "-o", few, *short)
    said = specctl(*words[:-2], few).out
    assert "too few to say what it costs (8 are needed)" in " ".join(said.split())
    assert "at least 8 prompts of the reference" in refuses(4, *words[:4], "--reference", few)


def test_a_set_that_is_being_written_is_watched_as_far_as_it_is_finished(
    served: Path, tmp_path: Path
) -> None:
    part = TraceSet.open(str(served)).parts[0]
    rows, names = join_tables([part.tables(one) for one in part.segments]), part.prompt_ids
    with TraceWriter.open(tmp_path / "open", part.header) as writer:
        words = ("drift", tmp_path / "open", "-p", SERVED, "--reference-prompts", 20)
        assert "no rounds" in refuses(4, *words)
        writer.commit(names[:30], drop_prompts(rows, names[30:]))
        (tmp_path / "open" / "tmp").mkdir(exist_ok=True)
        (tmp_path / "open" / "tmp" / "half.parquet").write_bytes(b"PAR1")
        said = specctl(*words, "--false-alarm-prob", 1e-9)
        assert said.code == 0, said
        assert "10 prompts against" in said.out
        writer.commit(names[30:31], drop_prompts(rows, (*names[:30], *names[31:])))
        assert "11 prompts against" in specctl(*words, "--false-alarm-prob", 1e-9).out


def test_whole_days_are_watched_where_traffic_swings(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve days of ten prompts: ten are whole, of which two are behind the reference."""
    today = datetime(2026, 1, 1, 12, tzinfo=UTC)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return today.astimezone(tz)

    monkeypatch.setattr(trace_writer, "datetime", Clock)
    part = TraceSet.open(str(served)).parts[0]
    rows, names = join_tables([part.tables(one) for one in part.segments]), part.prompt_ids
    order = np.random.default_rng(0).permutation(names)[:120].reshape(12, 10)
    with TraceWriter.open(tmp_path / "days", part.header) as writer:
        for chosen in order.tolist():
            writer.commit(chosen, drop_prompts(rows, [one for one in names if one not in chosen]))
            today += timedelta(days=1)
    words = ("drift", tmp_path / "days", "-p", SERVED, "--reference-prompts", 8)
    said = specctl(*words, "--unit", "day")
    assert said.code == 0, said
    assert "2 days against 8 of the reference" in said.out
    assert "20 prompts of a day that may not be whole are left out" in said.out
    found = json.loads(passes(*words, "--unit", "day", "--json").out)
    counts = ("unit", "num_reference", "num_units", "num_prompts")
    assert [found[name] for name in counts] == ["day", 8, 2, 20]
    assert found["signals"][0]["since"]["finished"].startswith("2026-01-1")
    assert "8 whole hours of the reference" in refuses(
        4, "drift", served, "-p", SERVED, "--reference", served, "--unit", "hour"
    )
    assert "did you mean day?" in refuses(2, *words, "--unit", "days")


def test_what_cannot_be_watched_is_refused(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_lines(tmp_path / "sglang.log", "Decode batch, accept len: 2.10")
    assert "`specctl import` reads" in refuses(4, "drift", log, "-p", "chain")
    assert "rounds of the policy" in refuses(4, "drift", served, "-p", "chain")
    assert "is a probability" in refuses(2, "drift", served, "-p", SERVED, "--false-alarm-prob", 0)
    unreachable = refuses(2, "drift", served, "-p", SERVED, "--false-alarm-prob", 1e-300)
    assert "from 1e-90 to below 1, not 1e-300" in unreachable
    few = refuses(4, "drift", served, "-p", SERVED, "--reference-prompts", 160)
    assert "lower --reference-prompts" in few
    assert "live traces" in refuses(4, "drift", served, "-p", SERVED, "--dense", served)
    short = ("--policy", SERVED, "--limit", 8, "--max-new-tokens", 4, "--threads", 1)
    passes("collect", "embedded", "-o", tmp_path / "short", *short)
    for option in ("--reference", "--dense"):
        said = refuses(4, "drift", served, "-p", SERVED, option, tmp_path / "short")
        assert f"{option} has max_new_tokens 4, the traffic 10" in said
    for name, value in NOBODY.items():
        monkeypatch.setenv(name, value)
    assert "the store does not answer" in refuses(6, "drift", "s3://bucket/live", "-p", SERVED)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chains of two levels, of the prompts of `dense`."""
    folder = tmp_path_factory.mktemp("narrow") / "traces"
    size = ("--depth", 2, "--children", 1, "--limit", 40)
    passes("collect", "embedded", "-o", folder, "--dense", "--batch-size", 8, *size, *LENGTH)
    return folder


def test_a_reference_that_lacks_the_policy_is_refused(dense: Path, tmp_path: Path) -> None:
    """The served prompts are those of the reference, so that nothing has changed."""
    live, wide = tmp_path / "live", "threshold:depth=8:top_k=10"
    passes("collect", "embedded", "-o", live, "--policy", wide, "--limit", 10, *LENGTH)
    said = refuses(4, "drift", live, "-p", wide, "--reference", dense)
    assert "are missing, in trees of --depth 6 --children 4" in said
    assert "collect with --dense --depth 8 --children 10" in said


def test_a_change_has_no_price_on_a_log_that_lacks_the_policy(
    served: Path, narrow: Path, costs: Path
) -> None:
    """The alarm stands."""
    words = ("drift", served, "-p", SERVED, "--reference-prompts", 60, "--dense", narrow, "--json")
    said = specctl(*words, "--cost-model", costs)
    assert said.code == ALARM, said
    cost = json.loads(said.out)["price"]
    assert "are missing, in trees of --depth 2 --children 1" in cost["why_not"]
    assert (cost["num_prompts"], cost["static"]) == (0, None)
    assert cost["tokens_per_call_kept"]["value"] is None


@pytest.mark.parametrize("policy", ["chain:5", "eagle2", SERVED])
def test_a_deployed_policy_that_the_log_lacks_is_not_recalibrated(
    narrow: Path, costs: Path, tmp_path: Path, policy: str
) -> None:
    verb = ("recalibrate", narrow, "--cost-model", costs, "--held-out", 0.5, "--threads", 1)
    family = ("--family", "svip") if policy == SERVED else ()
    said = refuses(4, *verb, "-p", policy, *family, "-o", tmp_path / "again")
    assert f"replay of {policy}: the log holds " in said
    assert "collect with --dense --depth" in said
    assert not (tmp_path / "again" / "policy").exists()


@pytest.mark.parametrize("lacking", ["refit", "static", None])
def test_a_candidate_that_the_log_lacks_is_not_promoted(lacking: str | None) -> None:
    faster, rates = Interval(1.1, 1.05, 1.15), dict.fromkeys(COMPARED, Interval(9, 8, 10))
    support = {name: 0.98 if name == lacking else 0.995 for name in COMPARED}
    words: Any = ("chain", "svip", "eagle2", rates, support, faster, faster)
    tuned: Any = SimpleNamespace(result=SimpleNamespace(policies=()))
    facts: Any = None
    found = Recalibration(tuned, *words, is_same=False, is_static=False, facts=facts)
    assert found.is_better == (lacking is None)
    assert ("holds 98.0% of what" in found.why_not) == (lacking is not None)


SLOWER, FASTER, SAME = Interval(0.9, 0.85, 0.95), Interval(1.1, 1.05, 1.15), Interval(1, 1, 1)


@pytest.mark.parametrize(
    ("candidate", "over", "verdict"),
    [
        ("ar", SAME, "Better: ar, × 1.10 [1.05, 1.15] of the deployed policy, and the best static"),
        ("svip", FASTER, "Better: svip, × 1.10 [1.05, 1.15] of the deployed policy, × 1.10 [1.05"),
        ("svip", SLOWER, "Keep chain: it is not faster than the best static setting by more"),
        ("chain:2", SAME, "Keep chain: it is not faster than the best static setting by more"),
    ],
)
def test_in_place_of_a_static_setting_a_candidate_is_the_best_one_or_faster(
    candidate: str, over: Interval, verdict: str
) -> None:
    rates, support = dict.fromkeys(COMPARED, Interval(9, 8, 10)), dict.fromkeys(COMPARED, 1.0)
    words: Any = ("chain", candidate, "ar", rates, support, FASTER, over)
    tuned: Any = SimpleNamespace(result=SimpleNamespace(policies=()))
    facts: Any = None
    found = Recalibration(tuned, *words, is_same=False, is_static=True, facts=facts)
    data: Any = {"deployed": "chain", "candidate": candidate, "static": "ar"}
    data |= {"why_not": found.why_not or None, "proviso": None, "rates": {}, "marked": {}}
    data |= {"num_prompts": {"held_out": 1, "train": 1}, "notes": []}
    data |= {"against_deployed": FASTER.to_json(), "against_static": over.to_json()}
    assert recalibration_parts(data)[0].startswith(verdict)


def test_the_way_out_of_damage_is_one_that_drift_can_take(served: Path, tmp_path: Path) -> None:
    broken, part = tmp_path / "broken", TraceSet.open(str(served)).parts[0]
    rows, names = join_tables([part.tables(one) for one in part.segments]), part.prompt_ids
    with TraceWriter.open(broken, part.header) as writer:
        writer.commit(names[:30], drop_prompts(rows, names[30:]))
        writer.commit(names[30:60], drop_prompts(rows, (*names[:30], *names[60:])))
    last = max((broken / "rounds").iterdir())
    last.write_bytes(last.read_bytes()[:-9])
    words = ("-p", SERVED, "--reference-prompts", 20, "--false-alarm-prob", 1e-9)
    said = refuses(4, "drift", broken, *words)
    assert "the snapshot of the rest that `specctl traces snapshot TRACES --skip-damaged`" in said
    taken = json.loads(passes("traces", "snapshot", broken, "--skip-damaged", "--json").out)
    assert "prompts against" in passes("drift", f"{broken}@{taken['digest']}", *words).out


def test_traces_of_another_pair_are_refused() -> None:
    def traces(drafter: str) -> Any:
        pair = SimpleNamespace(target_digest="t", drafter_digest=drafter)
        header = SimpleNamespace(collect={"max_new_tokens": 24})
        return SimpleNamespace(fingerprint=pair, headers=[header])

    ours = traces("a")
    assert check_pair(ours, ours, "--dense") is ours
    with pytest.raises(TraceMismatchError, match="drafter_digest of --dense"):
        check_pair(traces("b"), ours, "--dense")


def test_a_better_policy_is_written_and_promoted(dense: Path, costs: Path, tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    passes("registry", "init", "--registry", registry)
    verb = ("recalibrate", dense, "--cost-model", costs, "--held-out", 0.5, "--threads", 1)
    bad = ("--policy", "chain:1")
    name = ("--promote", "tiny+head@cpu:all@prod", "--registry", registry)
    for wrong in ("Bad Name@prod", "--registry", registry), (name[1], "--registry", tmp_path):
        refuses(7, *verb, *bad, "-o", tmp_path / "again", "--promote", *wrong)
    assert not (tmp_path / "again").exists(), "refused before the search"
    said = specctl(*verb, *bad, "-o", tmp_path / "again", *name, "--json")
    assert said.code == 0, said
    found = json.loads(said.out)
    assert found["is_better"], found["why_not"]
    assert found["against_deployed"]["low"] > 1
    artifact = load_artifact(tmp_path / "again" / "policy")
    assert isinstance(artifact.policy.shape, StaticTree)
    entries = passes("registry", "log", "tiny+head@cpu:all", "--registry", registry).out
    assert "recalibrated on sha256:" in " ".join(entries.split())


def test_what_is_no_better_is_not_written(dense: Path, costs: Path, tmp_path: Path) -> None:
    """The setting that the search itself finds best, deployed already."""
    verb = ("recalibrate", dense, "--cost-model", costs, "--held-out", 0.5, "--threads", 1)
    first, again = tmp_path / "first", tmp_path / "again"
    passes("tune", dense, "--cost-model", costs, "--held-out", 0.5, "-o", first, "--threads", 1)
    found = json.loads(passes(*verb, "--policy", first / "policy", "-o", again, "--json").out)
    assert not found["is_better"]
    assert found["why_not"] == "the refit chose the deployed policy itself"
    assert found["promoted"] is None
    assert not (again / "policy").exists()
    assert json.loads((again / "recalibration.json").read_text("utf-8")) == found


def test_what_an_engine_serves_is_searched_again_for_it(
    dense: Path, costs: Path, tmp_path: Path
) -> None:
    """No tree takes the place of an artifact tuned for vLLM, though our own loop would run it."""
    search = (dense, "--cost-model", costs, "--held-out", 0.5, "--threads", 1)
    tuned, again = tmp_path / "tuned", tmp_path / "again"
    passes("tune", *search, "--for", "vllm", "-o", tuned)
    said = passes("recalibrate", *search, "-p", tuned / "policy", "-o", again, "--json")
    assert json.loads(said.out)["candidate"].startswith("chain:")


@pytest.mark.parametrize(
    ("deployed", "family"),
    [
        ("confidence:window=8:threshold=0.7", "confidence"),
        ("stop:signal=survival:threshold=0.3:window=5", "stop:signal=survival"),
        ("confidence:window=4:top_k=4:num_tokens=9", "confidence:top_k=4:num_tokens=9"),
        ("chain:5+survival:max_tokens=20", "chain+survival"),
    ],
)
def test_settings_of_words_are_searched_and_others_kept(deployed: str, family: str) -> None:
    found = families_to_search(resolve_policy(deployed).policy, None)
    assert found == (family,)
    [searched] = parse_families(found, ())
    assert searched.grid


def test_a_fit_is_made_again_with_its_own_options(dense: Path, costs: Path, tmp_path: Path) -> None:
    options = ("--weight", 5, "--beta", 0.2, "--held-out", 0.5)
    passes("fit", "survival", dense, "-o", tmp_path / "old", *options)
    verb = ("recalibrate", dense, "--cost-model", costs, "--held-out", 0.5, "--threads", 1)
    passes(*verb, "--policy", tmp_path / "old", "-o", tmp_path / "again", "--json")
    old, new = (load_artifact(tmp_path / place).manifest.fit for place in ("old", "again/fit"))
    assert old is not None
    assert new is not None
    assert {**old, "snapshots": 0} == {**new, "snapshots": 0}
    assert TraceSet.open(str(dense)).digest


def test_a_deployed_policy_is_compared_on_prompts_that_it_was_not_fitted_on(
    dense: Path, costs: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    passes("fit", "survival", dense, "-o", old, "--held-out", 0.5, "--seed", 3)
    verb = ("recalibrate", dense, "--cost-model", costs, "--held-out", 0.5, "--threads", 1)
    words = (*verb, "--policy", old, "--family", "threshold", "-o", tmp_path / "again")
    evidence = load_artifact(old).manifest.evidence
    assert evidence is not None
    split = split_prompts(TraceSet.open(str(dense)).prompt_ids, held_out_frac=0.5, seed=0)
    trained = evidence.was_fitted_on(split.held_out)
    assert len(trained) >= 5
    found = json.loads(passes(*words, "--json").out)
    assert found["num_prompts_left_out"] == len(trained)
    assert found["num_prompts"]["held_out"] == len(split.held_out) - len(trained)
    assert found["scored_on_training_prompts"] == []
    found = json.loads(passes(*words, "--all-prompts", "--json").out)
    assert found["num_prompts"]["held_out"] == len(split.held_out)
    assert found["scored_on_training_prompts"] == [str(old)]
    assert "old†" in specctl(*words, "--all-prompts").out


CERTIFIED = {
    "eagle2:depth=4+mars:theta=0.95": "fit mars RECENT.jsonl --shape eagle2:4x8/48 -o again",
    "adasd_stop+adasd_accept": "fit adasd RECENT.jsonl --shape adasd_stop -o again",
    "chain+ratio": "specctl run RECENT.jsonl --compare ar,chain,",
}


@pytest.mark.parametrize("policy", CERTIFIED)
def test_what_replay_cannot_judge_is_certified_instead(policy: str) -> None:
    with pytest.raises(UsageError) as refusal:
        families_to_search(resolve_policy(policy, allow_lossy=True).policy, None)
    assert CERTIFIED[policy] in refusal.value.hint


def test_one_prompt_in_four_is_logged_densely_beside_a_run(tmp_path: Path) -> None:
    """Both sets hold the rounds of `collect`, and the sample is of plain decoding's texts."""
    run, apart, plain = (tmp_path / name for name in ("run", "apart", "plain"))
    chosen = ("--limit", 8, "--max-new-tokens", 8, "--threads", 1, "--batch-size", 4)
    passes("run", "embedded", "--policy", SERVED, "--trace", run, "--dense-every", 4, *chosen)
    every = ("--dense-every", 4, "--depth", 6, "--children", 4)
    passes("collect", "embedded", "--policy", SERVED, "-o", apart, *every, *chosen)
    passes("collect", "embedded", "--policy", "ar", "-o", plain, *chosen)
    assert rounds(run).equals(rounds(apart))
    roots = ("prompt_id", "round_idx", "root_token_id")
    whole, sampled = rounds(plain).select(roots), rounds(tmp_path / "run-dense").select(roots)
    chosen_ids = sampled["prompt_id"].unique().implode()
    assert len(chosen_ids[0]) == 2
    assert sampled.equals(whole.filter(pl.col("prompt_id").is_in(chosen_ids)))
    assert sampled.equals(rounds(tmp_path / "apart-dense").select(roots))


def rounds(folder: Path) -> pl.DataFrame:
    """What rounds say, without their times, in order."""
    table = TraceSet.open(str(folder)).scan("rounds").collect()
    columns = ("prompt_id", "round_idx", "root_token_id", "num_drafted", "num_verified")
    names = pl.col("prompt_id").cast(pl.String)
    return table.with_columns(names).select(columns).sort("prompt_id", "round_idx")
