"""`cost_model.json`: read strictly, written whole, and honest about where and when it holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from specctl.errors import InputError
from specctl.replay.cost.files import doubts, load_cost_model, save_cost_model, validity
from specctl.replay.cost.model import TableCost
from specctl.replay.cost.rates import LinearCost
from tests.replay.costs import FINGERPRINT, MACHINE, PUBLISHED, table_model

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


@pytest.mark.parametrize("model", [TABLE, PUBLISHED])
def test_round_trip(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "cost_model.json"
    save_cost_model(model, path)
    assert load_cost_model(path) == model
    assert path.read_bytes() == model.to_bytes()
    path.write_text(json.dumps(json.loads(path.read_bytes()), indent=3))
    assert load_cost_model(path).digest == model.digest


US = ("verify", "us")
REFUSED: list[tuple[Model, Change, str]] = [
    *(
        (TABLE, change, words)
        for change, words in [
            (put(float("nan"), *US, 1, 0, 2), r"verify\.us\.1\.0\.2: not a finite"),
            (put(0.0, *US, 0, 1, 0), r"verify\.us\.0\.1\.0: not above 0"),
            (put(19.0, *US, 0, 0, 2), r"verify: .*us\[0\]\[0\]\[2\] falls from 20 to 19"),
            (
                lambda m: m["draft"]["level"]["us"][0][0].pop(),
                r"draft\.level: us is not of the shape \(2, 1, 2\)",
            ),
            (lambda m: m["verify"]["us"].pop(), r"verify: us is not of the shape \(2, 2, 3\)"),
            (put([1, 8, 4], "verify", "sizes"), r"verify\.sizes: increasing"),
            (lambda m: m.pop("verify"), r"verify: it is missing"),
            (put(1, "extra"), r"extra: there is no such field"),
            (put(2, "cost_model_version"), r"cost_model_version: not 1"),
            (lambda m: m.pop("cost_model_version"), r"cost_model_version: it is missing"),
            (put("tomorrow", "expires"), r"expires: "),
        ]
    ),
    *(
        (GRAPHS, change, words)
        for change, words in [
            (put([8, 4], "token_tiers"), r"token_tiers: increasing"),
            (put("ordinary", "rounds"), "token_tiers of ordinary rounds"),
            (put(8, "capture_limit_tokens"), "beside a capture_limit_tokens"),
            (put("eager", "rounds"), "rounds: not 'ordinary' or 'graphs'"),
        ]
    ),
    (PUBLISHED, put(-0.1, "draft_token_us"), "draft_token_us: not at least 0"),
]


@pytest.mark.parametrize(("model", "change", "words"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals_name_field_and_index(
    model: Model, change: Change, words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words) as refusal:
        load_cost_model(edited(tmp_path, change, model))
    assert "cost_model.json" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_is_not_one_json_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    text = table_model().to_bytes().decode()
    for content in ("", "[]", text[:-1], text.replace('"kind"', '"num_samples":3,"kind"', 1)):
        path.write_text(content)
        with pytest.raises(InputError, match=r"cost\.json"):
            load_cost_model(path)
    with pytest.raises(InputError, match="no such file or folder"):
        load_cost_model(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read: a folder"):
        load_cost_model(tmp_path)


NOW = datetime(2027, 2, 19, 12, tzinfo=UTC)
"""The last second of `table_model`."""
OTHER = FINGERPRINT.model_copy(update={"drafter_digest": "sha256:" + 64 * "b"})
ON_GPU = MACHINE.model_copy(update={"cuda": "13.0"})
ORDINARY = "times of the ordinary loop on CUDA, where rounds are captured by default; measure those"
DOUBTS: dict[str, tuple[Model, dict[str, Any], list[str]]] = {
    "none here": (TABLE, {"pair": FINGERPRINT, "device": MACHINE.device}, []),
    "another machine": (
        TABLE,
        {"device": "NVIDIA H200"},
        ["device was 'Test CPU', here it is 'NVIDIA H200'"],
    ),
    "another drafter": (
        TABLE,
        {"pair": OTHER},
        ["measured for drafter 'small', not for 'small' of these weights"],
    ),
    "too old": (
        TABLE,
        {"now": NOW + timedelta(seconds=1)},
        ["expired 2027-02-19T12:00:00Z (measured 2026-11-21T12:00:00Z); "
         "measure again with specctl profile"],
    ),
    "the slower loop": (
        table_model(machine=ON_GPU),
        {},
        [f"{ORDINARY} with specctl profile --rounds graphs"],
    ),
    "captured": (table_model(machine=ON_GPU, rounds="graphs"), {}, []),
    "published, of no pair, machine and date": (
        PUBLISHED,
        {"pair": OTHER, "device": MACHINE.device, "now": NOW + timedelta(days=9999)},
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DOUBTS)
def test_what_may_not_hold_is_named(case: str) -> None:
    model, given, lines = DOUBTS[case]
    assert doubts(model, **{"now": NOW, **given}) == [f"cost model: {line}" for line in lines]


def test_a_model_holds_for_ninety_days() -> None:
    measured = datetime(2026, 11, 21, 12, tzinfo=UTC)
    assert validity(measured) == ("2026-11-21T12:00:00Z", "2027-02-19T12:00:00Z")
