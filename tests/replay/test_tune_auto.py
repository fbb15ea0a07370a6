"""`fit auto`: what is fitted, what of it races, and what a refused fit leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts import Artifact, load_artifact
from specctl.errors import OutputError, TraceEmptyError
from specctl.replay.tune.auto import Attempt, Fitter, attempts, families_of, with_attempts
from specctl.replay.tune.families import parse_families
from specctl.replay.tune.results import TuneResult, notes
from specctl.replay.tune.verdict import judge
from tests.artifacts.examples import PAIR, write_artifact
from tests.cli.command import refuses
from tests.replay.tune_cases import Stated, race, statics


def writes(kind: str) -> Fitter:
    def write(folder: Path) -> Artifact:
        return load_artifact(write_artifact(folder, kind))

    return Fitter(kind, write)


def no_spot(folder: Path) -> Artifact:
    raise TraceEmptyError("fit echo", expected="a sweet spot", found="none", fix="lower --delta")


def no_room(folder: Path) -> Artifact:
    raise OutputError(str(folder), expected="room", found="none", fix="free some")


def test_a_refused_fit_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    tried = list(attempts([writes("hetero"), Fitter("echo", no_spot), writes("ddd")], tmp_path))
    assert [attempt.folder is not None for attempt in tried] == [True, False, True]
    assert tried[1].sentence().startswith("fit echo: fit echo: expected a sweet spot, found none")
    assert tried[0].digest == load_artifact(tmp_path / "fits" / "hetero").digest


def test_a_place_that_cannot_be_written_ends_it(tmp_path: Path) -> None:
    tried = attempts([Fitter("hetero", no_room), writes("ddd")], tmp_path)
    with pytest.raises(OutputError):
        next(tried)


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_races_is_what_tune_knows(tmp_path: Path, is_shared: bool) -> None:  # noqa: FBT001
    tried = list(attempts([writes("hetero"), writes("c2t_ffn")], tmp_path))
    echo = tmp_path / "fits" / "echo"
    write_artifact(echo, "echo")
    tried.append(Attempt("echo", echo, "sha256:0"))
    names = families_of([*tried, Attempt("gbdt", refusal="no")], is_shared=is_shared)
    families = parse_families(names, (), PAIR)
    assert [family.name for family in families] == list(names)
    fitted = [family for family in families if family.artifact is not None]
    shared = [family for family in families if family.budget]
    assert len(fitted) == (7 if is_shared else 3)
    assert bool(shared) == is_shared
    assert (f"{echo}+echo_budget" in names) == is_shared


def test_a_shape_that_learns_is_not_put_under_a_shared_budget(tmp_path: Path) -> None:
    tried = list(attempts([writes("adasd"), writes("hetero")], tmp_path))
    names = families_of(tried, is_shared=True)
    online, offline = (str(attempt.folder) for attempt in tried)
    assert {online, offline, f"{offline}+survival"} <= set(names)
    assert f"{online}+survival" not in names


def test_the_result_and_the_card_say_what_became_of_the_fits() -> None:
    verdict = judge(race("svip").run(Stated(lambda policy, prompt: statics(policy, prompt))))
    facts = {"approximations": "none", "target": "t", "drafter": "d"}
    tried = [Attempt("hetero", Path("x"), "sha256:1"), Attempt("echo", refusal="no sweet spot")]
    result = with_attempts(TuneResult(facts, verdict), tried)
    assert result.to_json()["fits"][1] == {
        "fit": "echo",
        "artifact_digest": None,
        "refusal": "no sweet spot",
    }
    lines = notes(result)
    assert "fit hetero: artifact sha256:1" in lines
    assert "fit echo: no sweet spot" in lines


@pytest.mark.parametrize(
    "skip",
    [
        ["--skip", "c3t"],
        [f"--skip={n}" for n in ("hetero", "c2t", "gbdt", "distilled", "echo", "adasd")],
    ],
)
def test_names_to_skip_are_checked_before_anything_is_read(tmp_path: Path, skip: list[str]) -> None:
    line = refuses(2, "fit", "auto", tmp_path, "-o", tmp_path / "out", "--cost-model", "x", *skip)
    assert "--skip" in line
    assert not (tmp_path / "out").exists()
