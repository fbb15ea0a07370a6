"""The head's trainer: stopped anywhere, it goes on to what an undisturbed run gives."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.train_eagle3 import __main__ as eagle3
from scripts.train_eagle3 import evaluation, features, head, own_text, training
from scripts.train_eagle3.own_text import Row
from tests.runtime.toy import VOCAB, toy_config, toy_model

WORDS = "--layers 1 2 3 --steps 4 --rows 4 --draft-vocab 48 --intermediate-size 16 --threads 1"


def rows(num: int, seed: int, prompt_size: int = 5) -> list[Row]:
    ids = torch.randint(0, VOCAB, (num, 20), generator=torch.Generator().manual_seed(seed))
    return [Row("toy", tuple(row[:prompt_size]), tuple(row[prompt_size:])) for row in ids.tolist()]


@pytest.fixture
def place(tmp_path: Path) -> eagle3.Workplace:
    """A work folder with 24 rows of text, for a random Llama of four layers."""
    given = eagle3.new_parser(None, ()).parse_args(WORDS.split())
    given.target, given.work_dir = tmp_path / "target", tmp_path / "work"
    toy_model(1, toy_config(num_hidden_layers=4)).save_pretrained(given.target)
    place = eagle3.Workplace(given)
    own_text.append_rows(place.folder / "own_text.jsonl", rows(24, seed=1))
    return place


class Echo:
    """A decoder that answers each prompt with its ids reversed."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def loop(self, _: Sequence[Any]) -> "Echo":
        return self

    def run(self, requests: Sequence[Any]) -> Iterator[Any]:
        for request in requests:
            self.asked.append(request.prompt_ids)
            yield SimpleNamespace(request=request, token_ids=request.prompt_ids[::-1])


def test_own_text_goes_on_behind_a_half_written_line(tmp_path: Path) -> None:
    prompts = [Row("toy", row.prompt_ids) for row in rows(12, seed=2)]
    path, first, second = tmp_path / "own_text.jsonl", Echo(), Echo()
    own_text.write_rows(first, prompts, path, max_new_tokens=8, num_tokens=30)
    path.write_text(path.read_text("utf-8")[:-9], "utf-8")
    own_text.write_rows(second, prompts, path, max_new_tokens=8, num_tokens=1 << 60)
    found = own_text.read_rows(path)
    assert len(first.asked) == 6
    assert sorted(row.prompt_ids for row in found) == sorted(p.prompt_ids for p in prompts)
    assert all(row.answer_ids == row.prompt_ids[::-1] for row in found)
    assert not set(second.asked) & set(first.asked[:5])


def test_features_are_written_once(
    place: eagle3.Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times() -> list[int]:
        return [path.stat().st_mtime_ns for path in sorted(place.folder.rglob("*.safetensors"))]

    monkeypatch.setattr(features, "ROWS", 16)
    eagle3.run_features(place)
    full, partly = times()
    eagle3.run_features(place)
    assert times() == [full, partly]
    own_text.append_rows(place.folder / "own_text.jsonl", rows(4, seed=3))
    eagle3.run_features(place)
    assert times()[0] == full
    found = features.FeatureRows(place.features(place.target()), range(100))
    ids = found.example(found.places).token_ids
    assert ids.tolist() == [[*row.prompt_ids, *row.answer_ids] for row in place.rows()]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of autocast
def test_a_stopped_training_ends_as_an_undisturbed_one(
    place: eagle3.Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 1)
    eagle3.run_features(place)
    choose, num_calls = head.choose_slots, 0

    def stop_once(*args: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise KeyboardInterrupt
        return choose(*args)

    for name in ("whole", "stopped"):
        place.given.name = name
        torch.manual_seed(0)
        if name == "stopped":
            monkeypatch.setattr(head, "choose_slots", stop_once)
            with pytest.raises(KeyboardInterrupt):
                eagle3.run_head(place)
        eagle3.run_head(place)
    whole, stopped = (
        torch.load(place.folder / f"{name}.pt", weights_only=True) for name in ("whole", "stopped")
    )
    assert stopped["progress"]["step"] == 4
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, stopped["model"][name]), name
    assert (place.trained_head() / "model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of autocast
def test_steps_behind_the_end_of_every_answer_have_no_weight(place: eagle3.Workplace) -> None:
    (place.folder / "own_text.jsonl").unlink()
    own_text.append_rows(place.folder / "own_text.jsonl", rows(24, seed=1, prompt_size=18))
    eagle3.run_features(place)
    eagle3.run_head(place)
    (last, check) = map(json.loads, (place.folder / "head.jsonl").read_text("utf-8").splitlines())
    assert check["step"] == 4
    assert last["loss"] > 0
    assert last["agreement"][0] is None
    assert last["agreement"][-1] is not None


def test_the_card_tells_what_the_log_and_the_evaluations_hold(
    place: eagle3.Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = place.given
    given.steps, given.keep_every, given.out = 20, 10, tmp_path / "out"
    monkeypatch.setattr(training, "EVAL_EVERY", 10)
    monkeypatch.setattr(evaluation, "HELD_OUT_FRAC", 0.25)
    eagle3.run_features(place)
    eagle3.run_head(place)
    for steps, tau in ((10, 1.25), (20, 1.5)):
        found = {"num_prompts": 9, "max_new_tokens": 8, "chain": {"all": tau, "writing": tau + 1}}
        (place.trained_head(steps) / "evaluation.json").write_text(json.dumps(found))
    eagle3.run_publish(place)
    text = (given.out / "README.md").read_text("utf-8")
    num_rows = len(place.train_numbers())
    assert "| writing | 2.50 |" in text
    assert re.search(r"^\| 10 \| 0.0 \| .* \| 1.25 \|$", text, re.MULTILINE)
    assert f"| toy | {num_rows} | {num_rows * 15} |" in text
    assert "--steps 20" in text
    assert (given.out / "model.safetensors").exists()
    prompts = [Row("toy", row.prompt_ids) for row in (*place.rows(), *rows(3, seed=8))]
    assert own_text.read_answers(given.out / "answers.parquet", prompts) == place.rows()
