"""The cost model of an engine: rates found again, held-out error, support, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from specctl.collect.trace_writer import TraceWriter
from specctl.errors import TraceMismatchError, UsageError
from specctl.logs.trace_set import TraceSet
from specctl.replay.cost.engine import fit_engine, least_absolute
from specctl.replay.cost.files import clock_of, doubts, load_cost_model, warn_outside
from specctl.replay.cost.model import Steps
from specctl.replay.cost.rates import EngineCost
from specctl.trace import arrow_schema
from tests.cli.command import USAGE, passes, refuses
from tests.collect.rounds import header
from tests.collect.sets import tables_of

ENGINE = {"name": "vllm", "version": "0.32.0"}
DOMAIN = {"hardware": ["A CPU"], "dtype": "float32", "workload": None}
RATES = {
    "verify_fixed_us": 7000.0,
    "verify_request_us": 0.0,
    "verify_token_us": 200.0,
    "verify_prompt_token_us": 150.0,
    "verify_cached_token_us": 3.0,
    "draft_fixed_us": 500.0,
    "draft_prompt_token_us": 40.0,
    "level_us": 1300.0,
    "level_request_us": 150.0,
    "host_us": 900.0,
    "host_request_us": 60.0,
}
"""About those of vLLM's CPU build on the embedded pair."""
Row = dict[str, Any]


def parts_of(step: Row) -> Row:
    """The times that a step takes by `RATES`, exactly."""
    batch, levels = step["batch_size"], step["step_levels"]
    cached = step["step_context_tokens"] - step["step_tokens"]
    prompt = step["step_prompt_tokens"]
    verify = RATES["verify_fixed_us"] + (step["step_tokens"] - prompt) * RATES["verify_token_us"]
    verify += prompt * RATES["verify_prompt_token_us"]
    draft = (levels > 0) * (RATES["draft_fixed_us"] + prompt * RATES["draft_prompt_token_us"])
    draft += levels * (RATES["level_us"] + batch * RATES["level_request_us"])
    host = RATES["host_us"] + batch * RATES["host_request_us"]
    return {
        "verify_us": verify + cached * RATES["verify_cached_token_us"],
        "draft_us": draft,
        "policy_us": 0.25 * host,
        "other_us": 0.75 * host,
    }


def served(num_steps: int, seed: int = 0, **fixed: int) -> list[Row]:
    """Steps of 1 to 8 requests, up to 5 levels; every tenth reads a prompt."""
    draw = np.random.default_rng(seed)
    steps = []
    for number in range(num_steps):
        batch = int(draw.integers(1, 9))
        step: Row = {"step_idx": number + 1, "batch_size": batch, "step_prompt_tokens": 0}
        step["step_levels"] = int(draw.integers(0, 6))
        step["step_tokens"] = batch * int(draw.integers(1, 7))
        if number % 10 == 0:
            step["step_prompt_tokens"] = int(draw.integers(10, 80))
            step["step_tokens"] += step["step_prompt_tokens"]
        step["step_context_tokens"] = step["step_tokens"] + batch * int(draw.integers(20, 200))
        step |= fixed
        steps.append(step | parts_of(step))
    return steps


def log_steps(
    root: Path, steps: list[Row], run: str = "r1", engine: Any = ENGINE, **domain: Any
) -> Path:
    """A set with two rows of every step, as two requests that met there."""
    twice = [step for step in steps for _ in range(2)]
    names = [f"{run}-{number:06d}" for number in range(len(twice))]
    tables = tables_of(names, rounds=1)
    rounds = tables["rounds"]
    for column in twice[0]:
        kind = arrow_schema("rounds").field(column)
        values = pa.array([step[column] for step in twice], kind.type)
        rounds = rounds.set_column(rounds.schema.get_field_index(column), kind, values)
    collect = {"target": "t", "drafter": "d", "domain": DOMAIN | domain}
    if engine is not None:
        collect["engine"] = engine
    with TraceWriter.open(root, header(collect=collect), resume=True) as writer:
        writer.commit(names, tables | {"rounds": rounds})
    return root


def fitted(*roots: Path) -> EngineCost:
    return fit_engine(TraceSet.open(*roots))


def test_rates_are_found_again_and_predict(tmp_path: Path) -> None:
    """Of two runs that count their steps alike, whose rows repeat the figures of their step."""
    root = log_steps(tmp_path / "a", served(300))
    log_steps(root, served(200, seed=1), run="r2")
    model = fitted(root)
    found = {name: getattr(model, name) for name in RATES}
    assert found == pytest.approx(RATES, rel=1e-3, abs=1)
    assert model.num_steps + model.held_out.num_steps == 500
    assert (model.num_prompt_steps, model.num_stalls, model.mean_over_median) == (40, 0, 1)
    assert model.held_out.num_steps == 100
    assert model.held_out.median < 1e-3 > model.held_out.p90
    assert abs(model.held_out.total) < 1e-3 > model.held_out.by_length
    assert (model.engine, model.engine_version, model.device) == ("vllm", "0.32.0", "A CPU")
    for step in served(20, seed=2):
        batch, tokens, levels = step["batch_size"], step["step_tokens"], step["step_levels"]
        context, prompt = step["step_context_tokens"] - tokens, step["step_prompt_tokens"]
        steps = Steps(batch, tokens, context / batch, levels, 1, 2, prompt_tokens=prompt)
        total = sum(parts_of(step).values())
        assert float(model.round_us(steps)) == pytest.approx(total, rel=1e-3)


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    model = fitted(log_steps(tmp_path / "a", served(100)))
    assert model.rises
    assert model.drafts
    differs, support = doubts(model, device="B")
    assert "device was 'A CPU'" in differs
    assert "levels 0 to 5" in support
    assert "times of vllm, not of llama.cpp" in doubts(model, engine="llamacpp")[0]
    assert not any("not of" in line for line in doubts(model, engine="vllm"))
    off = model.held_out.model_copy(update={"total": 0.25})
    assert model.failed_check is None
    check = model.model_copy(update={"held_out": off}).failed_check
    assert check == (pytest.approx(-0.2), f"{off.num_steps} held-out steps")
    assert "the clock of vllm 0.32.0 on A CPU (error of a time 0.0%; of " in str(
        clock_of(model, None)
    )
    prompt = float(model.prefill_us(100, drafts=False))
    assert prompt == pytest.approx(7000 + 100 * 150 + 900 + 60, rel=1e-3)
    also_drafted = float(model.prefill_us(100, drafts=True))
    assert also_drafted - prompt == pytest.approx(500 + 1300 + 150 + 100 * 40, rel=1e-3)


def slow(steps: list[Row], share: float, factor: float) -> list[Row]:
    """Some of the steps, drawn at random, take longer by a factor."""
    draw = np.random.default_rng(5)
    times = ("verify_us", "draft_us", "other_us", "policy_us")
    return [
        step | {name: step[name] * factor for name in times} if draw.random() < share else step
        for step in steps
    ]


def test_slow_steps_do_not_bend_the_rates_and_count_in_the_mean(tmp_path: Path) -> None:
    """A tenth of the steps takes five times as long, so that a mean step takes 1.4 times as long;
    least squares would be off by a third. One step pauses for a hundred times as long."""
    steps = slow(served(400), 0.1, 5.0)
    steps[17] |= {name: 100 * time for name, time in parts_of(steps[17]).items()}
    model = fitted(log_steps(tmp_path / "a", steps))
    factor = model.mean_over_median
    assert factor == pytest.approx(1.4, rel=0.1)
    assert model.num_stalls == 1
    found = {name: getattr(model, name) / factor for name in RATES}
    assert found == pytest.approx(RATES, rel=0.05, abs=25)
    assert model.held_out.median == pytest.approx(factor - 1, abs=0.02)
    assert model.held_out.p90 > 0.5, "the error says that some steps are slow"
    assert abs(model.held_out.total) < 0.1
    kept = [step for step in steps if not step["step_prompt_tokens"]]
    table = np.array([[1.0, step["step_tokens"]] for step in kept])
    squares = np.linalg.lstsq(table, [step["verify_us"] for step in kept], rcond=None)[0]
    assert squares[0] > 1.2 * RATES["verify_fixed_us"]


def test_stretches_of_time_are_held_out(tmp_path: Path) -> None:
    """The machine is half as fast in one of the two stretches that are held out: the error says
    so, and steps drawn at random would have hidden it in the fit."""
    steps = served(400)
    for step in steps[280:310]:
        step |= {name: 2 * step[name] for name in ("verify_us", "draft_us", "other_us")}
    model = fitted(log_steps(tmp_path / "a", steps))
    assert model.verify_fixed_us == pytest.approx(RATES["verify_fixed_us"], rel=1e-3)
    assert model.held_out.median < 0.1
    assert model.held_out.p90 == pytest.approx(0.5, abs=0.02)


def test_least_absolute_error_by_hand() -> None:
    """Of one rate the median of the ratios; a rate that would be negative is none."""
    one = np.ones((5, 1))
    values = np.array([1.0, 2.0, 3.0, 4.0, 100.0])
    assert least_absolute(one, values, np.ones(5)) == pytest.approx([3.0], rel=1e-2)
    # Weighed by 1 / scale: the median of 1 (thrice as heavy) and 2 to 4.
    scale = np.array([0.1, 1.0, 1.0, 1.0, 1.0])
    assert least_absolute(one, values, scale) == pytest.approx([1.0], rel=1e-2)
    table = np.column_stack([np.ones(20), np.arange(20.0)])
    falling = 50 - np.arange(20.0)
    assert least_absolute(table, falling, np.ones(20))[1] == 0


def test_steps_out_of_range_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = fitted(log_steps(tmp_path / "a", served(100, step_levels=3)))
    batch, levels = np.array([2, 2, 4, 8]), np.array([3, 5, 0, 3])
    warn_outside("it", [model.outside(Steps(batch, [4, 20, 8, 16], 100, levels, 1, 1))])
    assert caplog.messages == [
        "cost model, it: 25% of the steps have 10 tokens verified a request, and its times are of "
        "1 to 6",
        "cost model, it: 50% of the steps have 0 to 5 passes of the drafter, and its times are of "
        "3 to 3",
    ]
    with pytest.raises(UsageError, match="up to 8, the largest that vllm ran; 9 is larger"):
        model.round_us(Steps(9, 9, 100, 3, 1, 1))


def test_steps_that_are_too_few_or_contradict(tmp_path: Path) -> None:
    steps = served(100)
    with pytest.raises(UsageError, match="at least 50 steps of the engine; these traces hold 49"):
        fitted(log_steps(tmp_path / "few", steps[:49]))
    twice = [*steps, steps[-1] | {"verify_us": 1.0}]
    with pytest.raises(TraceMismatchError, match="step 100 of run r1 has different figures"):
        fitted(log_steps(tmp_path / "twice", twice))


OTHERS: list[tuple[Any, str, str]] = [
    (None, "A CPU", "rounds of specctl's own loop"),
    ({**ENGINE, "version": "0.33.0"}, "A CPU", r"vllm 0.32.0 .*vllm 0.33.0"),
    (ENGINE, "Another CPU", r"A CPU, .*Another CPU"),
]


@pytest.mark.parametrize(("engine", "device", "says"), OTHERS)
def test_traces_of_no_engine_or_of_two(engine: Any, device: str, says: str, tmp_path: Path) -> None:
    one = log_steps(tmp_path / "a", served(60))
    other = log_steps(tmp_path / "b", served(60), "r2", engine, hardware=[device])
    with pytest.raises(TraceMismatchError, match=says):
        fitted(one, other)


def test_the_command_writes_it_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the engine's name, so that the clock of specctl's own loop stays."""
    monkeypatch.chdir(tmp_path)
    root, out = log_steps(tmp_path / "a", served(100)), Path("vllm.json")
    found = json.loads(passes("profile", "--from", root, "--json").out)
    model = load_cost_model(out)
    assert found == {"out": str(out), "digest": model.digest, **model.model_dump(mode="json")}
    shown = " ".join(passes("profile", "--from", root, "-o", out, "--wide").out.split())
    assert "vllm 0.32.0" in shown
    assert "80 steps, 8 with prompts, 0 stalls" in shown
    for given in (("--quick",), ("--batch-sizes", "1,2"), ("--device", "cpu")):
        refused = refuses(USAGE, "profile", "--from", root, "-o", tmp_path / "other", *given)
        assert given[0] in refused
