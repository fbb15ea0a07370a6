"""`cost_model.json`: read strictly, written whole, and honest about where and when it holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from specctl.errors import InputError, UsageError
from specctl.policy import Policy, SignalStop
from specctl.replay.cost.files import (
    doubts,
    load_cost_model,
    parse_linear,
    save_cost_model,
    unfailed_place,
    validity,
    warn_of_lost_times,
)
from specctl.replay.cost.model import DeciderCost, LiveCheck, TableCost
from specctl.replay.cost.rates import LinearCost
from tests.replay.costs import FINGERPRINT, LINEAR, MACHINE, table_model

Model = TableCost | LinearCost
Change = Callable[[dict[str, Any]], object]
TABLE = table_model()
GRAPHS = table_model(rounds="graphs", token_tiers=(8, 16, 32))


def edited(folder: Path, change: Change, model: Model = TABLE) -> Path:
    """A valid model with one thing changed; NaN is written as Python writes it."""
    value = json.loads(model.to_bytes())
    change(value)
    path = folder / "cost_model.json"
    path.write_text(json.dumps(value))
    return path


def put(value: Any, *place: Any) -> Change:
    def change(model: Any) -> None:
        *above, last = place
        for key in above:
            model = model[key]
        model[last] = value

    return change


@pytest.mark.parametrize("model", [TABLE, LINEAR])
def test_round_trip(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "cost_model.json"
    save_cost_model(model, path)
    assert load_cost_model(path) == model
    assert path.read_bytes() == model.to_bytes()
    path.write_text(json.dumps(json.loads(path.read_bytes()), indent=3))
    assert load_cost_model(path).digest == model.digest


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1", "'1' is no name=value"),
        ("step_us=fast", "step_us is 'fast', no number"),
        ("step_us=1,step_us=2", "a rate is repeated"),
        ("step_us=1", "verify_token_us: it is missing"),
    ],
)
def test_rates_that_are_refused_are_written_out(text: str, says: str) -> None:
    """With numbers in it, the written line is taken."""
    with pytest.raises(UsageError, match=says) as refused:
        parse_linear(text)
    line = refused.value.hint.removeprefix("write ").partition(", with")[0]
    assert parse_linear(line.replace("=N", "=7")).step_us == 7


def test_a_clock_that_passed_is_not_replaced_by_one_that_failed(tmp_path: Path) -> None:
    check = LiveCheck(policy="ar", num_tokens=9, predicted_us=1e4, measured_us=5e3)
    path, failed = tmp_path / "clock.json", table_model(checks=(check,))
    assert failed.failed_check is not None
    assert unfailed_place(failed, path) == path, "the first one"
    save_cost_model(failed, path)
    assert unfailed_place(failed, path) == path
    save_cost_model(TABLE, path)
    assert unfailed_place(failed, path) == tmp_path / "clock.failed.json"
    assert unfailed_place(TABLE, path) == path


def test_times_of_decisions_that_would_be_lost_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "clock.json"
    deciders = {
        name: DeciderCost(policy=words, batch_sizes=(1,), level_us=(3.0,))
        for name, words in (("stop", "svip"), ("hetero", "fits/hetero"))
    }
    save_cost_model(table_model(deciders=deciders), path)
    stop = Policy(shape=SignalStop(signal="confidence", threshold=0.4))
    warn_of_lost_times(path, [stop], FINGERPRINT)
    warn_of_lost_times(path, [], FINGERPRINT)
    warn_of_lost_times(path, [], FINGERPRINT.model_copy(update={"drafter": "another"}))
    one, both = caplog.messages
    assert "the decisions of hetero, which this run leaves out; add --policy fits/hetero to" in one
    assert "hetero and stop (confidence, svip, " in both
    assert both.endswith("; add --policy fits/hetero --policy svip to keep them")


US = ("verify", "us")
SHAPE = "us is not of the shape "
REFUSED: list[tuple[Model, Change, str]] = [
    (TABLE, put(float("nan"), *US, 1, 0, 2), "verify.us.1.0.2: not a finite"),
    (TABLE, put(0.0, *US, 0, 1, 0), "verify.us.0.1.0: not above 0"),
    (TABLE, put(19.0, *US, 0, 0, 2), "verify: us[0][0][2] falls from 20 to 19"),
    (TABLE, lambda m: m["draft"]["level"]["us"][0][0].pop(), f"draft.level: {SHAPE}(2, 1, 2)"),
    (TABLE, lambda m: m["verify"]["us"].pop(), f"verify: {SHAPE}(2, 2, 3)"),
    (TABLE, put([1, 8, 4], "verify", "sizes"), "verify.sizes: increasing"),
    (TABLE, lambda m: m.pop("verify"), "verify: it is missing"),
    (TABLE, put(1, "extra"), "extra: there is no such field"),
    (TABLE, put(2, "cost_model_version"), "cost_model_version: not 1"),
    (TABLE, lambda m: m.pop("cost_model_version"), "cost_model_version: it is missing"),
    (TABLE, put("tomorrow", "expires"), "expires: "),
    (GRAPHS, put([8, 4], "token_tiers"), "token_tiers: increasing"),
    (GRAPHS, put("ordinary", "rounds"), "token_tiers of ordinary rounds"),
    (GRAPHS, put(8, "capture_limit_tokens"), "beside a capture_limit_tokens"),
    (GRAPHS, put("eager", "rounds"), "rounds: not 'ordinary' or 'graphs'"),
    (LINEAR, put(-0.1, "draft_token_us"), "draft_token_us: not at least 0"),
]


@pytest.mark.parametrize(("model", "change", "words"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals_name_field_and_index(
    model: Model, change: Change, words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"cost_model\.json") as refusal:
        load_cost_model(edited(tmp_path, change, model))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_is_not_one_json_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    text = table_model().to_bytes().decode()
    for content in ("", "[]", text[:-1], text.replace('"kind"', '"num_samples":3,"kind"', 1)):
        path.write_text(content)
        with pytest.raises(InputError, match=r"cost\.json"):
            load_cost_model(path)
    with pytest.raises(InputError, match="is no file, and none of the named clocks"):
        load_cost_model(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read: a folder"):
        load_cost_model(tmp_path)


NOW = datetime(2027, 2, 19, 12, tzinfo=UTC)
"""The last second of `table_model`."""
OTHER = FINGERPRINT.model_copy(update={"drafter_digest": "sha256:" + 64 * "b"})
ON_GPU = MACHINE.model_copy(update={"cuda": "13.0"})
ORDINARY = "times of the ordinary loop on CUDA, where rounds are captured by default; measure those"
OLD = "expired 2027-02-19T12:00:00Z (measured 2026-11-21T12:00:00Z); measure again"
DOUBTS: list[tuple[Model, dict[str, Any], str]] = [
    (TABLE, {"pair": FINGERPRINT, "device": MACHINE.device}, ""),
    (TABLE, {"device": "NVIDIA H200"}, "device was 'Test CPU', here it is 'NVIDIA H200'"),
    (
        TABLE,
        {"engine": "llamacpp"},
        "times of specctl's own loop, not of llama.cpp, where a gain may be a loss; "
        "measure those with specctl profile --engine llamacpp",
    ),
    (TABLE, {"pair": OTHER}, "measured for drafter 'small', not for 'small' of these weights"),
    (TABLE, {"now": NOW + timedelta(seconds=1)}, f"{OLD} with specctl profile"),
    (table_model(machine=ON_GPU), {}, f"{ORDINARY} with specctl profile --rounds graphs"),
    (table_model(machine=ON_GPU, rounds="graphs"), {}, ""),
    (LINEAR, {"pair": OTHER, "device": "any", "now": NOW + timedelta(days=9999)}, ""),
]


@pytest.mark.parametrize(("model", "given", "line"), DOUBTS)
def test_what_may_not_hold_is_named(model: Model, given: dict[str, Any], line: str) -> None:
    assert doubts(model, **{"now": NOW, **given}) == [f"cost model: {line}"] * bool(line)


def test_a_model_holds_for_ninety_days() -> None:
    measured = datetime(2026, 11, 21, 12, tzinfo=UTC)
    assert validity(measured) == ("2026-11-21T12:00:00Z", "2027-02-19T12:00:00Z")
