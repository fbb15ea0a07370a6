"""`cost_model.json`: read strictly, written whole, and honest about where and when it holds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from specctl.errors import InputError, OutputError
from specctl.replay.cost import LinearCost, TableCost, load_cost_model, save_cost_model
from specctl.replay.cost.files import doubts, validity
from tests.replay.costs import FINGERPRINT, MACHINE, PUBLISHED, table_model

Change = Callable[[dict[str, Any]], object]


def edited(folder: Path, change: Change) -> Path:
    """A valid table with one thing changed; NaN is written as Python writes it."""
    value = json.loads(table_model().to_bytes())
    change(value)
    path = folder / "cost_model.json"
    path.write_text(json.dumps(value))
    return path


def set_verify(value: float, *place: int) -> Change:
    def change(model: dict[str, Any]) -> None:
        batch, context, size = place
        model["verify"]["us"][batch][context][size] = value

    return change


@pytest.mark.parametrize("model", [table_model(), PUBLISHED])
def test_round_trip(model: TableCost | LinearCost, tmp_path: Path) -> None:
    path = tmp_path / "cost_model.json"
    save_cost_model(model, path)
    assert load_cost_model(path) == model
    assert path.read_bytes() == model.to_bytes()
    path.write_text(json.dumps(json.loads(path.read_bytes()), indent=3))
    assert load_cost_model(path).digest == model.digest


def test_digest_follows_the_timings(tmp_path: Path) -> None:
    slower = load_cost_model(edited(tmp_path, set_verify(10.001, 0, 0, 0)))
    assert slower.digest != table_model().digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_verify(float("nan"), 1, 0, 2), r"verify\.us\.1\.0\.2: Input should be a finite"),
        (set_verify(-1.0, 0, 1, 0), r"verify\.us\.0\.1\.0: Input should be greater than 0"),
        (set_verify(0.0, 0, 1, 0), r"verify\.us\.0\.1\.0: Input should be greater than 0"),
        (set_verify(19.0, 0, 0, 2), r"verify: .*us\[0\]\[0\]\[2\] falls from 20 to 19"),
        (lambda m: m["draft"]["level"]["us"][0][0].pop(), r"draft\.level: .*us\[0\]\[0\] has 1"),
        (lambda m: m["verify"]["us"].pop(), r"verify: .*us has 1 entries, not 2"),
        (lambda m: m["verify"].update(sizes=[1, 8, 4]), r"verify: .*sizes\[2\] is 4 after 8"),
        (lambda m: m["verify"].update(sizes=[1, 4, 4]), r"verify: .*sizes\[2\] is 4 after 4"),
        (lambda m: m["verify"].update(sizes=[0, 4, 8]), r"verify\.sizes\.0: "),
        (lambda m: m["verify"]["iqr_us"][0][0].__setitem__(1, -1.0), r"verify\.iqr_us\.0\.0\.1"),
        (lambda m: m.pop("verify"), r"verify: Field required"),
        (lambda m: m.update(extra=1), r"extra: Extra inputs"),
        (lambda m: m.update(cost_model_version=2), r"cost_model_version: Input should be 1"),
        (lambda m: m.pop("cost_model_version"), r"cost_model_version: Field required"),
        (lambda m: m.update(kind="polynomial"), r"polynomial"),
        (lambda m: m.update(expires="tomorrow"), r"expires: "),
    ],
)
def test_refusals_name_field_and_index(change: Change, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words) as refusal:
        load_cost_model(edited(tmp_path, change))
    assert "cost_model.json" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_negative_rate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    path.write_text(json.dumps(PUBLISHED.model_dump() | {"draft_token_us": -0.1}))
    with pytest.raises(InputError, match="draft_token_us: Input should be greater than or equal"):
        load_cost_model(path)


def test_what_is_not_one_json_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    text = table_model().to_bytes().decode()
    for content in ("", "[]", text[:-1], text.replace('"kind"', '"num_samples":3,"kind"', 1)):
        path.write_text(content)
        with pytest.raises(InputError, match=r"cost\.json"):
            load_cost_model(path)
    with pytest.raises(InputError, match="No such file"):
        load_cost_model(tmp_path / "none.json")
    with pytest.raises(InputError, match="directory"):
        load_cost_model(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "cost_model.json"
    save_cost_model(table_model(), path)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match="No space left"):
        save_cost_model(PUBLISHED, path)
    assert load_cost_model(path) == table_model()
    assert [entry.name for entry in tmp_path.iterdir()] == ["cost_model.json"]


NOW = datetime(2027, 2, 19, 12, tzinfo=UTC)
"""The last second of `table_model`."""
ELSEWHERE = MACHINE.model_copy(update={"device": "NVIDIA H200", "dtype": "bfloat16"})
OTHER = FINGERPRINT.model_copy(update={"drafter_digest": "sha256:" + 64 * "b"})
ON_GPU = MACHINE.model_copy(update={"cuda": "13.0"})


@pytest.mark.parametrize(
    ("model", "given", "lines"),
    [
        (table_model(), {"pair": FINGERPRINT, "here": MACHINE.model_dump()}, []),
        (
            table_model(),
            {"here": ELSEWHERE.model_dump()},
            [
                "cost model: device was 'Test CPU', here it is 'NVIDIA H200'",
                "cost model: dtype was 'float32', here it is 'bfloat16'",
            ],
        ),
        (
            table_model(),
            {"pair": OTHER},
            ["cost model: measured for drafter 'small', not for 'small' of these weights"],
        ),
        (
            table_model(),
            {"now": NOW + timedelta(seconds=1)},
            [
                "cost model: expired 2027-02-19T12:00:00Z (measured 2026-11-21T12:00:00Z); "
                "measure again with specctl profile"
            ],
        ),
        (
            table_model(machine=ON_GPU),
            {"here": ON_GPU.model_dump()},
            [
                "cost model: times of the ordinary loop on CUDA, where rounds are captured by "
                "default; measure those with specctl profile --rounds graphs"
            ],
        ),
        (table_model(machine=ON_GPU, rounds="graphs"), {"here": ON_GPU.model_dump()}, []),
        (PUBLISHED, {"pair": OTHER, "now": NOW + timedelta(days=9999)}, []),
        (
            PUBLISHED,
            {"here": MACHINE.model_dump()},
            [f"cost model: linear form from {PUBLISHED.source!r}, not measured here"],
        ),
    ],
)
def test_what_may_not_hold_is_named(
    model: TableCost | LinearCost, given: dict[str, Any], lines: list[str]
) -> None:
    assert doubts(model, **{"now": NOW, **given}) == lines


def test_a_model_holds_for_ninety_days() -> None:
    measured = datetime(2026, 11, 21, 12, tzinfo=UTC)
    assert validity(measured) == ("2026-11-21T12:00:00Z", "2027-02-19T12:00:00Z")
