"""No policy is scored on prompts that it was fitted on: in `replay`, `ladder`, `tune`, `report`,
`run`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scripts import synthetic_trace
from specctl.artifacts import load_artifact
from specctl.artifacts.manifest import prompt_marks
from specctl.logs.trace_set import TraceSet
from specctl.records import HELD_OUT_FRAC
from specctl.runtime.words import NamedPolicy
from specctl.stats import MIN_PROMPTS, Split, split_prompts
from tests.cli.command import passes, specctl, write_lines
from tests.replay.logs import random_traces
from tests.replay.tune_cases import linear_file

NUM_PROMPTS = 48
QUICK = ("--threads", 1)
RATES = (
    "verify_fixed_us=1000,verify_token_us=10,verify_cached_token_us=0,draft_fixed_us=200,"
    "draft_token_us=5,step_us=100"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log, another with its prompts and ten more, two fits of one split, one of another."""
    folder = tmp_path_factory.mktemp("held-out")
    linear_file(folder / "cost.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic_trace, "POSITIONS", 32)
        random_traces(folder / "traces", num_prompts=NUM_PROMPTS, depth=3, top_k=2)
        random_traces(folder / "other", num_prompts=NUM_PROMPTS + 10, depth=3, top_k=2, seed=1)
        patch.chdir(folder)
        for name, seed in (("mine", 0), ("yours", 0), ("else", 5)):
            fit = ("fit", "survival", "traces", "-o", name, "--seed", seed, "--num-bins", 4)
            passes(*fit, "--depth", 2)  # which the log holds whole
    return folder


@pytest.fixture(autouse=True)
def _here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder; ladders without their picture, which takes longer than they do."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("specctl.replay.ladder.result.ladder_png", lambda _: b"")


def split(seed: int = 0, share: float = HELD_OUT_FRAC) -> Split:
    names = TraceSet.open("traces").prompt_ids
    assert len(names) == NUM_PROMPTS
    return split_prompts(names, held_out_frac=share, seed=seed)


def found_by(*words: object) -> tuple[dict[str, Any], str]:
    """The document of a run, and its warnings."""
    found = specctl(*words, "--json")
    assert found.code == 0, found
    document: dict[str, Any] = json.loads(found.out)
    return document, found.err


def words_of(*words: object) -> str:
    found = specctl(*words)
    assert found.code == 0, found
    return " ".join(found.out.split())


@cache
def tuned(family: str) -> tuple[dict[str, Any], str, str]:
    """The document of a run that is kept in `tuned-FAMILY`, its warnings and its table."""
    found = specctl(*TUNE[:-4], "-o", f"tuned-{family}", *QUICK, "--family", family)
    assert found.code == 0, found
    document: dict[str, Any] = json.loads(Path(f"tuned-{family}/tune.json").read_text("utf-8"))
    return document, found.err, " ".join(found.out.split())


REPLAY = ("replay", "traces", "-p", "chain:2", "--cost-model", "cost.json", *QUICK)
LADDER = ("ladder", "traces", "--linear", RATES, "-o", "ladder")
TUNE = ("tune", "traces", "--cost-model", "cost.json", "-o", "tuned", *QUICK)


# --------------------------------------------------------------------------- the artifact


def test_a_fit_keeps_the_prompts_that_it_was_fitted_on() -> None:
    evidence, sides = load_artifact("mine").manifest.evidence, split()
    assert evidence is not None
    assert evidence.was_fitted_on((*sides.train, *sides.held_out)) == set(sides.train)
    assert len(sides.held_out) >= MIN_PROMPTS
    assert evidence.fitted_on == prompt_marks(reversed(sides.train), prompt_marks(sides.train))


def test_a_tuning_keeps_those_that_chose_and_those_of_its_family() -> None:
    found, _ = found_by(*TUNE, "--family", "mine", "--held-out", 0.6)
    evidence, names = load_artifact("tuned/policy").manifest.evidence, split()
    chosen = set(split(share=0.6).train)
    assert evidence is not None
    if found["chosen"] not in ("mine", *(one["policy"] for one in found["policies"][:1])):
        chosen |= set(names.train)
    assert evidence.was_fitted_on((*names.train, *names.held_out)) == chosen


# --------------------------------------------------------------------------- scored on others


def test_replay_scores_all_rows_on_prompts_that_none_was_fitted_on() -> None:
    found, said = found_by(*REPLAY, "-p", "mine")
    held_out = len(split().held_out)
    assert {one["pooled"]["num_prompts"] for one in found["policies"]} == {held_out}
    assert found["num_prompts_left_out"] == NUM_PROMPTS - held_out
    assert "scored_on_training_prompts" not in found
    assert said == ""
    left_out = f"{NUM_PROMPTS - held_out} prompts left out: a policy here was fitted on them"
    assert left_out in words_of(*REPLAY, "-p", "mine")
    [whole] = found_by(*REPLAY)[0]["policies"]
    assert whole["pooled"]["num_prompts"] == NUM_PROMPTS, "nothing was fitted"


def test_a_load_is_simulated_of_those_prompts_alone() -> None:
    words = (*REPLAY, "-p", "mine", "--batch-size", 2)
    once, _ = found_by(*words, "--in-order")
    assert {one["num_requests"] for one in once["policies"]} == {len(split().held_out)}
    shuffled, _ = found_by(*words)
    assert shuffled["prompts_digest"] == once["prompts_digest"]
    assert shuffled["num_prompts_left_out"] == len(split().train)


def test_another_set_with_some_of_the_prompts() -> None:
    """The prompts of the fit are left out, whatever the digest of the set that holds them."""
    found, _ = found_by("replay", "other", *REPLAY[2:], "-p", "mine")
    assert found["num_prompts_left_out"] == len(split().train)
    assert found["policies"][0]["pooled"]["num_prompts"] == len(split().held_out) + 10


def test_one_split_is_that_of_all_verbs() -> None:
    """By their defaults: what the fit held out is what the ladder and tuning measure."""
    held_out = len(split().held_out)
    ladder, said = found_by(*LADDER, "-p", "mine", "-p", "yours=yours")
    chosen, also_said, _ = tuned("mine")
    replayed, _ = found_by(*REPLAY, "-p", "mine")
    assert (said, also_said) == ("", "")
    assert len({found["prompts_digest"] for found in (ladder, chosen, replayed)}) == 1
    for found in (ladder, chosen, replayed):
        assert found["scored_prompts"] == list(split().held_out), "listed, not as a mask of hashes"
    for found in (ladder, chosen):
        assert found["num_prompts"] == {"train": NUM_PROMPTS - held_out, "held_out": held_out}
        assert "num_prompts_left_out" not in found


def test_a_wider_split_is_cut_to_the_prompts_of_none() -> None:
    held_out, wider = len(split().held_out), split(share=0.5)
    for found, said in (
        found_by(*LADDER, "-p", "mine", "--held-out", 0.5),
        found_by(*TUNE, "--family", "mine", "--held-out", 0.5),
    ):
        assert found["num_prompts"] == {"train": len(wider.train), "held_out": held_out}
        assert found["num_prompts_left_out"] == len(wider.held_out) - held_out
        assert said == ""


# --------------------------------------------------------------------------- marked


def test_a_row_on_its_training_prompts_is_marked_and_wins_nothing() -> None:
    words = (*REPLAY, "-p", "mine", "--all-prompts")
    found, said = found_by(*words)
    [label] = found["scored_on_training_prompts"]
    assert {one["pooled"]["num_prompts"] for one in found["policies"]} == {NUM_PROMPTS}
    assert said == "", "it was asked for"
    shown = words_of(*words)
    assert f"{label}†" in shown
    assert "† fitted on some of these prompts, which flatters it: it cannot win." in shown
    assert "On the clock of" not in shown, "of the only other policy no gain is told"


def test_the_ladder_marks_a_policy_on_its_training_prompts() -> None:
    words = (*LADDER, "-p", "best=mine", "--all-prompts", "--held-out", 0.5)
    assert "best†" in words_of(*words)
    found = json.loads(Path("ladder/ladder.json").read_text("utf-8"))
    assert found["scored_on_training_prompts"] == ["best"]


def test_tune_chooses_no_family_that_was_fitted_on_the_held_out_prompts() -> None:
    found, said, shown = tuned("else")
    [label] = found["scored_on_training_prompts"]
    assert label.startswith("else")
    assert label not in (found["chosen"], found["winner_on_train"])
    assert (found["chosen"], found["beats_static"]) == (found["baseline"], False)
    assert "else: fitted on" in said
    assert "give --held-out 0.2 --seed 5, as it was fitted" in said
    assert "† fitted on some of these prompts" in shown
    card = Path("tuned-else/policy/README.md").read_text("utf-8")
    assert "| else:…† |" in card
    assert f"else:…: {label}" in card
    assert "† fitted on some of these prompts" in card


def test_the_page_says_what_the_choice_saw() -> None:
    [label] = tuned("else")[0]["scored_on_training_prompts"]
    page, _ = found_by("report", "--tune", "tuned-else/tune.json", "-o", "report.html")
    answer = page["sections"]["recommendation"]
    assert "never saw" not in answer["basis"]
    assert f"on some of which {label} was fitted" in answer["basis"]
    assert any(line.startswith("† fitted on") for line in answer["notes"])
    assert f"{label.partition(':')[0]}†" in Path("report.html").read_text("utf-8")
    tuned("mine")
    page, _ = found_by("report", "--tune", "tuned-mine/tune.json", "-o", "report.html")
    assert "which the choice never saw" in page["sections"]["recommendation"]["basis"]


def test_the_page_calls_no_marked_policy_the_best() -> None:
    found_by(*REPLAY, "-p", "best=mine", "--all-prompts", "-o", ".")
    page, _ = found_by("report", "--results", "replay.json", "-o", "report.html")
    policies = page["sections"]["policies"]
    assert "best" not in policies["reading"]
    assert any(line.startswith("† fitted on") for line in policies["notes"])


# --------------------------------------------------------------------------- advice


def advice(*words: object) -> str:
    """What the only warning of a run says behind the semicolon."""
    [line] = found_by(*words)[1].splitlines()
    assert "so it cannot win; " in line
    return line.partition("so it cannot win; ")[2]


def test_the_split_of_the_artifact_is_advised_where_it_helps() -> None:
    assert advice(*LADDER, "-p", "else") == "give --held-out 0.2 --seed 5, as it was fitted"
    again, said = found_by(*LADDER, "-p", "else", "--held-out", 0.2, "--seed", 5)
    assert "scored_on_training_prompts" not in again
    assert said == ""


def test_another_fit_is_advised_where_splits_differ() -> None:
    passes("fit", "survival", "traces", "-o", "one", "--seed", 3, "--num-bins", 4)
    found = advice(*REPLAY, "-p", "one", "-p", "else")
    assert found == f"fit it again with --held-out {HELD_OUT_FRAC:g} --seed 0"


def test_a_set_without_two_sides_of_eight_says_how_many_it_takes(tmp_path: Path) -> None:
    random_traces(tmp_path / "few", num_prompts=15, depth=2, top_k=2)
    passes("fit", "survival", tmp_path / "few", "-o", tmp_path / "fit", "--num-bins", 4)
    found = advice("replay", tmp_path / "few", *REPLAY[2:], "-p", tmp_path / "fit")
    assert found.startswith("collect 16 prompts or more and fit it again")


# --------------------------------------------------------------------------- one drawing


def test_the_ladder_stands_beside_the_tuned_setting_on_the_same_prompts_alone() -> None:
    marks = {}
    found_by(*TUNE)
    for share in (0.2, 0.5):
        found_by(*LADDER[:2], "--cost-model", "cost.json", "-o", "ladder", "--held-out", share)
        words = ("--tune", "tuned/tune.json", "--ladder", "ladder/ladder.json", "-o", "report.html")
        page, _ = found_by("report", *words)
        shown = page["sections"]["recommendation"]["marks"]
        marks[share] = [
            any(words in mark for _, mark in shown)
            for words in ("all outcomes known", "or prompts")
        ]
    assert marks == {0.2: [True, False], 0.5: [False, True]}


# --------------------------------------------------------------------------- decoded on others


@pytest.mark.parametrize(
    ("num_prompts", "options", "num_decoded", "num_left_out", "num_marked"),
    [
        (11, ("--compare", "ar,chain"), 8, 3, 0),
        (10, ("--compare", "ar,chain"), 10, 0, 3),  # seven others are too few
        (11, ("--compare", "ar,chain", "--all-prompts"), 11, 0, 3),
        (11, ("--policy", "chain"), 11, 0, 3),  # its texts are wanted
    ],
)
def test_a_run_leaves_prompts_of_a_fit_out_or_marks_the_policy(
    num_prompts: int,
    options: tuple[str, ...],
    num_decoded: int,
    num_left_out: int,
    num_marked: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the rule of `replay`; here `chain` is taken for a fit on three of the prompts."""
    fitted = {f"four:{number}" for number in (1, 2, 3)}
    file = write_lines(
        tmp_path / "p.jsonl",
        *(json.dumps({"id": f"four:{n}", "prompt": f"{n} + 3 is"}) for n in range(num_prompts)),
    )

    def fitted_on(policy: NamedPolicy, prompts: Any) -> set[str]:
        return fitted & set(prompts) if policy.label == "chain" else set()

    monkeypatch.setattr(NamedPolicy, "fitted_on", fitted_on)
    words = ("run", file, *options, "--max-new-tokens", 2, "--threads", 1)
    found = specctl(*words, "-o", tmp_path / "run")
    assert found.code == 0, found
    rows = json.loads((tmp_path / "run" / "results.json").read_text())
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["num_prompts"], facts["num_prompts_left_out"]) == (num_decoded, num_left_out)
    assert [row["num_prompts_fitted_on"] for row in rows][-1] == num_marked
    assert ("chain†" in found.out) == ("† fitted on some of these" in found.out) == bool(num_marked)
    assert (f"{num_left_out} prompts left out" in found.out) == bool(num_left_out)
    assert ("cannot win; give 8 or more others" in found.err) == (num_decoded == 10)
    if rows[1:]:
        assert ("ran on prompts of their own fits" in found.out) == bool(num_marked)
        passes("report", "--run", tmp_path / "run" / "results.json", "-o", tmp_path / "r.html")
        page = (tmp_path / "r.html").read_text("utf-8")
        assert ("chain†" in page) == ("† fitted on some" in page) == bool(num_marked)
        assert (f"{num_left_out} prompts left out" in page) == bool(num_left_out)
