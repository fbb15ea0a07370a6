"""The whole ladder: orders that must hold, tuning that must not look, figures by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specctl.errors import UsageError
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, Policy, StaticTree, SurvivalBudget
from specctl.replay.ladder import LadderConfig, build_ladder
from specctl.replay.ladder.build import LIMITS, RungSums, RungTally, TalliedRungs, make_rungs
from specctl.replay.ladder.static import chains, decide_static, fastest, trees
from specctl.replay.ladder.tally import Tally, take_requests, tally, tally_rounds
from specctl.replay.rounds import replay
from specctl.replay.summary import summarise
from specctl.results import Ladder, LadderResult
from specctl.stats import Resamples
from tests.cli.command import passes, refuses
from tests.replay.logs import random_traces
from tests.replay.positions import linear_clock
from tests.replay.target_logs import target_log

CONFIG = LadderConfig(num_kept=15, num_nodes=4000, num_folds=2)
POLICIES = [
    ("wide", Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=12))),
    ("short", Policy(shape=Chain(num_draft_tokens=1))),
]
LINEAR = (
    "verify_fixed_us=100,verify_token_us=4,verify_cached_token_us=0,"
    "draft_fixed_us=10,draft_token_us=1,step_us=1"
)
CLOCK = linear_clock(verify_token_us=4.0, draft_fixed_us=10.0, draft_token_us=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    random_traces(folder, num_prompts=8, depth=4, top_k=3, seed=6)
    return folder


def opened(folder: Path) -> DenseLog:
    from specctl.logs.trace_set import TraceSet

    return DenseLog.open(TraceSet.open(folder))


@pytest.fixture(scope="module")
def log(folder: Path) -> DenseLog:
    return opened(folder)


def prompt_ids(log: DenseLog) -> tuple[str, ...]:
    return tuple(name for chunk in log.chunks() for name in chunk.positions.prompt_ids)


@pytest.fixture(scope="module")
def ladder(log: DenseLog) -> Ladder:
    return build_ladder(log, prompt_ids(log), CLOCK, POLICIES, config=CONFIG)


@pytest.fixture(scope="module")
def made(log: DenseLog) -> TalliedRungs:
    return make_rungs(log, prompt_ids(log), CLOCK, POLICIES, is_sampled=False, config=CONFIG)


# --------------------------------------------------------------------------- orders


def test_the_rungs_stand_in_order(ladder: Ladder) -> None:
    assert [rung.kind for rung in ladder.rungs] == [
        *("plain", "chain", "tree", "policy", "policy"),
        *("features", "oracle", "clairvoyant", "ceiling"),
    ]
    rate = {rung.label: rung.tokens_per_s.value for rung in ladder.rungs}
    assert len({rung.num_tokens for rung in ladder.rungs}) == 1
    for label in rate.keys() - {"R_clair", "R_ceil"}:
        assert rate[label] <= rate["R_clair"] <= rate["R_ceil"]
    assert ladder.rung("ar").calls == ladder.rung("ar").num_tokens


def test_on_every_request_the_bounds_hold(made: TalliedRungs) -> None:
    time_us = {entry.label: entry.tally.sums[:, -1] for entry in made.rungs}
    for label in time_us.keys() - {"R_clair", "R_ceil"}:
        assert (time_us[label] >= time_us["R_clair"] - 1e-6).all(), label
    assert (time_us["R_clair"] >= time_us["R_ceil"] - 1e-6).all()


def test_the_tuned_static_rung_is_the_best_of_its_grid(log: DenseLog) -> None:
    """On the prompts that chose it, against replaying every setting of a width on its own."""
    summary = summarise(log, top_k=2)
    shapes = [*trees(4, 2, 15)]
    tuned = fastest(((summary, shape) for shape in shapes), CLOCK)
    runs = replay(log, [Policy(shape=shape) for shape in shapes])
    rates = [tally_rounds(run, CLOCK).tokens_per_us for run in runs]
    assert tuned.tokens_per_us == pytest.approx(max(rates), rel=1e-12)
    assert shapes[int(np.argmax(rates))] == tuned.shape
    assert tuned.num_settings == len(shapes)
    assert tuned.spec.startswith("eagle2:depth=")


def test_a_static_rung_is_charged_as_its_replay(log: DenseLog) -> None:
    for width, shapes in ((1, chains(4)), (3, trees(4, 3, 15)[::7])):
        summary = summarise(log, top_k=width)
        for shape in shapes:
            [run] = replay(log, [Policy(shape=shape)])
            found = tally(summary.positions, decide_static(summary, shape), CLOCK)
            assert found.sums == pytest.approx(tally_rounds(run, CLOCK).sums)


def test_at_a_larger_batch_verification_is_dearer(log: DenseLog, ladder: Ladder) -> None:
    """Fixed costs are shared, so a token's price in rounds rises: smaller trees win."""
    many = linear_clock(64, verify_token_us=4.0, draft_fixed_us=10.0, draft_token_us=1.0)
    found = build_ladder(log, prompt_ids(log), many, config=CONFIG)
    assert found.batch_size == 64
    assert found.rung("R_feat").verified_tokens < ladder.rung("R_feat").verified_tokens
    assert found.rung("R_feat").tokens_per_s.value > ladder.rung("R_feat").tokens_per_s.value


def test_an_estimate_that_is_right_is_worth_what_it_should_be(log: DenseLog) -> None:
    """The target draws by the drafter's probabilities here, so trees at the settled price are the
    best there are: they must beat the tuned static rung by far more than the noise."""
    found = build_ladder(log, prompt_ids(log), CLOCK, config=CONFIG)
    lead = found.rung("R_feat").against_static
    assert lead.low > 1.0


# ------------------------------------------------------------------- nothing is seen


def test_tuning_never_sees_held_out_prompts(log: DenseLog, made: TalliedRungs) -> None:
    """The texts of held-out prompts leave every tree at once: what was tuned does not move."""
    names, sides = prompt_ids(log), made.sides
    config = CONFIG.model_copy(
        update={"num_nodes": 10**6}
    )  # every node: a cut sample shares its size
    blind = target_log(log, without_path=frozenset(sides.held_out[:-1]))
    seen = target_log(log)
    first, second = (build_ladder(of, names, CLOCK, config=config) for of in (seen, blind))
    assert first.best_static == second.best_static
    for kind in ("chain", "tree", "features"):
        one, two = (next(r for r in each.rungs if r.kind == kind) for each in (first, second))
        assert (one.label, one.setting) == (two.label, two.setting)
        assert one.calls < two.calls
    touched = target_log(log, without_path=frozenset(sides.train[:-1]))
    third = build_ladder(touched, names, CLOCK, config=config)
    assert third.rung("R_feat").setting != first.rung("R_feat").setting


def test_requests_are_taken_whole(log: DenseLog) -> None:
    summary = summarise(log, top_k=2)
    requests = np.arange(summary.positions.num_requests) % 3 == 1
    part = take_requests(summary, requests)
    shape = trees(4, 2, 15)[5]
    whole = tally(summary.positions, decide_static(summary, shape), CLOCK)
    found = tally(part.positions, decide_static(part, shape), CLOCK)
    assert found.sums.tolist() == whole.of(requests).sums.tolist()


def test_sampled_texts_know_the_target_at_depth_1(log: DenseLog) -> None:
    known = target_log(log)
    found = build_ladder(known, prompt_ids(log), CLOCK, is_sampled=True, config=CONFIG)
    assert found.is_sampled
    assert found.rung("R_prob").tokens_per_s.value <= found.rung("R_clair").tokens_per_s.value


def test_equal_seeds_give_equal_ladders(log: DenseLog, ladder: Ladder) -> None:
    again = build_ladder(log, prompt_ids(log), CLOCK, POLICIES, config=CONFIG)
    assert again == ladder
    other = build_ladder(
        log, prompt_ids(log), CLOCK, POLICIES, config=CONFIG.model_copy(update={"seed": 1})
    )
    assert other != ladder


# ---------------------------------------------------------------------------- figures


def entry(kind: Any, label: str, times: list[float]) -> RungTally:
    """100 tokens a prompt in so many us."""
    sums = np.array([[10, 100, 90, 50, 40, us] for us in times], float)
    return RungTally(kind, label, "", Tally(sums))


def measured(prob_us: float = 250.0) -> tuple[list[RungTally], RungSums]:
    """Two prompts alike: tokens/s are 1e8 over the time."""
    entries = [
        entry("tree", "static", [500.0, 500.0]),
        entry("policy", "mine", [400.0, 400.0]),
        entry("features", "R_feat", [320.0, 320.0]),
        entry("oracle", "R_prob", [prob_us, prob_us]),
        entry("clairvoyant", "R_clair", [200.0, 200.0]),
    ]
    return entries, RungSums.of(entries, np.array([0, 1], np.int32), seed=0)


def test_distances_by_hand() -> None:
    """static 200k tokens/s, mine 250k, R_feat 312.5k, R_prob 400k, R_clair 500k."""
    entries, measure = measured()
    found = measure.measured(entries[1], "static")
    assert found.tokens_per_s.value == 250_000
    assert found.mean_acceptance_length.value == 10
    assert found.against_static.value == 1.25
    assert found.gap_closed is not None
    assert found.gap_closed.value == pytest.approx(50 / 200)
    assert found.gap_closed.low == found.gap_closed.high == pytest.approx(0.25)
    assert found.policy_regret is not None
    assert found.policy_regret.value == pytest.approx(62_500)
    split = measure.loss_split("static")
    assert split.drafter.value == pytest.approx(87_500)
    assert split.irreducible.value == pytest.approx(100_000)
    assert split.headroom.value == pytest.approx(1.0)
    assert measure.measured(entries[3], "static").policy_regret is None


def test_no_share_of_a_gap_that_is_not_there() -> None:
    _, measure = measured(prob_us=500.0)
    assert measure.gap_closed("mine", "static") is None


def test_a_gap_that_could_be_nothing_has_no_share() -> None:
    """The oracle gains on one prompt what it loses on the other: some resamples lead nowhere."""
    entries, _ = measured()
    entries[3] = entry("oracle", "R_prob", [100.0, 800.0])
    measure = RungSums.of(entries, np.array([0, 1], np.int32), seed=0)
    assert measure.gap_closed("mine", "static") is None


def test_intervals_are_paired_by_prompt() -> None:
    """Prompts differ tenfold, the policy is 1.25 times as fast on each: the ratio has no spread."""
    entries = [entry("tree", "static", [500.0, 5000.0]), entry("policy", "mine", [400.0, 4000.0])]
    measure = RungSums.of(entries, np.array([0, 1], np.int32), seed=0)
    ratio = measure.interval(measure.over("mine", "static"))
    assert (ratio.low, ratio.high) == pytest.approx((1.25, 1.25))
    assert isinstance(measure.resamples, Resamples)
    spread = measure.interval(measure.rate("mine"))
    assert spread.low < spread.value < spread.high


# --------------------------------------------------------------------------- refusals


def test_a_shared_budget_is_sent_to_the_simulation(log: DenseLog) -> None:
    shared = Policy(shape=Chain(), budget=SurvivalBudget(max_tokens=8))
    with pytest.raises(UsageError, match="which simulates the batch"):
        build_ladder(log, prompt_ids(log), CLOCK, [("shared", shared)], config=CONFIG)


@pytest.mark.parametrize("label", ["ar", "R_prob"])
def test_labels_of_the_ladder_are_taken(log: DenseLog, label: str) -> None:
    with pytest.raises(UsageError, match="leave it out"):
        build_ladder(log, prompt_ids(log), CLOCK, [(label, Policy(shape=Chain()))], config=CONFIG)


def test_a_log_without_static_trees_is_refused(tmp_path: Path) -> None:
    log = DenseLog.open(random_traces(tmp_path / "t", num_prompts=2, depth=5, top_k=3))
    summary = summarise(log, top_k=2)
    lacking = replace(summary, missing=np.ones_like(summary.missing))
    with pytest.raises(UsageError, match="--nested"):
        fastest(((lacking, shape) for shape in chains(2)), CLOCK)


def test_a_policy_beyond_the_log_is_marked(log: DenseLog) -> None:
    deep = ("deep", Policy(shape=Chain(num_draft_tokens=6)))
    found = build_ladder(log, prompt_ids(log), CLOCK, [deep], config=CONFIG)
    assert found.rung("deep").is_marked
    assert found.rung("deep").support < 0.99
    assert not found.rung("ar").is_marked


# -------------------------------------------------------------------- the command line


def test_the_command_writes_table_json_and_picture(folder: Path, tmp_path: Path) -> None:
    options = ("--linear", LINEAR, "-p", "chain:num_draft_tokens=2", "-o", tmp_path / "out")
    shown = passes("ladder", folder, *options).out
    for word in ("R_feat", "R_clair", "tokens/s", "gap closed", "Headroom", "irreducible"):
        assert word in shown
    stored = json.loads((tmp_path / "out" / "ladder.json").read_text())
    assert stored["kind"] == "ladder"
    assert LadderResult.model_validate_json(json.dumps(stored)).to_json() == stored
    assert [rung["label"] for rung in stored["rungs"]][-4:] == list(LIMITS.values())
    assert stored["rungs"][0]["tokens_per_s"]["low"] > 0
    assert (tmp_path / "out" / "ladder.png").read_bytes().startswith(b"\x89PNG")
    told = passes("ladder", folder, *options, "--json").out
    assert json.loads(told) == stored


def test_time_is_never_guessed(folder: Path, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "out")
    assert "specctl profile" in refuses(2, "ladder", folder, *out)
    both = ("--linear", LINEAR, "--cost-model", tmp_path / "c.json")
    assert "found both" in refuses(2, "ladder", folder, *out, *both)
    assert "Field required" in refuses(2, "ladder", folder, *out, "--linear", "step_us=1")
    for wrong in ("step_us=fast", "step_us=1,step_us=2", "nonsense", LINEAR + ",other_us=1"):
        assert "--linear" in refuses(2, "ladder", folder, *out, "--linear", wrong)
    flat = LINEAR.replace("verify_token_us=4", "verify_token_us=0")
    assert "flat" in refuses(2, "ladder", folder, *out, "--linear", flat)
    assert not (tmp_path / "out").exists()


def test_a_load_that_was_not_measured_is_refused_before_reading(log: DenseLog) -> None:
    class Narrow:
        def round_us(self, steps: Any) -> Any:
            raise UsageError("batch", expected="at most 4", found="8", fix="measure it")

    @contextmanager
    def never(label: str, total: int) -> Iterator[Any]:
        raise AssertionError(label)
        yield

    clock = replace(CLOCK, model=Narrow())
    with pytest.raises(UsageError, match="at most 4"):
        build_ladder(log, prompt_ids(log), clock, config=CONFIG, progress=never)


@pytest.mark.parametrize("share", ["0", "1", "-0.5", "nan"])
def test_both_sides_of_the_split_hold_prompts(folder: Path, tmp_path: Path, share: str) -> None:
    options = ("--linear", LINEAR, "-o", tmp_path / "out", "--held-out", share)
    assert "--held-out" in refuses(2, "ladder", folder, *options)


def test_a_place_that_cannot_be_written_is_refused_first(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = ("--linear", LINEAR, "-o", tmp_path / "file" / "out")
    assert "choose another --out" in refuses(6, "ladder", folder, *options)


def test_progress_counts_what_it_promised(log: DenseLog) -> None:
    shown: dict[str, list[int]] = {}

    @contextmanager
    def count(label: str, total: int) -> Iterator[Any]:
        done: list[int] = []
        yield lambda num=1: done.append(num)
        shown[label] = [total, sum(done)]

    build_ladder(log, prompt_ids(log), CLOCK, POLICIES, config=CONFIG, progress=count)
    assert list(shown) == ["positions read", "settings tuned"]
    assert all(total == done for total, done in shown.values()), shown
