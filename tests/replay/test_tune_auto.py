"""`fit auto`: the fits, the families that compete, and the trace of a refused fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts import Artifact, load_artifact
from specctl.errors import OutputError, TraceEmptyError
from specctl.replay.tune.candidates import parse_families
from specctl.replay.tune.tuning import Attempt, Fitter, attempts, families_of
from specctl.results import FitOutcome
from tests.artifacts.examples import PAIR, write_artifact
from tests.cli.command import refuses


def writes(kind: str) -> Fitter:
    def write(folder: Path) -> Artifact:
        return load_artifact(write_artifact(folder, kind))

    return Fitter(kind, write)


def no_spot(folder: Path) -> Artifact:
    raise TraceEmptyError("fit echo", expected="a sweet spot", found="none", fix="lower --delta")


def no_room(folder: Path) -> Artifact:
    raise OutputError(str(folder), expected="room", found="none", fix="free some")


def test_a_refused_fit_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    tried = list(attempts([writes("hetero"), Fitter("echo", no_spot), writes("ddd")], tmp_path))
    assert [attempt.folder is not None for attempt in tried] == [True, False, True]
    sentence = tried[1].outcome.sentence()
    assert sentence.startswith("fit echo: fit echo: expected a sweet spot, found none")
    digest = load_artifact(tmp_path / "fits" / "hetero").digest
    assert tried[0].outcome.sentence() == f"fit hetero: artifact {digest}"


def test_a_place_that_cannot_be_written_ends_it(tmp_path: Path) -> None:
    tried = attempts([Fitter("hetero", no_room), writes("ddd")], tmp_path)
    with pytest.raises(OutputError):
        next(tried)


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_families_are_known_to_tune(tmp_path: Path, is_shared: bool) -> None:  # noqa: FBT001
    tried = list(attempts([writes("hetero"), writes("c2t_ffn")], tmp_path))
    echo = tmp_path / "fits" / "echo"
    write_artifact(echo, "echo")
    tried.append(Attempt(outcome("echo", "sha256:0"), echo))
    names = families_of([*tried, Attempt(outcome("gbdt"))], is_shared=is_shared)
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


def outcome(name: str, digest: str | None = None) -> FitOutcome:
    refusal = None if digest else "no sweet spot"
    return FitOutcome(fit=name, artifact_digest=digest, refusal=refusal)


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
