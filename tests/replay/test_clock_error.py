"""The error of a clock is in every interval of a time, and what it cannot tell is no verdict."""

from __future__ import annotations

import json
import re
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specctl.engines.export import engine_options
from specctl.logs.trace_set import TraceSet
from specctl.policy import Policy
from specctl.replay.config import TuneConfig
from specctl.replay.cost.files import check_clock, clock_of, save_cost_model
from specctl.replay.cost.live import deciding_policies
from specctl.replay.cost.model import (
    SD_OF_MEAN,
    DeciderCost,
    HeldOut,
    LiveCheck,
    TableCost,
    decider_of,
)
from specctl.replay.facts import why_plain
from specctl.replay.tune.search import TuneSearch
from specctl.replay.tune.tuning import prepare
from specctl.replay.tune.verdict import TuneVerdict
from specctl.runtime.load import Pair
from specctl.stats import Interval, Resamples, with_time_error
from tests.cli.command import Outcome, passes, specctl
from tests.replay.costs import linear_cost, table_model
from tests.replay.logs import random_traces
from tests.replay.tune_cases import Stated, is_stop, search, statics

CLOCK = 11
"""Exit code of a clock that failed its own check."""
QUICK = ("--threads", 1)


def measured(mape: float = 0.0, *, off_by: float = 0.0, waited: float = 0.0) -> TableCost:
    """A table with an error at held-out points, and a check of which the speed is off."""
    check = LiveCheck(
        policy="eagle2", num_tokens=100, predicted_us=1e4, measured_us=1e4 * (1 + off_by),
        waited=waited,
    )  # fmt: skip
    held_out = {part: HeldOut(num_points=3, mape=mape, worst=mape) for part in PARTS}
    return table_model(held_out=held_out, checks=(check,))


PARTS = ("verify", "draft.level")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log, and clocks: right, vague, off by 55 %, and one that times a policy's decisions."""
    folder = tmp_path_factory.mktemp("clocks")
    random_traces(folder / "traces", num_prompts=32, depth=3, top_k=2)
    times = {"batch_sizes": (1, 3), "level_us": (1.0, 1.0)}
    timed = {"stop": DeciderCost(policy="svip", **times)}
    others = {name: DeciderCost(policy=name, **times) for name in ("threshold", "ddd")}
    clocks = {
        "exact": measured(),
        "vague": measured(0.05),
        "off": measured(off_by=-0.55),
        "timed": measured().model_copy(update={"deciders": timed}),
        "others": measured().model_copy(update={"deciders": others}),
    }
    for name, model in clocks.items():
        save_cost_model(model, folder / f"{name}.json")
    rates = {"verify_fixed_us": 900.0, "verify_token_us": 9.0, "draft_token_us": 9.0}
    save_cost_model(linear_cost(**rates), folder / "stated.json")
    return folder


@pytest.fixture(autouse=True)
def _here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder; ladders without their picture, which takes longer than they do."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("specctl.replay.ladder.result.ladder_png", lambda _: b"")


REPLAY = ("replay", "traces", "-p", "ar", "-p", "chain:2")
VERBS: dict[str, tuple[object, ...]] = {
    "replay": (*REPLAY, *QUICK),
    "batch": (*REPLAY, "--batch-size", 2),
    "in order": (*REPLAY, "--batch-size", 2, "--in-order"),
    "ladder": ("ladder", "traces", "-o", "ladder", "-p", "chain:2"),
    "tune": ("tune", "traces", "-o", "tuned", *QUICK),
    "recalibrate": ("recalibrate", "traces", "-p", "chain:1", "-o", "again"),
}


def run(verb: str, clock: str, *words: object) -> Outcome:
    return specctl(*VERBS[verb], "--cost-model", f"{clock}.json", *words)


def document(verb: str, clock: str, *words: object) -> dict[str, Any]:
    found = run(verb, clock, *words, "--json")
    assert found.code == 0, found
    value: dict[str, Any] = json.loads(found.out)
    return value


def flat(text: str) -> str:
    return " ".join(text.split())


# --------------------------------------------------------------------------- in the interval


def drawn(error: float | None, policy: str, seed: int = 0) -> np.ndarray:
    """Sums of 40 prompts over resamples: tokens and times."""
    random = np.random.default_rng(3)
    table = np.stack([random.poisson(50, 40), random.gamma(20, 10, 40)], 1).astype(float)
    sums = Resamples.draw(40).drawn(table)
    return with_time_error(sums, [1], error, policy, seed)


def test_two_policies_draw_apart_and_one_policy_alike() -> None:
    one, same, other = drawn(0.1, "a"), drawn(0.1, "a"), drawn(0.1, "b")
    assert (one == same).all(), "its ratio to itself is 1, whatever the clock"
    ratio = np.log(one[1:, 1] / other[1:, 1])
    assert ratio.std() == pytest.approx(0.1 * np.sqrt(2), rel=0.08)
    assert (one[0] == drawn(None, "a")[0]).all(), "the figure itself is as without the error"
    assert (drawn(0.1, "a", seed=1) != one).any()


def test_intervals_of_times_cover_what_the_clock_gets_wrong() -> None:
    """Two policies of one true speed under clocks that err by 4 % each: 95 % intervals of the ratio
    hold 1 in 500 of 500 trials but for chance (one deviation is 1 %); without the error in them,
    in far fewer."""
    random, inside, without = np.random.default_rng(0), 0, 0
    num, error = 500, 0.04
    for trial in range(num):
        length = random.gamma(20, 10, 40)
        clock = np.exp(error * random.standard_normal(2))
        resamples = Resamples.draw(40, seed=trial, num=400)
        times = [length * random.normal(1, 0.05, 40) * off for off in clock]
        tables = [resamples.drawn(np.stack([length, of], 1)) for of in times]
        for is_told in (True, False):
            ours, theirs = (
                with_time_error(table, [1], error if is_told else None, name, trial)
                for table, name in zip(tables, "ab", strict=True)
            )
            found = resamples.read(ours[:, 1] / theirs[:, 1])
            holds = found.low <= 1 <= found.high
            inside, without = inside + (holds and is_told), without + (holds and not is_told)
    assert 0.92 < inside / num < 0.985
    assert without / num < 0.6


def test_the_error_is_that_of_the_part_of_a_round_that_is_known_worst() -> None:
    parts = {"verify": 0.02, "draft.level": 0.03, "prefill": 0.2, "draft.prefill": 0.3}
    held_out = {name: HeldOut(num_points=1, mape=m, worst=m) for name, m in parts.items()}
    assert table_model(held_out=held_out).time_error == pytest.approx(0.03 * SD_OF_MEAN)
    assert table_model().time_error is None


@pytest.mark.parametrize("verb", ["replay", "batch", "ladder", "tune", "recalibrate"])
def test_the_held_out_error_widens_every_interval_of_a_time(verb: str) -> None:
    """Of rates and of ratios of two policies; counts, and a policy beside itself, are as before."""

    def intervals(value: Any, path: str = "") -> dict[str, dict[str, float]]:
        if isinstance(value, dict) and {"value", "low", "high"} <= set(value):
            return {path: value}
        named = dict(enumerate(value)) if isinstance(value, list) else value
        inner = named.items() if isinstance(named, dict) else ()
        return {k: v for name, of in inner for k, v in intervals(of, f"{path}/{name}").items()}

    words = ("--family", "svip", "--grid", "window=2") if verb == "tune" else ()
    exact, vague = (intervals(document(verb, clock, *words)) for clock in ("exact", "vague"))
    assert exact.keys() == vague.keys()
    timed = re.compile(r"tokens_per_s|tpot_us|ttft_us|time_us|rate|against|_static|_plain|over")
    counted = re.compile(r"acceptance|verified|calls|utilisation|tcr|levels|per_step|occupancy")
    num_wider = 0
    for path, before in exact.items():
        after = vague[path]
        assert before["value"] == after["value"], path
        if before["low"] is None or counted.search(path):
            assert after == before, path
        elif timed.search(path) and before["value"] != 1:
            spread = [np.log(of["high"] / of["low"]) for of in (before, after) if of["low"] > 0]
            assert len(spread) < 2 or spread[1] > spread[0] + 0.05, path
            num_wider += 1
    assert num_wider >= 2
    assert "the clock of Test CPU (error of a time 6.3%; " in flat(run(verb, "vague").out)


def test_a_gain_within_the_clocks_error_is_no_win() -> None:
    """Of every held-out prompt × 1.05, so that prompts alone call it certain."""

    def time_us(policy: Policy, prompt: str) -> float:
        return 950.0 if is_stop(policy) else statics(policy, prompt)

    def verdict(error: float | None) -> TuneVerdict:
        return search("svip", time_error=error).run(Stated(time_us))[0]

    assert verdict(None).beats_static
    assert not verdict(0.05).beats_static
    assert verdict(0.005).beats_static


@pytest.mark.parametrize(
    ("ends", "others", "error", "says"),
    [
        (
            (0.8, 0.7, 1.0),
            (),
            None,
            "Drafting does not pay here: x is × 0.80 [0.70, 1.00] of plain",
        ),
        (
            (0.8, 0.7, 0.9),
            ((0.9, 0.7, 1.1),),
            None,
            "No setting is shown to be faster: x is × 0.80",
        ),
        ((1.58, 0.78, 3.29), (), 0.257, "; the clock's error is 26%: profile again."),
        ((1.58, 0.78, 3.29), (), 0.05, "; more prompts may show one."),
        ((1.2, nan, nan), (), None, "; more prompts may show one."),
    ],
)
def test_plain_decoding_is_kept_for_the_reason_that_is_known(
    ends: tuple[float, ...], others: tuple[tuple[float, ...], ...], error: float | None, says: str
) -> None:
    """A loss is called one only where no interval reaches a gain."""
    gains = [Interval(*one) for one in (ends, *others)]
    assert says in why_plain("x", gains[0], gains, error)


# --------------------------------------------------------------------------- off by 55 %


@pytest.mark.parametrize("verb", VERBS)
def test_a_clock_that_failed_its_check_gives_no_verdict_unless_forced(verb: str) -> None:
    found = run(verb, "off")
    assert (found.code, found.out) == (CLOCK, "")
    said = found.err.splitlines()[-1]
    assert "off by -55% in its own check (eagle2); verdicts need speeds within 10%" in said
    assert said.endswith("or go on with --force")
    found = run(verb, "off", "--force")
    assert found.code == 0, found
    assert "cost model: off by -55% in its own check (eagle2)" in flat(found.err)
    assert re.search(r"the clock of Test CPU \([^)]*off by -55% in its own check", flat(found.out))


def test_an_import_is_weighed_by_no_such_clock(tmp_path: Path) -> None:
    words = ("--cost-model", "off.json")
    log = tmp_path / "metrics.txt"
    log.write_text("")
    refused = specctl("import", log, *words)
    assert (refused.code, "off by -55%" in refused.err) == (CLOCK, True)
    assert specctl("import", log, *words, "--force").code != CLOCK


def test_the_page_warns_of_a_forced_clock() -> None:
    found = document("tune", "off", "--force")
    assert found["check_error"] == pytest.approx(-0.55)
    words = ("report", "--tune", "tuned/tune.json", "-o", "report.html", "--json")
    page = json.loads(passes(*words).out)
    assert any("off by -55% in its own check" in line for line in page["warnings"])
    assert "off by -55% in its own check" in page["sections"]["recommendation"]["reading"]
    page = json.loads(passes(*words, "--cost-model", "off.json").out)
    assert any(line.startswith("cost model: off by -55%") for line in page["warnings"])


@pytest.mark.parametrize(
    ("off_by", "waited", "fails"),
    [
        (-0.55, 0.0, True),
        (0.55, 0.0, True),
        (0.08, 0.0, False),
        (0.55, 0.33, False),  # without the waiting it is off by 4 %
        (-0.55, 0.67, True),  # the waiting makes it worse
        (2.0, 0.4, True),
    ],
)
def test_waiting_may_explain_a_check(off_by: float, waited: float, fails: bool) -> None:  # noqa: FBT001
    model = measured(off_by=off_by, waited=waited)
    assert (model.failed_check is not None) is fails
    assert ("disturbed, 33% of its time waiting" in str(clock_of(model, None))) is (waited == 0.33)
    check_clock(model, force=True)


def test_a_profile_that_failed_its_check_says_so_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cost_model.json"
    words = ("profile", "-o", out, "--device", "cpu", "--batch-sizes", "1", "--contexts", "16")
    for off_by, code in ((-0.55, CLOCK), (0.02, 0)):
        model = measured(off_by=off_by)
        monkeypatch.setattr("specctl.replay.cost.profile.profile", lambda *_, m=model, **__: m)
        found = specctl(*words)
        assert found.code == code, found
        assert out.read_bytes() == model.to_bytes(), "the file is written all the same"
        assert ("No verdict rests on it without --force" in flat(found.out)) is bool(code)


# --------------------------------------------------------------------------- decisions untimed

SVIP = "svip:window=3:threshold=0.5"


def test_replay_tells_no_gain_of_decisions_that_cost_nothing() -> None:
    shown = flat(run("replay", "exact", "-p", f"mine={SVIP}").out)
    assert "mine‡" in shown
    assert "mine ×" not in shown
    assert "‡ its own decisions cost nothing on this clock, so it cannot win; time them: " in shown
    assert f"specctl profile --policy {SVIP} -o cost_model.json" in shown
    assert document("replay", "exact", "-p", f"mine={SVIP}")["without_decision_cost"] == {
        "mine": SVIP
    }
    assert "mine‡" not in flat(run("replay", "timed", "-p", f"mine={SVIP}").out)
    stop = ("replay", "exact", "-p", "mine=p_min:threshold=0.4:window=2")
    assert "mine‡" in flat(run(*stop).out)
    assert "mine‡" not in flat(run(*stop, "--engine", "llamacpp").out), "its server decides"
    words = ("-p", f"mine={SVIP}", "--baseline", 3)
    assert "of mine" not in flat(run("replay", "exact", *words).out), "nor of a gain over it"


def test_a_stated_clock_tells_a_gain_with_what_it_takes_for_granted() -> None:
    """The H100's clock is of chains, and has no time for decisions."""
    beyond = "the clock holds beyond its range of nodes a level"
    for words, proviso in (
        (f"ar,mine={SVIP}", ", if decisions of mine take no time."),
        ("ar,eagle2:3x2/7", f", if {beyond}."),
        ("ar,chain:2", " the speed of ar."),
    ):
        clock = ("--cost-model", "h100-llama-3.1-8b-eagle")
        shown = specctl("replay", "traces", "-p", words, *clock, *QUICK).out
        verdict = flat(shown).partition(" synthetic")[0]
        assert verdict.endswith(proviso), verdict
    slower = specctl("replay", "traces", "-p", "chain:2,ar", *clock, *QUICK).out
    assert slower.startswith("chain:2 is the fastest for sure: next ar, × 0.65 ["), slower


FREE: dict[str, tuple[object, ...]] = {
    "replay": ("-p", f"mine={SVIP}"),
    "batch": ("-p", f"mine={SVIP}"),
    "in order": ("-p", f"mine={SVIP}"),
    "ladder": ("-p", f"mine={SVIP}"),
    "tune": ("--family", "svip"),
    "recalibrate": ("-p", SVIP, "--held-out", 0.5),
}


@pytest.mark.parametrize("verb", FREE)
def test_every_verb_takes_decisions_on_a_stated_clock_alike(verb: str) -> None:
    """They take no time, and a verdict for them says so."""
    shown = flat(run(verb, "stated", *FREE[verb]).out)
    assert "‡" not in shown
    if verb == "recalibrate":  # a gain over the deployed policy
        assert f"if decisions of {SVIP} take no time." in shown
        return
    [free] = document(verb, "stated", *FREE[verb])["free_decisions"]
    assert free == "mine" or free.startswith("svip:")
    is_won = re.match(r"(?:Fastest|Best): (?:mine|svip:)", shown)
    assert not is_won or re.search(r"if decisions of (mine|svip:…) take no time", shown)


def test_the_ladder_marks_it() -> None:
    for clock in ("exact", "timed"):
        shown = flat(run("ladder", clock, "-p", f"mine={SVIP}").out)
        assert ("mine‡" in shown) is (clock == "exact")


def judged(traces: TraceSet, clock: str, **engine: Any) -> Any:
    """A search in which stops are always twice as fast, by any clock."""

    def time_us(policy: Policy, prompt: str) -> float:
        return 500.0 if is_stop(policy) else statics(policy, prompt)

    config = TuneConfig(families=("svip",), grids=("window=2,3",))
    tuning = prepare(traces, config, Path(f"{clock}.json"), **engine)
    assert isinstance(tuning.search, TuneSearch)
    return tuning.run(Stated(time_us)).result


def test_tune_chooses_no_family_whose_decisions_cost_nothing(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    traces = TraceSet.open("traces")
    bare, timed = judged(traces, "exact"), judged(traces, "timed")
    assert (timed.beats_static, timed.without_decision_cost) == (True, None)
    assert (bare.beats_static, bare.chosen) == (False, bare.baseline)
    decides = {
        name: engine_options(TuneConfig.model_validate({"for_engine": name}))["decides"]
        for name in ("vllm", "llamacpp")
    }
    assert decides == {"vllm": False, "llamacpp": True}
    stated = judged(traces, "stated")
    [label] = stated.free_decisions
    assert stated.sentence().endswith(f", if decisions of {stated.names[label]} take no time.")
    of_engine = judged(traces, "exact", decides=True)
    assert of_engine.free_decisions is None
    assert (of_engine.beats_static, of_engine.without_decision_cost) == (True, None)
    [(label, words)] = bare.without_decision_cost.items()
    assert label.startswith("svip:")
    assert bare.standing(label).held_out.against.value == pytest.approx(2)
    assert next(bare.reasons()).startswith("No policy that can win beats")
    [line] = [line for line in caplog.messages if "so it cannot win" in line]
    assert line.startswith("svip: the clock lacks the time of its own decisions")
    [advised] = re.findall(r"profile --policy (\S+) -o", line)
    assert advised == words
    assert len(deciding_policies([advised], pair)) == 1


HINTED: dict[str, tuple[object, ...]] = {
    "replay": ("replay", "-p", f"mine={SVIP}"),
    "batch": ("batch", "-p", f"mine={SVIP}"),
    "ladder": ("ladder", "-p", f"mine={SVIP}"),
    "tune": ("tune", "--family", "svip"),
    "recalibrate": ("recalibrate", "--family", "svip", "--held-out", 0.5),
    "recalibrate, deployed": ("recalibrate", "-p", SVIP),
}


@pytest.mark.parametrize("row", HINTED)
def test_the_hint_times_all_that_the_clock_should_have(row: str, pair: Pair) -> None:
    """Followed, it times what the clock lacks, and again what it has."""
    verb, *words = HINTED[row]
    shown = flat(run(str(verb), "others", *words).out)
    [hint] = set(re.findall(r"specctl profile (.*?) -o cost_model.json", shown))
    given = deciding_policies(hint.removeprefix("--policy ").split(" --policy "), pair)
    assert {decider_of(one.policy) for one in given} == {"stop", "threshold", "ddd"}
    assert "-o cost_model.json --target TARGET --drafter DRAFTER" in shown, "not of the fixture"


def test_recalibrate_promotes_no_such_policy() -> None:
    words = ("--family", "svip", "--held-out", 0.5)
    found = document("recalibrate", "exact", *words)
    assert not found["is_better"]
    assert found["why_not"].startswith("decisions of the refit are not timed: time them: `specctl")
